"""A file of weights that is mapped into memory. Its tensors are views of the page cache, read on first access.

The mapping is private: a write to a tensor stays in this process and never reaches the file. The file must keep its
length while it is mapped, because access to a page beyond its end kills the process (SIGBUS). `load` checks this first.
"""

from __future__ import annotations

import copy
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainwright.checkpoint.disk.untrusted import check_regular
from trainwright.core.errors import CheckpointError
from trainwright.strategies.offload.advice import populate

# Not in Python's mmap module. NORESERVE: without it, Linux refuses a private mapping that is larger than the memory.
_MAP_NORESERVE = 0x4000
_READ_BYTES = 8 * 2**20  # bytes per read
_PROBE_BYTES = 2**20  # distance of the bytes that are probed to check whether a part is in memory
_GAP_BYTES = 64 * 2**10  # reading so much more is cheaper than a second request


class FileSpan(NamedTuple):
    """Location of a tensor's bytes in a mapped file."""

    file: MappedFile
    start: int
    num_bytes: int

    def read_into(self, buffer: torch.Tensor, start: int) -> None:
        """Fill `buffer` with the tensor's bytes from `start` on; see `MappedFile.read_into`."""
        self.file.read_into(buffer, self.start + start)


class MappedFile:
    """A file that is mapped completely. Nothing is read here.

    Args:
        path: A file that is not empty.

    Raises:
        CheckpointError: It cannot be opened or mapped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        try:
            self._use(os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error}.") from error

    def _use(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, self._descriptor)
        self.num_bytes = os.fstat(self._descriptor).st_size
        self._bytes = _map(self._descriptor, self.num_bytes, self.path)
        self._mapped: set[tuple[int, int]] = set()  # parts that were loaded before

    def __deepcopy__(self, memo: dict[int, Any]) -> MappedFile:
        """Map the same file again. Changes that were made to its tensors in memory are not copied."""
        self.check()
        twin = copy.copy(self)
        twin._use(os.dup(self._descriptor))  # the path may name another file by now
        return twin

    def counterpart(self, tensor: torch.Tensor, other: MappedFile) -> torch.Tensor | None:
        """Return the part of this file that `tensor` is of `other`, of which this is a copy. None if it is not one."""
        start = tensor.data_ptr() - other._bytes.data_ptr()
        if not 0 <= start < other.num_bytes or not tensor.is_contiguous():
            return None
        return self.tensor(start, tensor.dtype, tensor.shape)

    def tensor(self, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor that begins at byte `start`: a view, or a copy if it is not aligned.

        Raises:
            CheckpointError: It ends beyond the file.
        """
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if start < 0 or start + num_bytes > self.num_bytes:
            raise CheckpointError(
                f"{self.path} is truncated: a tensor of {num_bytes} bytes begins at {start}, the file has "
                f"{self.num_bytes} bytes."
            )
        content = self._bytes[start : start + num_bytes]
        if start % dtype.itemsize:
            content = content.clone()
        return content.view(dtype).view(tuple(shape))

    def check(self) -> None:
        """Raise CheckpointError if the file is shorter than before; one system call."""
        size = os.fstat(self._descriptor).st_size
        if size < self.num_bytes:
            raise CheckpointError(
                f"{self.path} has shrunk from {self.num_bytes} to {size} bytes while its weights are in use. "
                "Restore the file and load the model again."
            )

    def read_into(self, buffer: torch.Tensor, start: int) -> None:
        """Fill `buffer` (uint8 on the CPU, contiguous) with the bytes from `start` on, in one copy.

        Raises:
            CheckpointError: The file is too short, or cannot be read.
        """
        bytes_: Any = buffer.numpy()
        view = memoryview(bytes_)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], start + done)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read at byte {start + done}: {error}.") from error
            if count == 0:
                self.check()
                raise CheckpointError(f"{self.path} ends at byte {start + done}, before the end of a weight.")
            done += count

    def load(self, start: int, num_bytes: int) -> None:
        """Read a part of the file into memory. Blocks; returns quickly if it is in memory.

        Releases Python's lock, so that other threads can compute. Raises CheckpointError if the file has shrunk.
        """
        self.check()
        if (start, num_bytes) in self._mapped and self._is_in_memory(start, num_bytes):
            return
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start, num_bytes, os.POSIX_FADV_WILLNEED)
        begin = start - start % mmap.PAGESIZE
        end = min(start + num_bytes, self.num_bytes)
        while begin < end:
            count = min(_READ_BYTES, end - begin)
            if not populate(self._bytes.data_ptr() + begin, count):
                self.check()
                self._bytes[begin : begin + count : mmap.PAGESIZE].sum()  # touches each page
            begin += count
        self._mapped.add((start, num_bytes))

    def _is_in_memory(self, start: int, num_bytes: int) -> bool:
        """Return whether a part seems to be in the page cache. Other parts are read on first access."""
        flag, byte = getattr(os, "RWF_NOWAIT", None), [bytearray(1)]
        if flag is None or not num_bytes:
            return False
        last = start + num_bytes - 1
        try:
            return all(os.preadv(self._descriptor, byte, at, flag) for at in (*range(start, last, _PROBE_BYTES), last))
        except OSError:  # it is not in memory, or the file system cannot tell
            return False


def load_spans(spans: Iterable[FileSpan]) -> None:
    """Read parts of files into memory, adjacent ones together. See `MappedFile.load`."""
    runs: list[FileSpan] = []
    for span in sorted(spans, key=lambda span: (str(span.file.path), span.start)):
        run = runs[-1] if runs else None
        if run is not None and span.file is run.file and span.start <= run.start + run.num_bytes + _GAP_BYTES:
            runs[-1] = FileSpan(run.file, run.start, max(run.num_bytes, span.start + span.num_bytes - run.start))
        else:
            runs.append(span)
    for run in runs:
        run.file.load(run.start, run.num_bytes)


def _map(descriptor: int, num_bytes: int, path: Path) -> torch.Tensor:
    if num_bytes == 0:
        raise CheckpointError(f"{path} is truncated: it is empty. Copy or download the file again.")
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            flags = mmap.MAP_PRIVATE | (_MAP_NORESERVE if hasattr(os, "posix_fadvise") else 0)
            mapping = mmap.mmap(descriptor, num_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        else:
            mapping = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be mapped into memory: {error}.") from error
    return torch.frombuffer(mapping, dtype=torch.uint8)
