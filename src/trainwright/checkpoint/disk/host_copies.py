"""Copies within host memory, made at once by several threads, or later by the first thread that needs them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

# Target address, source address, number of bytes. A plain tuple, since a save has one for each 8 MB and each tensor.
Copy = tuple[int, int, int]

_THREADS_FROM_BYTES = 64 * 2**20  # starting threads takes longer than a smaller copy


def copy_now(copies: Sequence[Copy], num_threads: int) -> None:
    """Run the copies in `num_threads` threads, including the calling thread, and block until they are done.

    If the copies are small, only the calling thread runs them.
    """
    # ctypes releases the GIL. torch's own copy divides each tensor among all its threads and waits for the slowest,
    # which takes twice as long if another process needs a core.
    remaining = iter(copies)  # shared: each thread takes the next copy when it is free
    if num_threads == 1 or sum(size for _, _, size in copies) < _THREADS_FROM_BYTES:
        _copy_all(remaining)
        return
    with ThreadPoolExecutor(num_threads - 1, thread_name_prefix="trainwright-copy") as pool:
        running = [pool.submit(_copy_all, remaining) for _ in range(num_threads - 1)]
        _copy_all(remaining)
    for future in running:
        future.result()  # raises the error of a thread


class LaterCopy:
    """Copies that are made when a thread calls `finish`.

    Args:
        copies: the copies.
        tensors: the sources of the copies, which are kept alive until `finish` returns. They must not change before.
    """

    def __init__(self, copies: Sequence[Copy], tensors: Sequence[torch.Tensor]) -> None:
        self._remaining = iter(copies)
        # `detach` shares memory and version, and keeps the memory when `tensor.data` is replaced.
        self._versions = [(tensor.detach(), tensor._version) for tensor in tensors]
        self._idle = threading.Condition()  # protects `_num_busy`, and signals that a thread has ended its copies
        self._num_busy = 0  # threads that may be copying
        self._unchanged: bool | None = None  # the result of `finish`; None until all copies are made

    def finish(self) -> bool:
        """Run the remaining copies, wait for other threads, and return whether the tensors were unchanged.

        Several threads may call this method, repeatedly. Changes via `tensor.data` or other libraries are not detected.
        """
        if self._unchanged is not None:
            return self._unchanged
        with self._idle:
            self._num_busy += 1
        # Threads share the iterator: each takes the next copy when it is free.
        try:
            _copy_all(self._remaining)
        finally:
            with self._idle:
                self._num_busy -= 1
                self._idle.notify_all()
        with self._idle:
            self._idle.wait_for(lambda: self._num_busy == 0)
            if self._unchanged is None:  # the first thread that gets here
                # In-place operations increase the version counter of a tensor.
                self._unchanged = all(tensor._version == version for tensor, version in self._versions)
                self._versions = []  # frees the tensors
            return self._unchanged


def _copy_all(copies: Iterator[Copy]) -> None:
    """Make copies until the iterator, which other threads may use too, is exhausted."""
    move = ctypes.memmove
    for target, source, size in copies:
        move(target, source, size)
