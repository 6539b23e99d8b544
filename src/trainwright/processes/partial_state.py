"""The processes of a script with its own loop: rank, order, and division of work and data."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from trainwright.core.errors import ConfigurationError, WorkerError, nearest
from trainwright.core.host.cpu_affinity import set_numa_affinity
from trainwright.core.host.device_types import properties
from trainwright.core.host.xla_library import load_xla
from trainwright.core.process import Topology, detect, variable
from trainwright.processes.devices import DistributedType, check_backend, device_type
from trainwright.processes.process_group import Processes, ProcessGroup, length_of_time
from trainwright.processes.process_shares import share_of
from trainwright.processes.rank_position import user_line

_JOINED = "torch.distributed's process group, which the script had created"
_OPTIONS = ("backend", "timeout", "init_method")
_LONGEST_POLL_S = 0.1
_turns = itertools.count()  # numbers of blocks that one process runs first; a user's store outlives a state
_open_blocks: list[str] = []  # the store's keys of such blocks that this process is in, the outermost one first


@dataclass(frozen=True)
class _GroupOptions:
    """Options of the process group. None is the default."""

    backend: str | None = None
    timeout: timedelta | None = None


class PartialState:
    """State of the processes of a script, and operations across them, with Accelerate's names.

    All instances share one state. The first instance detects this process's rank from the launcher's variables and sets
    the current accelerator. With several processes, it also creates torch's default group, or uses the script's group.
    Every process must then create an instance, which blocks until all processes have done so. A single process has no
    group. The group stays open until the process ends, and a `Trainer` in the same script uses it.

    Args:
        cpu: use the CPU even if there is an accelerator. Default: False.
        kwargs: `backend` (default: gloo on the CPU, the vendor's library on accelerators), `timeout` of a collective (a
            timedelta, seconds, or text; default: `"30 min"`), and `init_method` (only `"env://"`).

    Attributes:
        device: device of this process. `local_process_index`, modulo the number of visible accelerators, is the index
            of its accelerator. Several processes on a machine with MPS use the CPU.
        backend: backend of torch's default group; None for a single process.
        distributed_type: see `DistributedType`.
        num_processes: number of processes on all nodes.
        process_index: index of this process on all nodes.
        local_process_index: index of this process on its node.
        debug: True to compare dtypes in `pad_across_processes`, too. The variables `TRAINWRIGHT_DEBUG_MODE=1` and
            `ACCELERATE_DEBUG_MODE=1` set it. Shapes and dtypes that must be equal are always compared.
        fork_launched: True if the variable `FORK_LAUNCHED` is set because a notebook forked this process.
        processes: the communication of the processes on the host.
        topology: this process's topology, and the variables it was detected from.

    Raises:
        ConfigurationError: an argument is unknown, invalid or contradicts the existing state, or this node has more
            processes than accelerators, unless one is visible to each process or the backend is gloo.
        MissingPackageError: the backend is `"ccl"`, and its package is not installed.
        TimeoutError: some processes have not joined.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    device: torch.device
    backend: str | None
    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int
    debug: bool
    fork_launched: bool
    processes: Processes
    topology: Topology
    _cpu: bool
    _options: _GroupOptions
    _world: Any  # torch's default group when this state was created; None without one
    _joined: bool  # False once the group was closed, so that `joined` opens it again
    _first_store: Any  # a store of `_first_process_first`, which waits without a collective; None before its first use
    _created: str  # the line of the user's code that created the state; missing after unpickling in a new process

    def __init__(self, cpu: bool = False, **kwargs: object) -> None:
        self.__dict__ = self._shared_state
        options = _group_options(kwargs)
        if self.initialized:
            self._compare(cpu, options)
            self._refresh()
            return
        # The shared state is set only after the processes have connected, so that a failure leaves no state.
        fields = _initial_fields(cpu, options)
        fields["processes"].open(fields["device"])
        fields["_world"] = _default_group()
        fields["_joined"] = True
        fields["_created"] = user_line()
        if fields["num_processes"] > 1:
            fields["backend"] = dist.get_backend()
            atexit.register(_leave)
        self.__dict__.update(fields)
        self.set_device()
        if _flag("ACCELERATE_CPU_AFFINITY"):
            set_numa_affinity(self.local_process_index)

    def __getattr__(self, name: str) -> Any:
        if name in type(self).__annotations__ and not self.__dict__:
            raise AttributeError(f"PartialState has no {name} since its state was reset. Call PartialState() again.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getstate__(self) -> tuple[bool, _GroupOptions]:
        return self._cpu, self._options

    def __setstate__(self, state: tuple[bool, _GroupOptions]) -> None:
        """Use the state of the process that unpickles. A new state connects to other processes when needed."""
        self.__dict__ = self._shared_state
        if not self.initialized:
            cpu, options = state
            self.__dict__.update(_initial_fields(cpu, options))

    def __repr__(self) -> str:
        kind = str(self.distributed_type)
        if self.backend:
            kind += f"  Backend: {self.backend}"
        return (
            f"Distributed environment: {kind}\nNum processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\nLocal process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @staticmethod
    def _reset_state() -> None:
        """Reset the shared state of all instances. The process group is not changed."""
        PartialState._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """True if this process has a state: after the first `PartialState()`, until the state is reset."""
        return bool(self.__dict__)

    @property
    def use_distributed(self) -> bool:
        """True with several processes."""
        return self.distributed_type != DistributedType.NO and self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """True on the first process of all nodes."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on the first process of its node."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True on the last process of all nodes."""
        return self.process_index == self.num_processes - 1

    @property
    def default_device(self) -> torch.device:
        """The machine's accelerator, without an index. The CPU on a machine without one."""
        return torch.device(device_type("auto"))

    def set_device(self) -> None:
        """Make this process's accelerator torch's current device. No effect on the CPU."""
        if self.device.type == "xla":
            load_xla()
        elif self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)

    def wait_for_everyone(self) -> None:
        """Wait for every process. Collective; blocks on the host and not on the device."""
        self.joined().barrier()

    @contextlib.contextmanager
    def split_between_processes(self, inputs: object, apply_padding: bool = False) -> Iterator[Any]:
        """Context manager that yields this process's part of `inputs`: consecutive samples. Not collective.

        Every process must pass the same inputs. If their number is not divisible, the first processes get one sample
        more. With fewer samples than processes, the last parts are empty. A single process gets `inputs` unchanged.

        Args:
            inputs: a list, a tuple, a tensor (split along its first dimension; its device does not change), a
                `datasets.Dataset`, or a dict of these, also nested, all of one length.
            apply_padding: repeat the last sample of a part until all parts are equally long. An empty part is filled
                with the last input, if any. Default: False.

        Raises:
            ConfigurationError: the values of a dict have different lengths.
            TypeError: an object cannot be split, for example a string.
        """
        yield share_of(inputs, self.process_index, self.num_processes, pad=apply_padding)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the body on the main process, then on all other processes. Collective.

        An error of the main process is raised there, and as a `WorkerError` on the waiting processes.

        Raises:
            TimeoutError: the main process took longer than the group's `timeout`. Raised on the waiting processes.
            WorkerError: the main process has failed. Raised on the waiting processes.
        """
        with self._first_process_first(self.is_main_process, "main"):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the body on each node's first process, then on the node's others. Errors: see `main_process_first`."""
        with self._first_process_first(self.is_local_main_process, f"node {self.topology.node_rank}"):
            yield

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function so that it runs on the first process only, and returns None on other processes."""
        return self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function so that it runs on the first process of each node only."""
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function so that it runs on the last process only."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function so that it runs on process `process_index` only. A single process always runs it.

        Raises:
            ConfigurationError: the index is missing or out of range.
        """
        _check_index("process_index", process_index, self.num_processes)
        return self._only(function, lambda: not self.use_distributed or self.process_index == process_index)

    def on_local_process(
        self,
        function: Callable[..., Any] | None = None,
        local_process_index: int | None = None,
        *,
        local_process_idx: int | None = None,
    ) -> Callable[..., Any]:
        """Decorate a function so that it runs on one process of each node only. A single process always runs it.

        Args:
            function: the function.
            local_process_index: index of the process. A node without this process does not run the function.
            local_process_idx: another name of `local_process_index`. Default: None.

        Raises:
            ConfigurationError: the index is missing or negative.
        """
        index = local_process_idx if local_process_index is None else local_process_index
        _check_index("local_process_index", index, None)  # nodes may have different numbers of processes
        return self._only(function, lambda: not self.use_distributed or self.local_process_index == index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each node only. The arguments are those of Python's `print`."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201 -- the user's own line

    def destroy_process_group(self, group: Any = None) -> None:
        """Close a process group of torch. Call it on every process. Waits for pending operations of this process.

        Args:
            group: the group. Default: None, which closes all groups. Later collective operations open a new default
                group, unless the script had created it. No effect without torch's default group. None has no effect in
                processes that a notebook has forked.
        """
        if self.fork_launched and group is None:  # as in Accelerate
            return
        if group is None:
            self.processes.end_watch()
        if dist.is_initialized():
            dist.destroy_process_group(group)

    def joined(self) -> Processes:
        """Return the communication of the processes. Collective after their group was closed or replaced.

        Raises:
            ConfigurationError: the group was created by the script and no longer exists.
        """
        self._refresh()
        if not self._joined:
            if _JOINED in self.topology.evidence:
                raise ConfigurationError(
                    "the process group that PartialState used no longer exists. Call collective operations before "
                    "destroy_process_group(), or start the script with a launcher such as torchrun."
                )
            self.processes.open(self.device)
            self._world = _default_group()
            self._joined = True
        return self.processes

    def _only(self, function: Callable[..., Any] | None, is_here: Callable[[], bool]) -> Callable[..., Any]:
        """Decorate a function so that it runs where `is_here()` is True at the time of the call."""
        if function is None:  # used as @on_process(process_index=1)
            return functools.partial(self._only, is_here=is_here)

        @functools.wraps(function)
        def only_here(*args: object, **kwargs: object) -> Any:
            return function(*args, **kwargs) if is_here() else None

        return only_here

    @contextlib.contextmanager
    def _first_process_first(self, is_first: bool, prefix: str) -> Iterator[None]:
        """Run the body on the process with `is_first`, and then on the others. `prefix` begins the store's key.

        The first process reports success or failure through the store.
        """
        processes = self.joined()
        if processes.world_size == 1:
            yield
            return
        if self._first_store is None:
            self._first_store = processes.own_store("trainwright/first")
        store = self._first_store
        key = f"{prefix}/{next(_turns)}"
        # As in Accelerate, all processes meet between the first body and the others. In a nested block, a barrier would
        # wait forever, because the other processes still wait for the outer block.
        has_barrier = not _open_blocks
        _open_blocks.append(key)
        try:
            if is_first:
                try:
                    yield
                except BaseException:
                    store.set(key, f"process {self.process_index} failed:\n{traceback.format_exc()}")
                    raise
                store.set(key, "")
                if has_barrier:
                    processes.barrier()
            else:
                _wait_for(store, key, processes.timeout)  # raises a WorkerError if the first process has failed
                if has_barrier:
                    processes.barrier()
                yield
        finally:
            _open_blocks.pop()

    def _refresh(self) -> None:
        """Detect the topology again if torch's default group was replaced, for example by a Trainer. Not collective."""
        world = _default_group()
        if world is self._world:
            return
        # The ranks of the script's own group are not in the launcher's variables. Keep them after the group's end.
        if world is None and _JOINED in self.topology.evidence:
            self._world = None
            self._joined = False
            return
        debug = self.debug  # may have been set after the creation
        self.__dict__.update(_initial_fields(self._cpu, self._options))
        self._world = world
        self.debug = debug
        if world is not None and self.num_processes > 1:
            self.backend = dist.get_backend()

    def _compare(self, cpu: bool, options: _GroupOptions) -> None:
        """Check that options do not contradict the existing state."""
        if cpu and self.device.type != "cpu":
            raise ConfigurationError(
                f"cpu=True, but the state has been created on {self.device}. Pass cpu=True where PartialState is "
                "created first."
            )
        if self.num_processes == 1:
            return
        if options.backend is not None and options.backend != self.backend:
            raise ConfigurationError(
                f"backend={options.backend!r}, but the process group has been created with {self.backend!r}. Pass it "
                "where PartialState is created first."
            )
        if options.timeout is not None and options.timeout != self.processes.timeout:
            raise ConfigurationError(
                f"timeout={options.timeout}, but the process group has been created with {self.processes.timeout}. "
                "Pass it where PartialState is created first."
            )


def _group_options(kwargs: dict[str, Any]) -> _GroupOptions:
    for name in kwargs:
        if name not in _OPTIONS:
            raise ConfigurationError(
                f"PartialState got an unknown argument {name!r}.{nearest(name, (*_OPTIONS, 'cpu'))} "
                f"Known: cpu, {', '.join(_OPTIONS)}."
            )
    if kwargs.get("init_method") not in (None, "env://"):
        raise ConfigurationError(
            f"init_method={kwargs['init_method']!r}: PartialState uses the launcher's variables, 'env://'. For another "
            "method call torch.distributed.init_process_group first: PartialState uses that group."
        )
    timeout = kwargs.get("timeout")
    if timeout is not None:
        timeout = length_of_time("timeout", timeout)
    return _GroupOptions(kwargs.get("backend"), timeout)


def _initial_fields(cpu: bool, options: _GroupOptions) -> dict[str, Any]:
    """Return the fields of a state, without communication. The processes are not connected yet."""
    topology = _topology()
    is_single = topology.world_size == 1
    device = _device(topology, "cpu" if cpu else device_type("auto"), options.backend)
    processes = Processes(topology)
    if not is_single:
        check_backend(options.backend, device.type, "backend")
        processes = ProcessGroup(topology, timeout=options.timeout, backend=options.backend, hang_timeout=None)
    distributed_type = properties(device.type).distributed_type
    if is_single and device.type != "xla":  # as in Accelerate, XLA counts as distributed with one process, too
        distributed_type = "NO"
    return {
        "topology": topology,
        "processes": processes,
        "device": device,
        "backend": None,
        "distributed_type": DistributedType(distributed_type),
        "num_processes": topology.world_size,
        "process_index": topology.rank,
        "local_process_index": topology.local_rank,
        "debug": _flag("TRAINWRIGHT_DEBUG_MODE") or _flag("ACCELERATE_DEBUG_MODE"),
        "fork_launched": _flag("FORK_LAUNCHED"),
        "_cpu": cpu,
        "_options": options,
        "_world": None,
        "_joined": is_single,
        "_first_store": None,
    }


def _topology() -> Topology:
    """Return this process's topology from the launcher, or from the process group if the two differ."""
    topology = detect()
    if not dist.is_initialized():
        return topology
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if (rank, world_size) == (topology.rank, topology.world_size):
        return topology
    # torch's group says nothing about nodes, so all processes count as processes of one node.
    return Topology(
        "none", rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, evidence=(_JOINED,)
    )


def _device(topology: Topology, kind: str, backend: str | None) -> torch.device:
    if kind == "xla":  # each process sees its own device only
        return torch.device("xla", 0)
    if properties(kind).is_unified:
        return torch.device("cpu" if topology.world_size > 1 else kind)
    num_devices = torch.accelerator.device_count()
    index = topology.local_rank
    # With one visible device, the launcher may have hidden the others from this process. Only with gloo can processes
    # share a device.
    if index >= num_devices > 1 and backend != "gloo":
        raise ConfigurationError(
            f"{topology.local_world_size} processes on this node, but {num_devices} {kind} devices. Start at most "
            f"{num_devices} processes here, or pass cpu=True."
        )
    return torch.device(kind, index % num_devices)


def _default_group() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def _flag(name: str) -> bool:
    return (variable(name) or "").strip().lower() in ("1", "true", "t", "yes", "y", "on")


def _leave() -> None:
    """Close the group that a state has created, when the interpreter ends.

    No reference to the group may remain: freeing it during interpreter shutdown sometimes aborts the process (torch
    2.13, gloo: "terminate called without an active exception"). After an uncaught error, pending operations are not
    waited for, because other processes may never complete them.
    """
    state = PartialState._shared_state
    processes = state.get("processes")
    state["_world"] = None
    state["_first_store"] = None
    if isinstance(processes, ProcessGroup):
        if getattr(sys, "last_value", None) is None:
            processes.close()
        else:
            processes.abandon()


def _wait_for(store: Any, key: str, timeout: timedelta) -> None:
    """Wait until the first process has reported its result. Polls the store, so that Ctrl-C can end the wait."""
    start_s = time.monotonic()
    poll_s = 0.001
    while not store.check([key]):
        if time.monotonic() - start_s > timeout.total_seconds():
            raise TimeoutError(
                f"the process that goes first has not ended its block within {timeout}. If the block needs longer, "
                "increase PartialState(timeout=...)."
            )
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)
    failure = store.get(key).decode()
    if failure:
        raise WorkerError(f"the process that went first has failed. {failure}")


def _check_index(name: str, index: int | None, num_processes: int | None) -> None:
    if index is None:
        raise ConfigurationError(f"{name} is missing. Write, for example, {name}=0.")
    # A single process accepts each index, so that a script for several processes also runs alone.
    is_too_large = num_processes is not None and num_processes > 1 and index >= num_processes
    if index < 0 or is_too_large:
        valid = "0 and up" if num_processes is None else f"0 to {num_processes - 1}"
        raise ConfigurationError(f"{name}={index}, but no process has this index. Valid indices are {valid}.")
