"""Processes of a run, and communication between them on the host."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, not re-exported

from trainwright.core.duration import Duration
from trainwright.core.errors import CheckpointError, ConfigurationError, MissingPackageError, WorkerError
from trainwright.core.host.xla_library import join_devices
from trainwright.core.process import STARTED_BY_TRAINER, Topology, check_address, variable
from trainwright.processes.devices import ONECCL, default_backend
from trainwright.processes.hang_report import ranks_text
from trainwright.processes.launcher import failure_of_started
from trainwright.processes.meetings import LONGEST_POLL_S, Meetings, Turn
from trainwright.processes.rank_position import Position, ProcessMark

if TYPE_CHECKING:
    from trainwright.processes.hang_detector import HangDetector
    from trainwright.processes.loop_watch import LoopWatch

DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)  # torch's default for gloo
_LONGEST_HANG_TIMEOUT = datetime.timedelta(minutes=10)
_SLOW_START_S = 60.0  # after which rank 0 prints the ranks that have not started

_num_groups_created = 0  # by this process; equal on all ranks, so that it separates the runs in the store
# The hook before and after torch changed it; see `ProcessGroup._create_group`.
_excepthook = sys.excepthook
_torch_excepthook = sys.excepthook
_stores: dict[tuple[str, int, int], TCPStore] = {}  # by host, port and rank; see `_open_store`


T = TypeVar("T")


class Helpers(Protocol):
    """Protocol for work of other ranks while rank 0 runs the main work."""

    def serve(self) -> None:
        """Execute rank 0's requests until rank 0 calls `dismiss`."""

    def dismiss(self) -> None:
        """End `serve` on the other ranks. Rank 0 calls it."""


class Processes:
    """Processes of a run with a single process, without communication. Base class of `ProcessGroup`."""

    timeout = DEFAULT_TIMEOUT

    def __init__(self, topology: Topology | None = None) -> None:
        self.topology = topology or Topology("none")
        self.rank = self.topology.rank
        self.world_size = self.topology.world_size
        self.local_rank = self.topology.local_rank
        self.num_nodes = self.topology.num_nodes

    def open(self, device: torch.device) -> None:
        """Connect to the other processes. Collective.

        Raises:
            ConfigurationError: the address of rank 0 is missing.
            TimeoutError: a rank did not arrive within `timeout`.
            WorkerError: a process that the Trainer started has failed.
        """

    def close(self) -> None:
        """Disconnect from the other processes. Does not wait for them."""

    @contextlib.contextmanager
    def reunited(self, device: torch.device) -> Iterator[Processes]:
        """Context manager that yields connected processes for an operation during or after a stage. Collective.

        During a stage, these are all processes. After a stage, the processes of a launcher connect again. Processes
        that the Trainer started have ended by then, so only this process remains.
        """
        yield self

    def recall(self, key: str, value: str) -> str | None:
        """Return the value that torchrun's agent keeps for `key` over restarts. The first attempt stores `value`.

        Return None without torchrun. Blocks until the agent answers.
        """
        topology = self.topology
        if topology.launcher != "torchrun" or not _agent_serves() or topology.master_addr is None:
            return None
        store = PrefixStore("trainwright/job", _open_store(topology, datetime.timedelta(minutes=5)))
        stored: bytes = store.compare_set(key, "", value)  # writes only if the key is unset
        return stored.decode()

    def own_store(self, prefix: str) -> Any:
        """Return a new connection to the run's key-value store, for use in one thread. All keys get the prefix.

        Return None for a single process. Not collective.
        """
        return None

    @contextlib.contextmanager
    def watched(self, position: Callable[[], Position]) -> Iterator[None]:
        """Context manager that exchanges failures of its body between ranks, and reports positions if a rank hangs.

        Not collective: does not wait for other ranks.

        Args:
            position: function that returns this rank's progress.
        """
        yield

    def group_for(self, device: torch.device) -> Any:
        """Return torch's group for tensors on this device, or None for torch's default group. Not collective."""
        return None

    def gather_object(self, value: object) -> list[Any]:
        """Return every rank's small picklable `value`, by rank, on every rank. Collective, on the host."""
        return [value]

    def gather_integers(self, values: list[int]) -> list[list[int]]:
        """Return the lists of all ranks, of equal length, in rank order. Collective, on the host, fast."""
        return [values]

    def broadcast_object(self, value: object, src: int = 0) -> Any:
        """Return rank `src`'s small picklable `value` on every rank. Collective, on the host."""
        return value

    def barrier(self) -> None:
        """Wait for every rank. Collective."""

    def any(self, flag: bool) -> bool:
        """Return whether any rank's flag is set. Collective, on the host."""
        return flag

    def meet(self, call: str) -> None:
        """Wait until every rank calls `meet(call)`, and report the ranks that are late. Collective.

        The ranks use the store, not the group, because late ranks may be in another collective of the group.

        Raises:
            ConfigurationError: each rank that is missing waits in a collective, and so can never make the call.
            TimeoutError: a rank did not make the call within `timeout`.
            WorkerError: a rank that is missing has left the run.
        """

    def meet_or_lead(self, call: str, position: str) -> Turn:
        """Wait for the other ranks as `meet` does. The main rank waits some seconds, and then makes the call alone.

        The wait takes 10 s if the late ranks are in collectives, which they cannot leave without the main rank, 1 s if
        they have left the run, and 60 s otherwise. After a call that was made alone, it takes 1 s for ranks in
        collectives.

        Args:
            call: the name of the call, for messages.
            position: the position in the program, which is equal on all ranks that make the same call. From it, a late
                rank detects that the main rank has already made the same call alone.

        Returns:
            `"together"` if all ranks have arrived, `"alone"` on a main rank that makes the call alone, `"done"` on a
            late rank whose call the main rank has made.

        Raises:
            ConfigurationError: on a rank other than the main rank, each missing rank waits in a collective.
            TimeoutError: the call did not begin within `timeout`.
            WorkerError: on a rank other than the main rank, the main rank has left the run.
        """
        return "together"

    def watch_loop(self) -> None:
        """Exchange failures of a user-written loop with other ranks, until `end_watch` or the process ends.

        Ranks that wait in `meet` also receive the position of the calling thread. Not collective. A second call has no
        effect.
        """

    def end_watch(self) -> None:
        """End `watch_loop`. Other ranks no longer wait for this one. Not collective."""

    def on_main_rank(self, work: Callable[[], T], what: str, helpers: Helpers | None = None) -> T:
        """Run `work`, such as writing a checkpoint, on rank 0. Return the result on every rank. Collective.

        Args:
            work: called on rank 0 only. The result must be picklable.
            what: completes "rank 0 could not ..." on the other ranks.
            helpers: work of the other ranks at the same time. Default: None.

        Raises:
            OSError, CheckpointError, ConfigurationError, MissingPackageError: the error of `work`, on rank 0. Other
                ranks raise a CheckpointError that quotes it.
        """
        problem: Exception | None = None
        result: T | None = None
        if self.rank == 0:
            try:
                result = work()
            except (OSError, CheckpointError, ConfigurationError, MissingPackageError) as error:
                problem = error
            if helpers is not None:
                helpers.dismiss()
        elif helpers is not None:
            helpers.serve()
        # The text and not the error, which may not be picklable. The values of other ranks are not sent.
        problem_text = None if problem is None else f"{type(problem).__name__}: {problem}"
        problem_text, result = self.broadcast_object((problem_text, result))
        if problem is not None:
            raise problem
        if problem_text is not None:
            raise CheckpointError(f"rank 0 could not {what}: {problem_text}")
        return cast(T, result)


class AbsentOthers(Processes):
    """Replacement of `Processes` for trial steps of one rank, without communication.

    Each result contains this process's value in the places of the other processes.

    Args:
        real: the processes of the run, which define the ranks.
    """

    def __init__(self, real: Processes) -> None:
        super().__init__(real.topology)

    def gather_object(self, value: object) -> list[Any]:
        return [value] * self.world_size

    def gather_integers(self, values: list[int]) -> list[list[int]]:
        return [list(values) for _ in range(self.world_size)]


class ProcessGroup(Processes):
    """Processes of a distributed run, connected through torch.distributed.

    Args:
        topology: topology of this process.
        timeout: time after which a collective fails. Default: None, which is 30 minutes.
        backend: torch.distributed's backend. Default: None, which is gloo for the host, and additionally the vendor's
            library for accelerators. Objects are then never sent through the device.
        hang_timeout: time without progress of a rank after which the positions of all ranks are reported. None disables
            the report. Default: `"auto"`, which is half of `timeout`, at most ten minutes.

    Attributes:
        _created_here: torch's default group was created by `open`. False for a group of the user's script, which stays
            open after `close`, and whose store is not used.
        _host_group: gloo group for communication on the host. None if the default group does this.
        _store, _meetings: store of the group, and the calls in which ranks wait through it. None unless
            `_created_here`.
        _detector: monitor of a Trainer's stage, within `watched`.
        _loop_watch: monitor of a user-written loop, from `watch_loop` to `end_watch`.
        _failed: this rank has failed, so that `close` must not wait for the others.
        _is_open: between `open` and `close`.
        _others_end: the other processes end with the stage, because the Trainer has started them.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        timeout: datetime.timedelta | None = None,
        backend: str | None = None,
        hang_timeout: datetime.timedelta | Literal["auto"] | None = "auto",
    ) -> None:
        super().__init__(topology)
        self.timeout = timeout or DEFAULT_TIMEOUT
        self.backend = backend
        if hang_timeout == "auto":
            hang_timeout = min(self.timeout / 2, _LONGEST_HANG_TIMEOUT)
        self.hang_timeout = hang_timeout
        self._created_here = False
        self._host_group: Any = None
        self._store: Any = None
        self._meetings: Meetings | None = None
        self._detector: HangDetector | None = None
        self._loop_watch: LoopWatch | None = None
        self._failed = False
        self._is_open = False
        self._others_end = False

    def open(self, device: torch.device) -> None:
        if not dist.is_initialized():
            self._create_group(device)
        # The default group of a CPU run communicates on the host already.
        self._host_group = None
        if device.type != "cpu":
            self._host_group = dist.new_group(backend="gloo", timeout=self.timeout)
        self._is_open = True
        self._others_end = variable(STARTED_BY_TRAINER) is not None

    def _create_group(self, device: torch.device) -> None:
        """Create torch's default group. Collective."""
        global _num_groups_created, _excepthook, _torch_excepthook
        check_address(self.topology)
        backend = self.backend or default_backend(device)
        if backend == "ccl":
            importlib.import_module(ONECCL)
        if device.type == "xla":
            backend = join_devices(self.topology.local_rank, self.topology.local_world_size)
        # Each attempt of an elastic launcher, and each run of this process, uses a separate prefix of the store:
        # otherwise a new attempt reads the addresses that the old one left there. A store of rank 0 itself is new in
        # each attempt, and machines that have joined later count fewer attempts.
        attempt = variable("TORCHELASTIC_RESTART_COUNT", "0") if _agent_serves() else "0"
        run = variable(STARTED_BY_TRAINER) or str(_num_groups_created)
        store: Any = PrefixStore(f"trainwright/attempt_{attempt}/run_{run}", _open_store(self.topology, self.timeout))
        store.append("watch/hosts", f"{self.rank} {ProcessMark.mine().node}\n")  # for `LoopDetector`
        self._wait_for_all_ranks(store)
        self._store = store
        self._meetings = Meetings(store, self.rank, self.world_size, self.timeout)
        # torch replaces the hook for each group, by one that prints the rank before the lines of the previous hook.
        # Restore the hook from before the last group, so that a second group does not print the rank twice.
        if sys.excepthook is _torch_excepthook:
            sys.excepthook = _excepthook
        _excepthook = sys.excepthook
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=self.timeout)
        _torch_excepthook = sys.excepthook
        self._created_here = True
        _num_groups_created += 1

    @contextlib.contextmanager
    def reunited(self, device: torch.device) -> Iterator[Processes]:
        if self._is_open:
            yield self
        elif self._others_end:
            yield Processes()
        else:
            self.open(device)
            try:
                yield self
                self.barrier()
            finally:
                self.close()

    def _wait_for_all_ranks(self, store: Any) -> None:
        """Wait for all ranks, such that Ctrl-C works and missing ranks can be reported."""
        store.append("arrived", f"{self.rank} ")
        start_s = time.monotonic()
        poll_s = 0.005
        was_reported = False
        while not store.check(["everyone"]):
            waited_s = time.monotonic() - start_s
            arrived = {int(rank) for rank in store.get("arrived").split()}
            if len(arrived) == self.world_size:
                store.set("everyone", "")
                return
            missing = ranks_text(sorted(set(range(self.world_size)) - arrived))
            failure = failure_of_started()
            if failure is not None:
                raise WorkerError(f"a process that the Trainer started has failed:\n{failure}")
            if waited_s > self.timeout.total_seconds():
                raise TimeoutError(
                    f"{missing} of {self.world_size} did not arrive within {self.timeout}. Check that every process "
                    "starts and makes the same call, or increase the timeout."
                )
            is_report_due = waited_s > _SLOW_START_S and not was_reported
            if self.rank == 0 and is_report_due:
                was_reported = True
                sys.stderr.write(f"trainwright: still waiting for {missing} of {self.world_size}\n")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, LONGEST_POLL_S)

    @contextlib.contextmanager
    def watched(self, position: Callable[[], Position]) -> Iterator[None]:
        if not self._created_here:  # the store of the user's group may be of any kind, and the user closes it
            yield
            return
        from trainwright.processes.hang_detector import HangDetector  # a single process does not need it

        hang_timeout_s = None if self.hang_timeout is None else self.hang_timeout.total_seconds()
        self._detector = HangDetector(
            PrefixStore("watch", self._store.clone()),
            rank=self.rank,
            world_size=self.world_size,
            position=position,
            hang_timeout_s=hang_timeout_s,
            timeout_s=self.timeout.total_seconds(),
            store_dies_with_rank_0=not _agent_serves(),
            interrupt_only=self.rank == 0 and variable(STARTED_BY_TRAINER) is not None,
        )
        self._detector.start()
        try:
            yield
        except BaseException as error:
            self._failed = True
            self._detector.leave(error)
            raise
        self._detector.close()

    def close(self) -> None:
        self.end_watch()
        if self._created_here and dist.is_initialized():  # the script may have destroyed the group
            if self._failed:
                _abandon_groups()
            else:
                dist.destroy_process_group()
        _wait_for_gloo_threads()
        self._created_here = False
        self._is_open = False
        self._host_group = None
        self._store = None
        self._meetings = None
        if self._detector is not None:
            self._detector.close()
            self._detector = None

    def abandon(self) -> None:
        """Disconnect from the other processes after a failure, without waiting for pending operations."""
        self._failed = True
        self.close()

    def meet(self, call: str) -> None:
        if self._meetings is not None:
            self._meetings.meet(call)

    def meet_or_lead(self, call: str, position: str) -> Turn:
        if self._meetings is None:
            return "together"
        return self._meetings.meet_or_lead(call, position)

    def watch_loop(self) -> None:
        if self._meetings is not None and self._loop_watch is None:
            from trainwright.processes.loop_watch import LoopWatch  # a single process does not need it

            self._loop_watch = LoopWatch(
                self._store,
                host=self.topology.master_addr or "127.0.0.1",
                rank=self.rank,
                world_size=self.world_size,
                timeout_s=self.timeout.total_seconds(),
                store_dies_with_rank_0=not _agent_serves(),
            )
            self._meetings.loop_watch = self._loop_watch

    def end_watch(self) -> None:
        if self._loop_watch is not None:
            self._loop_watch.close()
            self._loop_watch = None
        if self._meetings is not None:
            self._meetings.loop_watch = None

    def own_store(self, prefix: str) -> Any:
        # Torch has no public name for the store of a group that the user has created.
        store: Any = self._store if self._created_here else dist.distributed_c10d._get_default_store()
        return PrefixStore(prefix, store.clone())

    def group_for(self, device: torch.device) -> Any:
        return self._host_group if device.type == "cpu" else None

    def gather_object(self, value: object) -> list[Any]:
        by_rank: list[Any] = [None] * self.world_size
        dist.all_gather_object(by_rank, value, group=self._host_group)
        return by_rank

    def gather_integers(self, values: list[int]) -> list[list[int]]:
        tensor = torch.tensor(values, dtype=torch.int64)
        by_rank = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(by_rank, tensor, group=self._host_group)
        return [of_rank.tolist() for of_rank in by_rank]

    def broadcast_object(self, value: object, src: int = 0) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=src, group=self._host_group)
        return box[0]

    def barrier(self) -> None:
        dist.barrier(group=self._host_group)

    def any(self, flag: bool) -> bool:
        vote = torch.tensor([int(flag)], dtype=torch.int32)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self._host_group)
        return bool(vote.item())


def length_of_time(name: str, value: float | datetime.timedelta | Duration | str) -> datetime.timedelta:
    """Convert a timeout (seconds, a timedelta, a Duration, or text such as `"30 min"`) of the argument `name`.

    Raises:
        ConfigurationError: the value is not a length of time, or not positive.
    """
    if isinstance(value, datetime.timedelta):
        return value
    duration = Duration(value, "seconds") if isinstance(value, (int, float)) else Duration(value)
    if duration.unit != "seconds" or duration.value <= 0:
        raise ConfigurationError(f"{name}={value!r} is not a length of time. Write seconds, or for example '30 min'.")
    return datetime.timedelta(seconds=duration.value)


def _abandon_groups() -> None:
    """Abort all process groups after a failed run, without waiting for pending operations.

    Freeing a gloo group waits for its last collective, which the other ranks may never complete (torch 2.13: an
    all-reduce of a backward pass, for the group's timeout). The groups are therefore never freed: the operating system
    closes their connections when the process ends. Other backends abort pending operations.
    """
    world = dist.distributed_c10d._world
    for group in list(world.pg_map):
        backends = {group._get_backend(device) for device in group._device_types}
        for owner in (group, *backends):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
    dist.distributed_c10d._abort_process_group()


def _wait_for_gloo_threads() -> None:
    """Wait until gloo's threads have released their finished operations, for at most two seconds.

    An operation owns Python objects, so its release needs the GIL. A gloo thread that waits for the GIL when the
    interpreter shuts down aborts the process: "terminate called without an active exception" (torch 2.13, whose threads
    may outlive the process group). This function sleeps to release the GIL, and returns after it has seen no running
    gloo thread three times in a row. Only Linux shows which threads are running.
    """
    end_s = time.monotonic() + 2.0
    num_idle = 0
    while num_idle < 3 and time.monotonic() < end_s:
        time.sleep(0.002)
        num_idle = 0 if _gloo_runs() else num_idle + 1


def _gloo_runs() -> bool:
    for file in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that has ended
            # For example "1234 (pt_gloo_runloop) R 1 …". The name may contain spaces and parentheses.
            name, _, fields = file.read_text().partition("(")[2].rpartition(")")
            if name == "pt_gloo_runloop" and fields.split()[0] == "R":
                return True
    return False


def _open_store(topology: Topology, timeout: datetime.timedelta) -> TCPStore:
    """Return the connection to the store that rank 0, or torchrun's agent, serves.

    The store outlives the stage, because other ranks may still read from it at the end. In processes of a launcher it
    stays open until the process ends. Otherwise a rank that begins its next stage while rank 0 ends the previous one
    would write to a closing server, and both would wait forever. Stages whose processes the Trainer starts use separate
    ports, and their processes end before the next stage. A single process uses its own port, so that several can run on
    a machine.
    """
    default_port = 29500 if topology.world_size > 1 else 0  # torchrun's; 0 is any free port
    host = topology.master_addr or "127.0.0.1"
    port = topology.master_port or default_port
    key = (host, port, topology.rank)
    if variable(STARTED_BY_TRAINER) is not None:
        _stores.clear()
    if key not in _stores:
        _stores[key] = TCPStore(
            host,
            port,
            topology.world_size,
            is_master=topology.rank == 0 and not _agent_serves(),
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    return _stores[key]


def _agent_serves() -> bool:
    return variable("TORCHELASTIC_USE_AGENT_STORE") == "True"
