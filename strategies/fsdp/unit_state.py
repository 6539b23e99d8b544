"""Access to private state of FSDP units in all supported versions of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """Return torch's groups of the parameters that one unit gathers. Empty for a unit without own parameters."""
    return _groups(unit._get_fsdp_state())


def reset_iteration(root: FSDPModule) -> None:
    """Reset the units after an interrupted forward or backward, as `FSDPModule.reset_iter_state` does. Not collective.

    Args:
        root: The root unit.
    """
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    # torch 2.9 does not have the method.
    state: Any = root._get_fsdp_state()
    if state._is_root is None:  # before the first forward
        return
    exchanges = state._comm_ctx
    iteration = state._state_ctx
    stream = state._device_handle.current_stream()
    for name in ("all_gather_state", "reduce_scatter_state"):
        _wait(stream, getattr(exchanges, name))
        setattr(exchanges, name, None)
    exchanges.post_forward_order.clear()
    for unit in iteration.all_states:
        unit._modules_to_run_forward.clear()
        unit._training_state = TrainingState.IDLE
        for group in _groups(unit):
            group.finalize_backward()  # waits for its collectives
            group._partial_reduce_output = None
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    iteration.iter_forward_root = None
    iteration.post_backward_final_callback_queued = False


def _groups(state: object) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)  # torch 2.9
    return [] if group is None else [group]


def _wait(stream: torch.Stream, pending: object) -> None:
    """Let a stream wait for a collective that torch has recorded. Do nothing if `pending` is None."""
    event = getattr(pending, "event", None)
    if event is not None:
        stream.wait_event(event)
