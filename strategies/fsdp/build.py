"""Initialization of a model, module by module, before it is sharded, and full tensors after a stage."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.checkpoint.format.quantized_state import build_quantized, flatten_quantized, is_quantized
from trainwright.core.errors import CheckpointError, ConfigurationError
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule
from trainwright.core.tree import map_tensors
from trainwright.processes.process_group import Processes
from trainwright.strategies.shards import gather_full
from trainwright.strategies.units import check_no_shards, replace_parameters

DISCARDED = "_weights_discarded"  # attribute of a task whose weights exist only in checkpoints


class MetaBuilding:
    """Construction of a task's model on the device `meta`, with a record of the weights that a checkpoint must provide.

    Args:
        everywhere: Build on `meta` on every rank (`meta_init`).
        others: Build on `meta` on every rank except rank 0 (`cpu_ram_efficient_loading`).

    Attributes:
        awaited: Names of the parameters and buffers that a checkpoint must still provide. `names_to_reset` fills it if
            the task has discarded its weights, and `ShardedState.load_model_state` removes the loaded names.
    """

    def __init__(self, *, everywhere: bool, others: bool) -> None:
        self._everywhere = everywhere
        self._others = others
        self.awaited: set[str] = set()

    def context(self, task: TaskModule, processes: Processes) -> AbstractContextManager[object]:
        """Return the context of `configure_model` on this rank. Not collective.

        Raises:
            ConfigurationError: The model is to be built on `meta`, and the task does not define `configure_model`.
        """
        if (self._everywhere or self._others) and not overrides(task, "configure_model", TaskModule):
            name = "meta_init" if self._everywhere else "cpu_ram_efficient_loading"
            raise ConfigurationError(
                f"{name}=True needs {type(task).__name__}.configure_model, which is not defined. Move the layers from "
                f"__init__ to configure_model, or remove {name}."
            )
        meta = self._everywhere or (self._others and processes.rank > 0)
        return torch.device("meta") if meta else nullcontext()

    def names_to_reset(self, task: nn.Module, processes: Processes) -> list[str]:
        """Return the names of tensors that have no values on any rank and must be initialized. Collective.

        If the task has discarded its weights, record the names in `awaited` instead, and return an empty list.
        """
        tensors = [*task.named_parameters(), *task.named_buffers()]
        # Rank 0's list. With `others` it is empty, because rank 0 broadcasts its values.
        names: list[str] = processes.broadcast_object([name for name, tensor in tensors if tensor.is_meta])
        self.awaited = set()
        if vars(task).get(DISCARDED):
            self.awaited.update(names)
            return []
        return names

    def check(self, task: TaskModule) -> None:
        """Raise a ConfigurationError if no checkpoint has provided the `awaited` weights. Not collective.

        Called after checkpoints are loaded, before the first step.
        """
        if self.awaited:
            discard_weights(task)  # the shards are uninitialized; a later stage may still load a checkpoint
            raise ConfigurationError(
                f"{type(task).__name__} discarded its weights at the end of its last stage "
                "(weights_after_stage='none'). Pass ckpt_path, for example ckpt_path='last', or create a new "
                f"{type(task).__name__}."
            )
        vars(task).pop(DISCARDED, None)


def materialize(task: nn.Module, module: nn.Module, names_to_reset: list[str], device: torch.device) -> None:
    """Allocate the full tensors of one of a task's modules on the device, and broadcast rank 0's values. Collective.

    Args:
        task: The task.
        module: The module of the task.
        names_to_reset: Names in the task of the tensors that have no values on any rank; see
            `MetaBuilding.names_to_reset`. `reset_parameters` of their modules initializes them.
        device: Device of the full tensors.

    Raises:
        ConfigurationError: A module with a tensor in `names_to_reset` does not define `reset_parameters`.
    """
    _allocate(task, module, names_to_reset, device)
    # DTensors are the shards of inner units, which were sharded before.
    for tensor in [*module.parameters(), *module.buffers()]:
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device).contiguous()  # torch 2.13 shards contiguous tensors only
            dist.broadcast(tensor.detach(), src=0)


def _allocate(task: nn.Module, module: nn.Module, names_to_reset: list[str], device: torch.device) -> None:
    """Replace a module's tensors on `meta` by tensors on the device, and initialize those in `names_to_reset`."""
    names = {id(tensor): name for name, tensor in [*task.named_parameters(), *task.named_buffers()]}
    new: dict[int, nn.Parameter] = {}  # by id of the parameter on `meta`, so that tied parameters stay tied
    to_reset: dict[nn.Module, list[str]] = {}  # attribute names of each module's tensors without values
    for owner in module.modules():
        for key, parameter in owner.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):  # a shard of an inner unit
                continue
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                new.setdefault(id(parameter), nn.Parameter(empty, requires_grad=parameter.requires_grad))
            if names.get(id(parameter)) in names_to_reset:
                to_reset.setdefault(owner, []).append(key)
        for key, buffer in owner.named_buffers(recurse=False):
            if buffer.is_meta:
                owner._buffers[key] = torch.empty_like(buffer, device=device)
            if names.get(id(buffer)) in names_to_reset:
                to_reset.setdefault(owner, []).append(key)
    replace_parameters(task, new)
    for owner, keys in to_reset.items():
        reset = getattr(owner, "reset_parameters", None)
        if reset is None:
            raise ConfigurationError(
                f"{type(owner).__name__} was built on the device 'meta' and does not initialize {', '.join(keys)}. "
                "Define reset_parameters(self) in it, or build it on the host."
            )
        with torch.no_grad():
            reset()


def unshard_task(
    task: TaskModule, optimizers: list[Optimizer], device: torch.device, *, weights: str, is_main: bool
) -> None:
    """Replace the shards of a task and its optimizers by full tensors on the host.

    Collective unless `weights` is `"none"`.

    Args:
        task: The task, which is changed in place.
        optimizers: The optimizers, which are changed in place. Only the main rank gets full states. With
            `weights="none"`, no rank does.
        device: Device on which shards are gathered, one tensor at a time.
        weights: Ranks that receive full weights: `"all"`, `"main"` or `"none"`. Other ranks get tensors on `meta`.
        is_main: This rank is the main one.
    """

    def unshard(tensor: torch.Tensor) -> Any:
        if is_quantized(tensor):
            full = map_tensors(unshard, flatten_quantized(tensor))
            return build_quantized(full, full["codes"].device)
        if weights == "none":
            return tensor.to("meta")
        return gather_full(tensor, device, keep=is_main)

    # States are unsharded first, one after the other, so that their shards are freed before weights are gathered.
    # `pop` removes the last reference to the shards. The states are stored again below, under the new parameters.
    states: list[dict[Any, Any]] = []
    for optimizer in optimizers:
        full_states = {}
        for parameter in list(optimizer.state):
            full_states[parameter] = map_tensors(unshard, optimizer.state.pop(parameter))
        states.append(full_states)

    old = list(task.parameters())  # keeps them alive, so that ids stay unique
    if weights == "none":
        discard_weights(task)
    else:
        keep = is_main or weights == "all"
        new: dict[int, nn.Parameter] = {}
        for parameter in old:
            weight = gather_full(parameter, device, keep=keep).detach()
            new[id(parameter)] = nn.Parameter(weight, requires_grad=parameter.requires_grad)
        replace_parameters(task, new)
    replaced: dict[Any, nn.Parameter] = dict(zip(old, task.parameters(), strict=True))
    task._apply(lambda tensor: tensor if tensor.is_meta else tensor.cpu())  # type: ignore[no-untyped-call]  # buffers

    for optimizer, full_states in zip(optimizers, states, strict=True):
        for parameter, state in full_states.items():
            optimizer.state[replaced[parameter]] = state
        for group in optimizer.param_groups:
            group["params"] = [replaced[parameter] for parameter in group["params"]]


def discard_weights(task: TaskModule) -> None:
    """Replace a task's shards by tensors of the full shapes on the device `meta`. Not collective."""
    new: dict[int, nn.Parameter] = {}
    for parameter in task.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")  # not sharded, unlike `empty_like`
        new[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    replace_parameters(task, new)
    vars(task)[DISCARDED] = True


def check_has_weights(task: nn.Module) -> None:
    """Raise a CheckpointError if a task has discarded its weights. Not collective."""
    if vars(task).get(DISCARDED):
        raise CheckpointError(
            f"{type(task).__name__} discarded its weights at the end of its stage (weights_after_stage='none'). Save "
            "before the fit ends, with ModelCheckpoint, or use weights_after_stage='main'."
        )


def check_full(model: nn.Module) -> None:
    """Raise a ConfigurationError if a model holds shards of an earlier run. Not collective."""
    check_no_shards(model, lambda parameter: isinstance(parameter, DTensor))


def widen(parameters: Iterable[nn.Parameter]) -> None:
    """Convert trained parameters in bfloat16 or float16 to float32, as mixed precision requires for optimizer steps."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
