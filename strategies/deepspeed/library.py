"""The library DeepSpeed: loaded when it is first used, joined to this run's processes, and let go of again."""

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

from trainwright.core.errors import ConfigurationError, require_package
from trainwright.core.process import Topology
from trainwright.processes.launcher import set_variable, unset_variable

# Collectives that DeepSpeed 0.19.8 knows by names of which torch 2.13 warns at every call.
_RENAMED = {"all_gather_function": "all_gather_single", "reduce_scatter_function": "reduce_scatter_single"}
_users = 0
_set_rank = False
_own_linear: Callable[..., torch.Tensor] = nn.functional.linear


def load_library(device_type: str, logging_level: int = logging.WARNING) -> Any:
    """Import DeepSpeed for one type of device; it is bound to the first one in a process."""
    set_variable("DS_ACCELERATOR", device_type)  # it would take an accelerator that it finds, whatever was asked for
    with quiet_imports():
        library: Any = require_package("deepspeed", purpose="DeepSpeedStrategy")
    library.utils.logger.setLevel(logging_level)
    found = library.accelerator.get_accelerator().device_name()
    if found != device_type:
        raise ConfigurationError(
            f"DeepSpeed works on {found!r} in this process, and accelerator={device_type!r} was asked for. It chooses "
            "its device once: start another process."
        )
    return library


def read_hostfile(path: str, include: str, exclude: str) -> dict[str, list[int]]:
    """Return the machines of DeepSpeed's hostfile with the numbers of their devices, after a filter.

    Raises:
        ValueError: The file or a filter is wrong.
        MissingPackageError: DeepSpeed is not installed.
    """
    with quiet_imports(), redirect_stdout(sys.stderr):  # its messages
        runner = require_package("deepspeed.launcher.runner", purpose="--deepspeed_hostfile")
        return dict(runner.parse_inclusion_exclusion(runner.fetch_hostfile(path), include, exclude))


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Ignore what is deprecated in what DeepSpeed loads of torch meanwhile, which nobody here can change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def join(library: Any, topology: Topology) -> None:
    """Let DeepSpeed use the process group that there is. Collective."""
    global _users, _own_linear, _set_rank
    if not _users:
        _own_linear, _set_rank = nn.functional.linear, False
    _set_rank |= set_variable("LOCAL_RANK", str(topology.local_rank))  # it reads it there and nowhere else
    _users += 1
    # On the CPU it would compile, for a minute, an operation for tensor-parallel inference, which nothing here uses.
    operations: dict[str, bool] = library.ops.__compatible_ops__
    unused = {name: usable for name, usable in operations.items() if "shm_comm" in name}
    operations.update(dict.fromkeys(unused, False))
    try:
        library.comm.init_distributed(verbose=False)
    finally:
        operations.update(unused)
    backend = library.comm.comm.cdb
    for attribute, present_name in _RENAMED.items():
        if hasattr(dist, present_name):
            setattr(backend, attribute, getattr(dist, present_name))


def leave(library: Any) -> None:
    """Forget everything that DeepSpeed keeps of the process group, of engines and of precisions. Not collective.

    It has no end of its own: the next run in this process would talk through groups that are gone, and compute under an
    autocast that it was not told of (0.19.8).
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
    autocast.TORCH_AUTOCAST_INITIALIZED, autocast.TORCH_AUTOCAST_DTYPE = False, None
    library.runtime.zero.parameter_offload.FWD_MODULE_STACK.clear()
    init = library.zero.Init
    init.apply_param_persistence, init.num_persisted_parameters, init.num_persisted_elements = False, 0, 0
    # Ranks compare the numbers of parameters and modules. They go on from stage to stage in a process that stays, as a
    # script's own does, and begin at 0 in those that are started for each stage.
    init.param_id = 0
    offload = library.runtime.zero.parameter_offload.DeepSpeedZeRoOffload
    offload._register_deepspeed_module.__defaults__[0][0] = 0
    nn.functional.linear = _own_linear  # stage 3 has put its own there
    # Stage 3 remembers what it may release in an unbounded cache of the class, and with it each run's whole model.
    coordinator = library.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator
    for cell in coordinator._PartitionedParameterCoordinator__params_to_release.__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Tell whether stage 3 holds a parameter: its own memory is empty while no module uses it."""
    return hasattr(parameter, "ds_id")


# Corrections of DeepSpeed 0.19.8


def keep_own_adagrad(engine: Any) -> None:
    """Have an engine step the Adagrad that it was given, with its groups, and not the one it has made in its place.

    Torch's Adagrad makes its states when it is constructed. DeepSpeed 0.19.8 constructs another one over its vectors,
    all in one group and with the defaults of the first: rates of groups are lost, with several groups the first step
    fails, and schedules move what nothing steps.
    """
    given, zero = engine.basic_optimizer, engine.optimizer
    made = getattr(zero, "optimizer", None)
    if made is given or not isinstance(made, torch.optim.Adagrad):
        return
    given.state.clear()  # those of the parameters as they were before they were cut
    given.state.update(made.state)
    zero.optimizer = given
    if hasattr(zero, "_link_all_hp_params"):  # stages 1 and 2 have linked as many groups as the other one has
        zero._link_all_hp_params()


def keep_unaligned_gradients(zero: Any) -> None:
    """Have gradients that begin in the middle of a disk's block stay on the host; the rest of them goes to the disk.

    DeepSpeed 0.19.8 cuts the end off a gradient whose length is no multiple of 256 elements, and reads it back to where
    it lay in its group's vector. Where that place is in the middle of a block, as behind a bias, the read goes wrong
    and nothing is said: weights of layers 1,500 wide are off by whole steps of Adam.
    """
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is None:
        return
    split, block = swapper._adjust_for_misaligned_lengths, swapper.numel_alignment

    def split_and_mark(tensors: list[torch.Tensor], offsets: list[int]) -> tuple[list[torch.Tensor], list[int]]:
        parts, places = split(tensors=tensors, offsets=offsets)
        for part, place in zip(parts, places, strict=True):
            if place % block:
                part.swappable = False  # DeepSpeed's own mark
        return parts, places

    swapper._adjust_for_misaligned_lengths = split_and_mark
