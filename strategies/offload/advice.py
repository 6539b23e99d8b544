"""What the system is told about mapped memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from typing import Any

import torch

_POPULATE_READ = 22  # not in Python's mmap module; Linux 5.14: read pages in and map them


def _find_madvise() -> Any:
    """Return the C library's madvise, called without Python's lock; None where there is none to be had."""
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
    """Map pages that begin at a page's address; return False where this system cannot, or the file ends before."""
    return _madvise is not None and _madvise(address, num_bytes, _POPULATE_READ) == 0


def read_ahead(tensors: Iterable[torch.Tensor]) -> None:
    """Have the system read mapped tensors from the disk, while the caller does something else; waits for nothing.

    What is in memory already, or in no file, costs a call each. Without effect where the system has no such advice.
    """
    if _madvise is None:
        return
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.nbytes:
            start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            # Advice: whether it is taken is no matter.
            _madvise(start, tensor.data_ptr() + tensor.nbytes - start, mmap.MADV_WILLNEED)
