"""Low-priority threads for the heavy work of background saves."""

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

_PAUSE = 0.2  # pause after a preparation step, as a fraction of its duration
_LOOK_S = 0.1  # interval in which a waiting thread checks whether the interpreter is exiting


def usable_cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def leaves_cores(device: torch.device, local_world_size: int = 1) -> bool:
    """Return whether each of the `local_world_size` processes on this machine has a core that training does not use."""
    return device.type != "cpu" or (torch.get_num_threads() + 1) * local_world_size <= usable_cores()


def run_at_lowest_priority() -> None:
    """Give the calling thread the lowest scheduling priority that the system offers."""
    # If a thread of an OpenMP team is preempted, the others wait for it at the next barrier.
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # pid 0: this thread
        elif sys.platform == "darwin" and sys.version_info >= (3, 12):
            os.setpriority(os.PRIO_DARWIN_THREAD, 0, os.PRIO_DARWIN_BG)


class LowPriorityThread:
    """A lowest-priority thread that runs functions in order.

    One thread, the owner, adds work with `put` and calls `finish` to wait until all work is done. On a busy machine a
    low-priority thread may rarely run, and unprivileged users cannot increase its priority. After `hurry` the owner
    therefore runs the remaining work itself. Each function should be short and release the GIL.

    Both threads take work from the queue only while they hold `_running`, so that functions run one at a time and in
    order. `put`, `rest`, `finish` and `drop` are for the owner.
    """

    def __init__(self) -> None:
        self._queue: deque[Work] = deque()
        self._running = threading.Lock()  # held while a function is chosen and run
        # Signals changes of the queue, `_hurried` and `_ended`. Adding to a deque and clearing it needs no lock.
        self._changed = threading.Condition()
        self._hurried = True  # True: the owner runs all work. Set until `start`, and by `hurry`
        self._ended = False  # set by `end`: the thread returns
        self._error: BaseException | None = None  # of the first function that failed, until `finish` raises it
        self._thread: threading.Thread | None = None  # None until `start`

    def start(self) -> None:
        """Start the thread. This fails once the interpreter is exiting."""
        self._hurried = False
        self._thread = threading.Thread(target=self._run, name="trainwright-quiet", daemon=True)
        self._thread.start()

    def put(self, work: Work) -> None:
        """Add `work` to the queue. After `hurry`, or without `start`, run the queue now in the calling thread."""
        self._queue.append(work)
        if self._must_hurry():
            self._do_all()
        else:
            with self._changed:
                self._changed.notify_all()

    def hurry(self) -> None:
        """Let the owner run the remaining and later work. May be called from any thread."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def rest(self) -> None:
        """Block until all work is done, `hurry` is called or the interpreter exits."""
        with self._changed:
            while (self._queue or self._running.locked()) and not self._must_hurry():
                self._changed.wait(_LOOK_S)

    def finish(self) -> None:
        """Block until all work is done, and raise an error of the work. Functions after one that fails are not run."""
        self.rest()
        self._do_all()
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def drop(self) -> None:
        """Discard the queue, wait for the function that is running, and discard its error."""
        self._queue.clear()
        with self._running:
            self._error = None

    def end(self) -> None:
        """End the thread and discard the queue."""
        self.drop()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _must_hurry(self) -> bool:
        # Once the main thread has ended, the interpreter waits for the other threads to exit.
        return self._hurried or not threading.main_thread().is_alive()

    def _run(self) -> None:
        """Run the queue until `end`, except after `hurry`; the function of the thread."""
        run_at_lowest_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or (self._queue and not self._hurried))
                if self._ended:
                    return
            self._do_next()
            if not self._queue:
                with self._changed:
                    self._changed.notify_all()  # for `rest`

    def _do_all(self) -> None:
        """Run the queue in the calling thread."""
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Wait for the running function, then run the next one. Return False if the queue is empty."""
        with self._running:
            if not self._queue:
                return False
            work = self._queue.popleft()
            try:
                work()
            except BaseException as error:  # noqa: BLE001  # raised by `finish`, in the owner
                self._error = self._error or error
                self._queue.clear()
            return True


class Preparation:
    """A thread that runs functions that may be skipped, with pauses, until `end` is called or the interpreter exits."""

    def __init__(self, work: Iterator[Work]) -> None:
        self._work = work
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="trainwright-preparation", daemon=False)
        self._thread.start()

    def end(self) -> None:
        """Wait for the running function, and skip all other functions."""
        self._ended = True
        self._thread.join()

    def _run(self) -> None:
        for work in self._work:
            if self._ended or not threading.main_thread().is_alive():
                return
            began = time.perf_counter()
            work()
            # A training step waits for its slowest thread, so that pauses limit the slowdown. A low priority does not:
            # on a virtual machine the host may stop the core until it has found the memory.
            time.sleep(_PAUSE * (time.perf_counter() - began))
