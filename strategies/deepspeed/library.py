"""Import of DeepSpeed, its connection to the process group, and workarounds for errors in the library."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError, require_package
from trainwright.core.process import Topology
from trainwright.processes.launcher import set_variable, unset_variable

# Collectives that DeepSpeed 0.19.8 calls by names that torch 2.13 deprecates with a warning at every call.
_RENAMED = {"all_gather_function": "all_gather_single", "reduce_scatter_function": "reduce_scatter_single"}
# State of this process's connection, which `connect` and `disconnect` change.
_users = 0  # runs of this process that use DeepSpeed
_set_rank = False  # `connect` has set LOCAL_RANK, which `disconnect` removes
_torch_linear: Callable[..., torch.Tensor] = nn.functional.linear  # before DeepSpeed replaces it


def load_library(device_type: str, logging_level: int = logging.WARNING) -> Any:
    """Import DeepSpeed for a device type. A process can use DeepSpeed with one device type only.

    Raises:
        ConfigurationError: DeepSpeed already uses another device type in this process.
        MissingPackageError: DeepSpeed is not installed.
    """
    set_variable("DS_ACCELERATOR", device_type)  # otherwise DeepSpeed uses any accelerator that it finds
    with quiet_imports():
        library: Any = require_package("deepspeed", purpose="DeepSpeedStrategy")
    library.utils.logger.setLevel(logging_level)
    used_type = library.accelerator.get_accelerator().device_name()
    if used_type != device_type:
        raise ConfigurationError(
            f"DeepSpeed already uses {used_type!r} in this process and cannot change to accelerator={device_type!r}. "
            "Start another process."
        )
    return library


def read_hostfile(path: str, include: str, exclude: str) -> dict[str, list[int]]:
    """Return the hosts in DeepSpeed's hostfile with the indices of their devices.

    `include` and `exclude` are DeepSpeed's filters, such as `"host1@host2:0,2"`. `""` disables a filter.

    Raises:
        ValueError: The file or a filter is wrong.
        MissingPackageError: DeepSpeed is not installed.
    """
    with quiet_imports(), redirect_stdout(sys.stderr):  # its messages
        runner = require_package("deepspeed.launcher.runner", purpose="--deepspeed_hostfile")
        return dict(runner.parse_inclusion_exclusion(runner.fetch_hostfile(path), include, exclude))


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Return a context that ignores the deprecation warnings of DeepSpeed's own imports and calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def connect(library: Any, topology: Topology) -> None:
    """Connect DeepSpeed to the existing process group. Collective. Each call needs one call of `disconnect`."""
    global _users, _torch_linear, _set_rank
    if not _users:
        _torch_linear = nn.functional.linear
        _set_rank = False
    _set_rank |= set_variable("LOCAL_RANK", str(topology.local_rank))  # DeepSpeed reads the local rank only there
    _users += 1
    # On the CPU, DeepSpeed would spend a minute compiling an operation for tensor-parallel inference. Mark it as not
    # available during the initialization.
    operations: dict[str, bool] = library.ops.__compatible_ops__
    availability = {name: usable for name, usable in operations.items() if "shm_comm" in name}
    operations.update(dict.fromkeys(availability, False))
    try:
        library.comm.init_distributed(verbose=False)
    finally:
        operations.update(availability)
    backend = library.comm.comm.cdb
    for attribute, new_name in _RENAMED.items():
        if hasattr(dist, new_name):  # not in older versions of torch
            setattr(backend, attribute, getattr(dist, new_name))


def disconnect(library: Any) -> None:
    """Reset DeepSpeed's global state after the last of several connections. Not collective.

    Without the reset, the next run in this process would use destroyed process groups and the previous autocast dtype
    (DeepSpeed 0.19.8).
    """
    global _users
    _users -= 1
    if _users:  # another run of this process still uses it
        return
    if _set_rank:
        unset_variable("LOCAL_RANK")
    library.comm.comm.cdb = None
    library.utils.groups._release_process_group_references(group=None)
    autocast = library.runtime.torch_autocast
    autocast.TORCH_AUTOCAST_INITIALIZED = False
    autocast.TORCH_AUTOCAST_DTYPE = None
    library.runtime.zero.parameter_offload.FWD_MODULE_STACK.clear()
    init = library.zero.Init
    init.apply_param_persistence = False
    init.num_persisted_parameters = 0
    init.num_persisted_elements = 0
    # Ranks compare ids of parameters and modules. Without the reset, the script's own process would keep counting from
    # stage to stage, but processes that are started for each stage begin at 0.
    init.param_id = 0
    offload = library.runtime.zero.parameter_offload.DeepSpeedZeRoOffload
    offload._register_deepspeed_module.__defaults__[0][0] = 0
    nn.functional.linear = _torch_linear  # stage 3 replaces it
    # Stage 3 caches releasable parameters in an unbounded cache of the class, which keeps each run's model alive.
    coordinator = library.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator
    for cell in coordinator._PartitionedParameterCoordinator__params_to_release.__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Return whether stage 3 shards a parameter. A sharded parameter is empty while no module uses it."""
    return hasattr(parameter, "ds_id")


def cpu_adam(groups: list[dict[str, Any]], *, adamw_mode: bool) -> Optimizer:
    """Return a DeepSpeedCPUAdam with these parameter groups. `adamw_mode=False` is Adam. Compiles it on first use."""
    module: Any = require_package("deepspeed.ops.adam", purpose="DeepSpeedStrategy")
    optimizer: Optimizer = module.DeepSpeedCPUAdam(groups, adamw_mode=adamw_mode)
    return optimizer


# Corrections of DeepSpeed 0.19.8


def keep_own_adagrad(engine: Any) -> None:
    """Make an engine step the user's Adagrad with its parameter groups, not the copy that DeepSpeed creates.

    Adagrad creates its states in its constructor. DeepSpeed 0.19.8 therefore constructs a second Adagrad over its flat
    vectors, with one group and default values. The learning rates of groups would be lost, several groups would make
    the first step fail, and schedulers would change an optimizer that is never stepped.
    """
    users_optimizer = engine.basic_optimizer
    zero = engine.optimizer
    stepped = getattr(zero, "optimizer", None)  # the optimizer that ZeRO steps
    if stepped is users_optimizer or not isinstance(stepped, torch.optim.Adagrad):
        return
    users_optimizer.state.clear()  # states of the unsharded parameters
    users_optimizer.state.update(stepped.state)
    zero.optimizer = users_optimizer
    if hasattr(zero, "_link_all_hp_params"):  # stages 1 and 2 have linked the groups of the copy
        zero._link_all_hp_params()


def keep_unaligned_gradients(zero: object) -> None:
    """Keep gradients that start in the middle of a disk block on the host instead of swapping them.

    DeepSpeed 0.19.8 swaps such a gradient to disk, apart from a remainder of less than 256 elements. It then reads the
    gradient back to its position in the group's vector. If that position is in the middle of a block, for example after
    a bias, the result is silently wrong: weights of layers 1,500 wide differ by full Adam steps.
    """
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is None:
        return
    split = swapper._adjust_for_misaligned_lengths
    block = swapper.numel_alignment  # elements per disk block

    def split_and_mark(tensors: list[torch.Tensor], offsets: list[int]) -> tuple[list[torch.Tensor], list[int]]:
        parts, places = split(tensors=tensors, offsets=offsets)
        for part, place in zip(parts, places, strict=True):
            if place % block:
                part.swappable = False  # DeepSpeed's own mark
        return parts, places

    swapper._adjust_for_misaligned_lengths = split_and_mark
