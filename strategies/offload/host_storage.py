"""Host storage of offloaded tensors: memory or memory-mapped files."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError
from trainwright.core.host.byte_sizes import format_bytes

PLACES = ("cpu", "disk")
_MIN_REGISTERED_BYTES = 2**20  # smaller pinned tensors are allocated by torch
_ALIGN_BYTES = 64  # torch's alignment: the summation order of kernels may depend on it


def _registered(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return pinned memory of exactly this size for CUDA. Torch rounds pinned memory up to a power of two."""
    num_bytes = numel * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes)
    tensor = torch.frombuffer(memory, dtype=dtype)  # keeps the memory until its storage is freed
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types here
    address = tensor.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, num_bytes, 0))
    finalizer = weakref.finalize(memory, runtime.cudaHostUnregister, address)
    finalizer.atexit = False  # the system frees the memory when the process ends
    return tensor


class HostStorage:
    """Allocator of tensors in host memory or in memory-mapped files.

    Args:
        place: `"cpu"` or `"disk"`.
        folder: Folder for `"disk"`. Default: the system's temporary folder. Files are unlinked once they are mapped.
            The system therefore deletes them with the tensors, also if the process is killed.
        pinned: Use pinned memory for `"cpu"`, from which copies are asynchronous. Default: False.
    """

    def __init__(self, place: str, folder: str | os.PathLike[str] | None = None, *, pinned: bool = False) -> None:
        self.place = place
        self.pinned = pinned
        self.folder = None if folder is None else Path(folder)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor of shape (numel,).

        Raises:
            ConfigurationError: The disk is full, or the folder is not writable.
        """
        if self.place == "disk" and numel > 0:  # an empty file cannot be mapped
            return self._mapped(numel, dtype)
        is_large = numel * dtype.itemsize >= _MIN_REGISTERED_BYTES
        if self.pinned and is_large and torch.cuda.is_available():
            return _registered(numel, dtype)
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self.pinned)

    def _mapped(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        num_bytes = numel * dtype.itemsize
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, path = tempfile.mkstemp(prefix=".offloaded-", dir=self.folder)
        except OSError as error:
            raise ConfigurationError(f"offload_folder={str(self.folder)!r} cannot be written: {error}.") from error
        try:
            # Reserve the space now: on a full disk, writing to the mapping would kill the process.
            os.posix_fallocate(descriptor, 0, num_bytes)
            return torch.from_file(path, shared=True, size=numel, dtype=dtype)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise ConfigurationError(
                f"{format_bytes(num_bytes)} of weights do not fit into {Path(path).parent}: {error.strerror}. Set "
                "offload_folder to a folder with more space."
            ) from error
        finally:
            os.close(descriptor)
            os.unlink(path)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in this storage, in the same memory format."""
        stored = self.empty_like(tensor)
        stored.copy_(tensor)
        return stored

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized tensor with the shape, dtype and memory format of another tensor."""
        return _laid_out(self.empty(tensor.numel(), tensor.dtype), tensor)

    def store_state(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Move state tensors of an optimizer to this storage. Scalars are not moved.

        Args:
            optimizer: The optimizer whose state tensors are replaced.
            parameters: Parameters whose state is moved. Default: None, all parameters.
        """
        owners: Iterable[torch.Tensor] = list(optimizer.state) if parameters is None else parameters
        for parameter in owners:
            for name, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    continue
                if hasattr(value, "_trainwright_on_host"):  # stored after an earlier step
                    continue
                on_host = self.like(value)
                on_host._trainwright_on_host = True  # type: ignore[attr-defined]  # our own attribute
                optimizer.state[parameter][name] = on_host


def place_in(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return consecutive views of a flat tensor of `flat_numel` elements, with the formats of `tensors`."""
    views = []
    start = 0
    for tensor in tensors:
        views.append(_laid_out(flat[start : start + tensor.numel()], tensor))
        start += _aligned_numel(tensor.numel(), flat.dtype)
    return views


def _laid_out(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a flat tensor with the shape of `tensor`, and with its memory format if it is dense.

    Kernels and their summation order depend on the memory format, such as channels_last.
    """
    return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())


def flat_numel(sizes: Sequence[torch.Size], dtype: torch.dtype) -> int:
    """Return the number of elements of a flat tensor that contains aligned tensors of these sizes."""
    return sum(_aligned_numel(size.numel(), dtype) for size in sizes)


def _aligned_numel(numel: int, dtype: torch.dtype) -> int:
    """Return `numel` rounded up to a multiple of the alignment. For example, 17 elements of 4 bytes become 32."""
    step = _ALIGN_BYTES // dtype.itemsize
    return -(-numel // step) * step  # integer division, rounded up
