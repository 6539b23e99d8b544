"""Exchange of failures between the ranks of a user-written loop, which no context manager of Trainwright encloses."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, not re-exported

from trainwright.core.errors import WorkerError
from trainwright.processes.late_calls import LateCalls
from trainwright.processes.loop_detector import LoopDetector, departed_ranks, wait_until_known

_open_watches: list[LoopWatch] = []  # of this process, from creation to `close`; `report_error` uses them


class LoopWatch:
    """Monitor of this rank, from the start of a user-written loop until `close` or the end of the process.

    The script's uncaught error is reported by `sys.excepthook`, and its end by `atexit`. Processes that were killed are
    reported by their neighbours.

    Args:
        store: store of the process group.
        host: the host of rank 0.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: seconds after which a collective fails.
        store_dies_with_rank_0: True if the process of rank 0 serves the store, False if torchrun's agent does.
    """

    def __init__(
        self, store: Any, *, host: str, rank: int, world_size: int, timeout_s: float, store_dies_with_rank_0: bool
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._pid = os.getpid()
        self._store = PrefixStore("watch", store)
        self._serves_store = rank == 0 and store_dies_with_rank_0
        self._has_failed = False  # `report` was called
        connection = store.clone()
        self.late_calls = LateCalls(PrefixStore("late", connection), rank, world_size)
        self._detector = LoopDetector(
            PrefixStore("watch", connection),
            self.late_calls,
            host=host,
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            store_dies_with_rank_0=store_dies_with_rank_0,
        )
        self._detector.start()
        self._previous_hook = sys.excepthook
        self._hook = self._report_uncaught  # each access of the method creates another object; `close` compares it
        sys.excepthook = self._hook
        atexit.register(self._end_with_process)
        # A process of multiprocessing ends without the functions of atexit.
        self._finalizer = multiprocessing.util.Finalize(None, self._end_with_process, exitpriority=0)
        _open_watches.append(self)

    def departed_ranks(self) -> list[int]:
        """Return the other ranks that have left the run without a failure."""
        return sorted(departed_ranks(self._store) - {self._rank})

    def report(self, error: BaseException) -> None:
        """Report the error that ends this process. Waits at most some seconds for the store.

        Raises:
            WorkerError: another rank has failed, and the error is only the interrupt of this rank.
        """
        is_forked = os.getpid() != self._pid  # threads, such as the monitor, run in the forking process only
        if is_forked or self._has_failed:
            return
        self._has_failed = True
        self._detector.leave(error)

    def close(self) -> None:
        """Stop the monitor. Other ranks no longer wait for this one."""
        if self not in _open_watches:
            return
        _open_watches.remove(self)
        if sys.excepthook is self._hook:  # otherwise, a hook that was set later may call this one
            sys.excepthook = self._previous_hook
        self._detector.close()

    def _report_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self.report(error)
        except WorkerError as cause:  # print the failure of the other rank instead of this rank's interrupt
            kind = type(cause)
            error = cause
            trace = cause.__traceback__
        self._previous_hook(kind, error, trace)

    def _end_with_process(self) -> None:
        """Close the monitor at the end of the process. If this rank serves the store, wait for the other ranks."""
        # Run once, by atexit or by multiprocessing.
        atexit.unregister(self._end_with_process)
        self._finalizer.cancel()
        if os.getpid() != self._pid:
            return
        error = sys.exc_info()[1]  # set in a failed process of multiprocessing, which calls no excepthook
        if error is not None:
            with contextlib.suppress(WorkerError):
                self.report(error)
        self.close()
        if self._serves_store and not self._has_failed:
            with contextlib.suppress(dist.DistError):
                wait_until_known(self._store, self._rank, self._world_size)


def report_error(error: BaseException) -> None:
    """Report the error that ends this process, if a user-written loop is monitored in it."""
    for watch in list(_open_watches):
        with contextlib.suppress(WorkerError):
            watch.report(error)
        watch.close()
