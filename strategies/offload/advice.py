"""Advice to the operating system on mapped memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from typing import Any

import torch

_POPULATE_READ = 22  # not in Python's mmap module; Linux 5.14: read pages in and map them


def _find_madvise() -> Any:
    """Return the C library's `madvise`, which releases the GIL. None if it is not available."""
    if not hasattr(os, "posix_fadvise"):
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function


_madvise = _find_madvise()


def populate(address: int, num_bytes: int) -> bool:
    """Read pages of a mapped file from `address` on. Return False if the system cannot or the file is too short."""
    return _madvise is not None and _madvise(address, num_bytes, _POPULATE_READ) == 0


def read_ahead(tensors: Iterable[torch.Tensor]) -> None:
    """Start to read mapped tensors from the disk. Does not block.

    Has no effect on tensors that are in memory, and on systems without madvise.
    """
    if _madvise is None:
        return
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.nbytes:
            start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            # The result is ignored, because the system may ignore the advice.
            _madvise(start, tensor.data_ptr() + tensor.nbytes - start, mmap.MADV_WILLNEED)
