"""Initialization and termination of loader workers."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from trainwright.core.errors import ConfigurationError

_SOCKET_BYTES = 107  # maximum length of a socket's path, on Linux
_NAME_BYTES = len("/pymp-12345678/listener-12345678")  # path that Python appends to the temporary folder
_PATIENCE_S = 2.0  # time for workers to finish their current sample
_POLL_S = 0.5  # interval at which a worker checks its parent, and time to end after an interrupt
_TOGETHER_S = 1.0  # signals within this time count as one

B = TypeVar("B", bound=Iterator[Any])


class WorkerStart:
    """Initialization of a loader worker, which then ignores SIGUSR1 and the first SIGTERM.

    These signals announce the end of a run, and the system sends them to workers, too. The training process must finish
    its step and save a checkpoint, and then ends the workers (see `Workers`). Workers also end when it is killed.

    Args:
        then: the user's `worker_init_fn`, which is called last. None if there is none.

    Raises:
        ConfigurationError: workers cannot send tensors, because the path of the temporary folder is too long.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        _check_temporary_folder()
        self._then = then

    def __call__(self, worker_id: int) -> None:
        """Ignore the signals, watch the parent process, and call the user's function. Runs in the worker."""
        signal.signal(signal.SIGTERM, _OutlivesFirst())
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        threading.Thread(target=_end_with_parent, name="trainwright-parent-watch", daemon=True).start()
        if self._then is not None:
            self._then(worker_id)


def _check_temporary_folder() -> None:
    """Check that workers can open their sockets. Otherwise the training process would hang."""
    folder = tempfile.gettempdir()
    excess = len(os.fsencode(folder)) + _NAME_BYTES - _SOCKET_BYTES
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]  # torch has no annotation
    # torch's other strategy, "file_system", opens no sockets.
    if excess > 0 and strategy == "file_descriptor":
        raise ConfigurationError(
            f"the path of the temporary folder {folder} is {excess} bytes too long for loader workers, which send "
            "tensors through sockets in it. Set TMPDIR to a shorter one, or num_workers=0."
        )


class _OutlivesFirst:
    """Signal handler that ignores the first signal, and further signals within a short time.

    A signal to a process group may reach a process twice. A later signal, which `Workers` sends to a worker that does
    not end, is not ignored.
    """

    def __init__(self) -> None:
        self._first_s: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
        elif now_s - self._first_s > _TOGETHER_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _end_with_parent() -> None:
    """End this process soon after its parent has been killed. Torch's own check runs every 5 seconds."""
    parent_id = os.getppid()
    parent = multiprocessing.parent_process()
    # The child of an ended process gets another parent, so `getppid` changes. If the parent ended before the first
    # `getppid`, only `is_alive` detects it.
    while os.getppid() == parent_id and (parent is None or parent.is_alive()):
        time.sleep(_POLL_S)
    if hasattr(signal, "pthread_kill"):
        # A KeyboardInterrupt in the main thread: torch's loop ends and removes its files.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(2 * _POLL_S)
    os._exit(1)


class Workers:
    """Workers of one or several loaders, which `close` ends.

    Each prepared loader has its own `Workers`. Its `within` are those of the run (`LoaderOptions.workers`), which then
    contain the workers of all loaders. None if torch alone ends the workers of a loader's passes.

    torch ends the workers of a pass when the pass is no longer referenced. The traceback of an error references it
    until the interpreter ends, and the interpreter would then wait for workers that ignore signals.
    """

    def __init__(self, within: Workers | None = None) -> None:
        self._within = within
        # Iterators of torch or torchdata with workers. A pass that is no longer referenced has ended its workers.
        self._passes: WeakSet[Any] = WeakSet()
        # The loader's last pass, until `end_pass`. The reference keeps torch from ending the workers when the loop
        # drops the iterator. None without `within`, without workers, or after `end_pass`.
        self._last: Any = None
        self._process_id = os.getpid()
        _all.add(self)

    def keep(self, batches: B) -> B:
        """Register and return a loader's iterator."""
        if getattr(batches, "_workers", None):
            self._passes.add(batches)
            self._last = None if self._within is None else batches
        if self._within is not None:
            self._within.keep(batches)
        return batches

    def end_pass(self) -> None:
        """End the workers of the loader's last pass, unless they are persistent. Takes seconds at most.

        Without `within`, torch ends them instead: when the iterator is deleted, where a Ctrl-C is lost, and after
        waiting for workers that are reading a sample.
        """
        last = self._last
        self._last = None
        if last is None or last._shutdown:
            return
        is_persistent = getattr(last, "_persistent_workers", False)
        if not is_persistent and os.getpid() == self._process_id:
            _end([last])

    def close(self) -> None:
        """End the workers of all passes, within seconds, even if one of them is stuck in a sample."""
        if os.getpid() != self._process_id:
            return  # a copy in a forked process, which is not the parent of the workers
        passes = [batches for batches in self._passes if not batches._shutdown]
        self._last = None
        self._passes.clear()
        _end(passes)

    def __reduce__(self) -> tuple[type[Workers], tuple[()]]:
        return type(self), ()  # another process has no workers of this one


_all: WeakSet[Workers] = WeakSet()


# Runs before multiprocessing's own exit function, which was registered earlier and waits for workers indefinitely.
@atexit.register
def _end_all() -> None:
    for workers in list(_all):
        workers.close()


def _end(passes: list[Any]) -> None:
    """End the workers of iterators of torch or torchdata, and release the iterators' resources in this process.

    First all workers are requested to end. Those that do not end are interrupted, and then killed. The attributes are
    those of torch 2.13's `_MultiProcessingDataLoaderIter`, which torchdata (0.11) has, too.
    """
    broken: list[Any] = []  # iterators with a killed or failed worker
    stopping: list[Any] = []  # workers that were requested to end
    for batches in passes:
        if batches._worker_pids_set:  # otherwise torch would raise in this process when one of them is killed
            batches._worker_pids_set = False
            torch._C._remove_worker_pids(id(batches))
        # A killed worker may still hold a lock for which an event or a queue would wait.
        if any(worker.exitcode not in (None, 0) for worker in batches._workers):
            broken.append(batches)
            continue
        # torch's own request to end. All workers receive it before the first wait, so that they end at the same time.
        batches._workers_done_event.set()
        for queue in batches._index_queues:
            with contextlib.suppress(ValueError):  # the queue is closed
                queue.put(None)
        stopping.extend(batches._workers)
    _wait_for(stopping)
    for batches in passes:
        still_alive = [worker for worker in batches._workers if worker.is_alive()]
        _interrupt(still_alive)
        for worker in still_alive:
            worker.kill()
            worker.join()
        if still_alive or batches in broken:
            _forget(batches)
        else:
            batches._shutdown_workers()


def _interrupt(workers: list[Any]) -> None:
    """Interrupt workers in their current sample, so that they remove their files from the temporary folder.

    Afterwards the caller must kill those that are still alive: code may catch the interrupt or not check for it.
    """
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGINT)
    _wait_for(workers, _POLL_S)


def _wait_for(workers: list[Any], patience_s: float = _PATIENCE_S) -> None:
    """Wait until all workers have ended, at most `patience_s`."""
    deadline = time.monotonic() + patience_s
    while True:
        alive = [worker for worker in workers if worker.is_alive()]
        left_s = deadline - time.monotonic()
        if not alive or left_s <= 0:
            return
        wait([worker.sentinel for worker in alive], timeout=left_s)
        time.sleep(0.001)  # the sentinel of a process is ready a little before its exit status


def _forget(batches: Any) -> None:
    """Release an iterator without using its queues, because a killed worker may hold their locks."""
    batches._shutdown = True
    pinning_done = getattr(batches, "_pin_memory_thread_done_event", None)
    if pinning_done is not None:
        pinning_done.set()
    for queue in batches._index_queues:
        queue.cancel_join_thread()
        queue.close()
