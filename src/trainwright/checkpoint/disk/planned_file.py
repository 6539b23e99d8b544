"""Checkpoint files that are encoded but not yet written: a head of bytes, followed by tensors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainwright.checkpoint.disk.durable import CHUNK_BYTES, FileEntry, HashingFile

if TYPE_CHECKING:
    from trainwright.checkpoint.disk.quiet_thread import QuietThread

_OPEN_AT_ONCE = 64  # files; systems allow a process some hundreds
QUIET_FROM_BYTES = 2**20  # below this nobody notices the work


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor that is read when it is written.

    Attributes:
        like: its shape and dtype, on the meta device.
        read: yields its elements in order as flat tensors on the CPU, which may share one buffer.
        in_memory: the tensor itself, if it is in memory.
    """

    like: torch.Tensor
    read: Callable[[], Iterator[torch.Tensor]]
    in_memory: torch.Tensor | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Weight:
        """Return the weight for a tensor on any device but meta. Its values are read when the file is written."""
        tensor = tensor.detach()
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return cls(like, lambda: _chunks_of(tensor), tensor)

    def chunks(self) -> Iterator[memoryview]:
        """Yield its bytes in order; each chunk is overwritten when the next one is asked for."""
        for part in self.read():
            data: Any = flat_bytes(part).numpy()
            yield memoryview(data)
            del part, data  # before the next one is made


def _chunks_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in order; one copy of it is made if they are not in that order in memory."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    count = CHUNK_BYTES // flat.element_size()
    for begin in range(0, flat.numel(), count):
        yield flat[begin : begin + count].cpu()


@dataclass(slots=True)
class PlannedFile:
    """One file, ready to be written.

    Attributes:
        path: relative to the folder that it goes into.
        head: how it begins: all of a JSON file; length and header of a safetensors file.
        tensors: what follows without gaps, in this order, on any device: the live ones, not copies.
        staged: the same bytes in pieces of host memory, once they have been copied; then `tensors` is empty.
        streamed: instead of `tensors`, what is read while the file is written.
        at_rest: the tensors change in nothing but the next step of an optimizer.
    """

    path: str
    head: bytes
    tensors: list[torch.Tensor] = field(default_factory=list)
    staged: list[memoryview] = field(default_factory=list)
    streamed: list[Weight] = field(default_factory=list)
    at_rest: bool = False

    @property
    def num_tensor_bytes(self) -> int:
        """Bytes after the head."""
        likes = [*self.tensors, *(weight.like for weight in self.streamed)]
        return sum(t.numel() * t.element_size() for t in likes) + sum(len(piece) for piece in self.staged)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the file's bytes in order; device tensors are moved to the host one at a time, and waited for."""
        yield self.head
        for tensor in self.tensors:
            if tensor.numel():
                yield memoryview(host_bytes(tensor))
        yield from self.staged
        for weight in self.streamed:
            yield from weight.chunks()


def host_bytes(tensor: torch.Tensor) -> Any:
    """Return a tensor's bytes as a flat uint8 array: its own memory when it is on the host and contiguous."""
    return flat_bytes(tensor.detach().resolve_neg().cpu().contiguous()).numpy()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as one of dtype uint8 with one dimension, in the same memory."""
    # One element counts as contiguous with any stride, and with another one than 1 its bytes cannot be seen.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def write_files(
    folder: Path, files: Iterable[PlannedFile], *, quiet: QuietThread | None = None
) -> dict[str, FileEntry]:
    """Write files below `folder`, into folders that exist, and block until they are on the disk.

    With `quiet`, that thread does the heavy work for `staged` files. By default they are written at full speed, and
    large ones are hashed in a second thread.

    Returns:
        Size and hash of each by its path.
    """
    entries: dict[str, FileEntry] = {}
    left = iter(files)
    while batch := list(itertools.islice(left, _OPEN_AT_ONCE)):
        with contextlib.ExitStack() as stack:
            written = [_write(folder, planned, quiet, stack) for planned in batch]
            # All are written before the first is synced: a journaling file system then commits once and not per file.
            for file in written:
                file.sync()
        entries |= {planned.path: file.entry for planned, file in zip(batch, written, strict=True)}
    return entries


def _write(folder: Path, planned: PlannedFile, quiet: QuietThread | None, stack: contextlib.ExitStack) -> HashingFile:
    path, size = folder / planned.path, len(planned.head) + planned.num_tensor_bytes
    is_quiet = quiet is not None and size >= QUIET_FROM_BYTES
    if quiet is not None and is_quiet:
        from trainwright.checkpoint.disk.quiet_file import QuietFile  # readers do not need the import

        file: HashingFile = stack.enter_context(QuietFile(path, size=size, quiet=quiet))
    else:
        # size=0 hashes in this thread: streamed chunks are overwritten and would have to be copied for another one.
        file = stack.enter_context(HashingFile(path, size=size if quiet is None and not planned.streamed else 0))
    for piece in planned.pieces():
        file.write(piece)
        del piece  # before the next one is made
    if not is_quiet:
        file.finish()
    return file
