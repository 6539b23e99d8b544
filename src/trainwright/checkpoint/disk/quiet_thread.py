"""Threads at low priorities that do the heavy work of saves beside the training."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

Work = Callable[[], Any]

_PAUSE = 0.2  # between two pieces of a preparation, of the seconds that the last one took
_LOOK_S = 0.1  # how often a waiting thread looks whether the interpreter has begun to exit


def usable_cores() -> int:
    """Return how many processor cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def leaves_cores(device: torch.device, local_world_size: int = 1) -> bool:
    """Return whether training on `device` leaves a core of this machine free for each of the `local_world_size`
    processes of the run on it.
    """
    return device.type != "cpu" or (torch.get_num_threads() + 1) * local_world_size <= usable_cores()


def run_at_lowest_priority() -> None:
    """Have the calling thread run only when no other wants its core, where the system allows that."""
    # Threads that wait for each other at OpenMP's barriers all stand still while one of them is preempted.
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0: this thread
        elif sys.platform == "darwin" and sys.version_info >= (3, 12):
            os.setpriority(os.PRIO_DARWIN_THREAD, 0, os.PRIO_DARWIN_BG)


class QuietThread:
    """Does work in order in a thread at the lowest priority, until another thread waits for it.

    One thread, the owner, puts work and waits for it. On a busy machine the quiet thread may hardly ever run, and an
    ordinary user cannot raise a priority again: after `hurry` the owner does the remaining work itself. Work should
    therefore be short, and hold the interpreter's lock only for moments.
    """

    def __init__(self) -> None:
        self._left: deque[Work] = deque()
        self._turn = threading.Lock()  # held while a piece of work is done, and while the next one is chosen
        self._changed = threading.Condition()  # over the three below, and of what is left
        self._hurried = True  # until it is started: the owner does everything
        self._ended = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Not possible once the interpreter exits."""
        self._hurried = False
        self._thread = threading.Thread(target=self._run, name="trainwright-quiet", daemon=True)
        self._thread.start()

    def put(self, work: Work) -> None:
        """Have `work` done after what was put before; at once if the owner does it itself."""
        self._left.append(work)
        if self._must_hurry():
            self._do_all()
        else:
            with self._changed:
                self._changed.notify_all()

    def hurry(self) -> None:
        """Leave what is left to the owner. May be called from any thread."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def rest(self) -> None:
        """Block until nothing is left to do, or somebody is in a hurry."""
        with self._changed:
            while self._left_or_busy() and not self._must_hurry():
                self._changed.wait(_LOOK_S)

    def finish(self) -> None:
        """Block until all work is done. The first error is raised, and work that came after it is dropped."""
        self.rest()
        self._do_all()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def drop(self) -> None:
        """Forget what is left and wait for the work that is being done."""
        self._left.clear()
        with self._turn:
            self._error = None

    def end(self) -> None:
        """End the thread; what is left is dropped."""
        self.drop()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _must_hurry(self) -> bool:
        # A main thread that has ended waits for the others, to exit.
        return self._hurried or not threading.main_thread().is_alive()

    def _left_or_busy(self) -> bool:
        return bool(self._left) or self._turn.locked()

    def _run(self) -> None:
        run_at_lowest_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or (self._left and not self._hurried))
                if self._ended:
                    return
            self._do_next()
            if not self._left:
                with self._changed:
                    self._changed.notify_all()

    def _do_all(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Do the next work, if there is one; waits for the one before."""
        with self._turn:
            if not self._left:
                return False
            work = self._left.popleft()
            try:
                work()
            except BaseException as error:  # noqa: BLE001  # raised by `finish`, in the owner
                self._error = self._error or error
                self._left.clear()
            return True


class Preparation:
    """Does optional work in a thread, with pauses. It stops between two pieces of work after `end`, and when the
    interpreter exits.
    """

    def __init__(self, work: Iterator[Work]) -> None:
        self._work = work
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="trainwright-preparation", daemon=False)
        self._thread.start()

    def end(self) -> None:
        """Block until the work that is being done is; the rest is left out."""
        self._ended = True
        self._thread.join()

    def _run(self) -> None:
        for work in self._work:
            if self._ended or not threading.main_thread().is_alive():
                return
            began = time.perf_counter()
            work()
            # A step waits for the slowest of its threads, so this bounds how long the work makes it. A niceness does
            # not: on a virtual machine the host may stop the core until it has found the memory.
            time.sleep(_PAUSE * (time.perf_counter() - began))
