"""Copies from host memory to host memory: at once by several threads, or later by whoever has time."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

Copy = tuple[int, int, int]  # to, from: addresses; and how many bytes

_WORTH_A_THREAD = 64 * 2**20  # bytes


def copy_now(copies: Sequence[Copy], num_threads: int) -> None:
    """Copy and block until it is done. `num_threads` threads share the copies, the calling one among them; a small
    amount is copied by that one alone.
    """
    # The C library's copy lets go of the interpreter. torch's own copy divides each tensor among all its threads and
    # waits for the slowest, which takes twice as long where another process needs a core.
    left = iter(copies)  # shared: whoever is free takes the next one
    if num_threads == 1 or sum(size for _, _, size in copies) < _WORTH_A_THREAD:
        _copy_all(left)
        return
    with ThreadPoolExecutor(num_threads - 1, thread_name_prefix="trainwright-copy") as pool:
        running = [pool.submit(_copy_all, left) for _ in range(num_threads - 1)]
        _copy_all(left)
    for done in running:
        done.result()


class LaterCopy:
    """Copies of `tensors` that remain to be made. Every thread that calls `finish` helps; the tensors must not change
    before.
    """

    def __init__(self, copies: Sequence[Copy], tensors: Sequence[torch.Tensor]) -> None:
        self._left = iter(copies)
        # `detach` shares memory and version, and keeps the memory when `tensor.data` is replaced.
        self._before = [(tensor.detach(), tensor._version) for tensor in tensors]
        self._quiet = threading.Condition()
        self._busy = 0  # threads that may be copying
        self._unchanged: bool | None = None  # once it is done

    def finish(self) -> bool:
        """Copy what is left, wait for other threads, and return whether no tensor has changed before. It may be called
        again. A change through `tensor.data` or another library is not detected.
        """
        if self._unchanged is not None:
            return self._unchanged
        with self._quiet:
            self._busy += 1
        try:
            _copy_all(self._left)
        finally:
            with self._quiet:
                self._busy -= 1
                self._quiet.notify_all()
        with self._quiet:
            self._quiet.wait_for(lambda: not self._busy)
            if self._unchanged is None:
                self._unchanged = all(tensor._version == version for tensor, version in self._before)
                self._before = []
            return self._unchanged


def _copy_all(copies: Iterator[Copy]) -> None:
    move = ctypes.memmove
    for target, source, size in copies:
        move(target, source, size)
