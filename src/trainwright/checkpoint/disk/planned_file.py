"""Checkpoint files that are encoded but not written yet: header bytes, followed by tensors."""

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
    from trainwright.checkpoint.disk.low_priority_thread import LowPriorityThread

_OPEN_AT_ONCE = 64  # files; systems limit a process to some hundreds
LOW_PRIORITY_FROM_BYTES = 2**20  # smaller saves do not slow training down


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor whose values are read while its file is written.

    Attributes:
        like: meta tensor with the shape and dtype of the weight.
        read: yields the weight's elements in order as 1-D CPU tensors. Successive tensors may share one buffer.
        in_memory: the tensor, if it is in memory. Default: None.
    """

    like: torch.Tensor
    read: Callable[[], Iterator[torch.Tensor]]
    in_memory: torch.Tensor | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Weight:
        """Return a `Weight` for a tensor in memory, on any device except meta."""
        tensor = tensor.detach()
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return cls(like, lambda: _chunks_of(tensor), tensor)

    def chunks(self) -> Iterator[memoryview]:
        """Yield the weight's bytes in order. Each chunk may overwrite the previous chunk."""
        for part in self.read():
            data: Any = flat_bytes(part).numpy()
            yield memoryview(data)
            del part, data  # frees it before the next one is created


def _chunks_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in order. A tensor that is not contiguous is copied once."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    count = CHUNK_BYTES // flat.element_size()
    for begin in range(0, flat.numel(), count):
        yield flat[begin : begin + count].cpu()


@dataclass(slots=True)
class PlannedFile:
    """One file, ready to be written.

    After the head, the file has bytes of one source: `tensors`, `staged` or `streamed`. The others are empty.

    Attributes:
        path: path relative to the checkpoint folder.
        head: first bytes of the file: the complete JSON file, or the length and the header of a safetensors file.
        tensors: the tensors that follow the head without gaps, in this order, on any device. They are not copies.
        staged: copies of the tensors' bytes in host memory, as consecutive ranges. `HostBuffers.stage` replaces
            `tensors` by them.
        streamed: weights that are read while the file is written; see `plan_streamed`.
        state_rests: True if nothing changes the tensors before the next step of an optimizer. Set by the writer from
            `Snapshot.state_rests`.
    """

    path: str
    head: bytes
    tensors: list[torch.Tensor] = field(default_factory=list)
    staged: list[memoryview] = field(default_factory=list)
    streamed: list[Weight] = field(default_factory=list)
    state_rests: bool = False

    @property
    def num_tensor_bytes(self) -> int:
        """Number of bytes after the head."""
        tensors = self.tensors + [weight.like for weight in self.streamed]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return num_bytes + sum(len(part) for part in self.staged)

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the file's bytes in order. Device tensors are copied to the host one at a time."""
        yield self.head
        for tensor in self.tensors:
            if tensor.numel():
                yield memoryview(host_bytes(tensor))
        yield from self.staged
        for weight in self.streamed:
            yield from weight.chunks()


def host_bytes(tensor: torch.Tensor) -> Any:
    """Return a tensor's bytes as a flat uint8 array, which shares the memory of a contiguous host tensor."""
    return flat_bytes(tensor.detach().resolve_neg().cpu().contiguous()).numpy()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as a 1-D uint8 view."""
    # A tensor of one element is contiguous with any stride, but can be viewed as bytes with stride 1 only.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def write_files(
    folder: Path, files: Iterable[PlannedFile], *, quiet: LowPriorityThread | None = None
) -> dict[str, FileEntry]:
    """Write files below `folder`, whose subfolders must exist, and block until the files are on the disk.

    With `quiet`, files of at least `LOW_PRIORITY_FROM_BYTES` are written as a `LowPriorityFile`; their tensors must be
    `staged`. Default: None, which writes at full speed and hashes large files in a second thread.

    Returns:
        Size and hash of each file by its path.
    """
    entries: dict[str, FileEntry] = {}
    remaining = iter(files)
    while batch := list(itertools.islice(remaining, _OPEN_AT_ONCE)):
        with contextlib.ExitStack() as stack:
            written = [_write(folder, planned, quiet, stack) for planned in batch]
            # All are written before the first sync, so that a journaling file system commits once for all files.
            for file in written:
                file.sync()
        for planned, file in zip(batch, written, strict=True):
            entries[planned.path] = file.entry
    return entries


def _write(
    folder: Path, planned: PlannedFile, quiet: LowPriorityThread | None, stack: contextlib.ExitStack
) -> HashingFile:
    """Write a file without waiting for the disk. `stack` syncs and closes the result, and `write_files` syncs it."""
    path = folder / planned.path
    size = len(planned.head) + planned.num_tensor_bytes
    is_quiet = quiet is not None and size >= LOW_PRIORITY_FROM_BYTES
    if quiet is not None and is_quiet:
        from trainwright.checkpoint.disk.low_priority_file import LowPriorityFile  # not needed for reading

        file: HashingFile = stack.enter_context(LowPriorityFile(path, size=size, quiet=quiet))
    else:
        # Without the size, the file is hashed in this thread. Streamed chunks must be: the next one overwrites them.
        hashes_in_thread = quiet is None and not planned.streamed
        file = stack.enter_context(HashingFile(path, size=size if hashes_in_thread else 0))
    for chunk in planned.chunks():
        file.write(chunk)
        del chunk  # frees it before the next one is created
    if not is_quiet:  # a `LowPriorityFile` may still have chunks to hash
        file.finish()
    return file
