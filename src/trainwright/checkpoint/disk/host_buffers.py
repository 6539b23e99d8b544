"""Host memory that is kept between saves, and the copy of a checkpoint's tensors into it.

That copy is all that the training waits for, and not even for all of it where some of the tensors are known to rest
for a while. The memory is a row of blocks which the files' bytes fill one after
the other, so that a state that grows only adds a block, and each file is a few long pieces when it is written.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from trainwright.checkpoint.disk.durable import DIRECT_FROM_BYTES, DISK_BLOCK_BYTES
from trainwright.checkpoint.disk.host_copies import Copy, LaterCopy, copy_now
from trainwright.checkpoint.disk.planned_file import PlannedFile, flat_bytes, host_bytes
from trainwright.checkpoint.disk.quiet_thread import usable_cores
from trainwright.core.host.device_types import properties

# Powers of two: torch rounds pinned memory up to one, and would take up to twice as much for other sizes.
BLOCK_BYTES = 64 * 2**20
_SMALLEST_BLOCK_BYTES = 2**20
_CHUNK_BYTES = 8 * 2**20  # copied by one thread in one go; the last ones keep only one of them busy
_ALIGNMENT = 64  # of each file's first tensor byte, so that a slot can be seen as any dtype
_WORTH_WAITING = 2**16  # bytes; below that lie counters and learning rates, which others than an optimizer change too


class HostBuffers:
    """Blocks of host memory for one copy of a state, allocated when first needed and then reused.

    They are pinned if a tensor comes from an accelerator. `num_threads` copy within the host while the training waits.
    Default: one per core, at most four.
    """

    def __init__(self, *, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or min(4, usable_cores())
        self._blocks: list[torch.Tensor] = []
        self._starts: list[int] = []  # of each block, in bytes from the first one's beginning
        self._pinned = False

    @property
    def addresses(self) -> list[int]:
        """Where the blocks lie; equal from save to save unless one had to be added."""
        return [block.data_ptr() for block in self._blocks]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(block.numel() for block in self._blocks)

    def release(self) -> None:
        """Give the memory back. Whatever was staged in it must not be used any more."""
        self._blocks.clear()
        self._starts.clear()

    def stage(self, files: Sequence[PlannedFile]) -> LaterCopy | None:
        """Copy the tensors of `files` into the buffers, which overwrites the previous content. The files then hold the
        copies.

        Blocks until the copies are done, those from devices too; afterwards the tensors may change. Tensors on several
        devices are copied at the same time.

        Returns:
            The copies that are left: large tensors in plain host memory of files that are `at_rest`. Call its `finish`
                before these files are read or the tensors change. None: nothing is left.
        """
        starts: dict[int, int] = {}
        end = 0
        # What rests comes last: the memory that has been made ready is for the copies that the training waits for.
        for file in sorted(files, key=lambda file: file.at_rest):
            size = file.num_tensor_bytes
            alignment = DISK_BLOCK_BYTES if size >= DIRECT_FROM_BYTES else _ALIGNMENT
            starts[id(file)] = -(-end // alignment) * alignment
            end = starts[id(file)] + size
        found = {tensor.device for file in files for tensor in file.tensors}
        devices = {device for device in found if properties(device.type).copies_beside}
        self.reserve(end, pinned=bool(devices))
        now: list[Copy] = []
        later: list[Copy] = []
        resting: list[torch.Tensor] = []
        for file in files:
            resting += self._place(file, starts[id(file)], now, later)
        copy_now(now, self._num_threads)  # devices copy meanwhile
        for device in devices:
            torch.accelerator.synchronize(device)
        for file in files:
            pieces = self._pieces(starts[id(file)], file.num_tensor_bytes)
            staged = [memoryview(host_bytes(piece)) for piece in pieces]
            file.tensors, file.staged = [], staged
        return LaterCopy(later, resting) if later else None

    def _place(self, file: PlannedFile, position: int, now: list[Copy], later: list[Copy]) -> list[torch.Tensor]:
        """Add what is to be copied of a file, or copy it where memory alone will not do; return whose copy is later."""
        resting: list[torch.Tensor] = []
        for tensor in file.tensors:
            size = tensor.numel() * tensor.element_size()
            if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_neg():
                self._gather(tensor, position, size)
            elif file.at_rest and size >= _WORTH_WAITING and not tensor.is_inference():  # those have no version
                self._cut(tensor.data_ptr(), position, size, later)
                resting.append(tensor)
            else:
                self._cut(tensor.data_ptr(), position, size, now)
            position += size
        return resting

    def reserve(self, num_bytes: int, *, pinned: bool = False) -> None:
        """Hold at least so many bytes; pinned ones replace what is held already and is not."""
        if pinned and not self._pinned:
            self.release()
        self._pinned |= pinned
        missing = num_bytes - self.num_bytes
        # Not as inference tensors, if a save happens to be asked for in inference mode: those are never written again.
        with torch.inference_mode(False):
            while missing > 0:
                size = min(BLOCK_BYTES, max(_SMALLEST_BLOCK_BYTES, 1 << (missing - 1).bit_length()))
                self._starts.append(self.num_bytes)
                self._blocks.append(_block(size, pinned=self._pinned))
                missing -= size

    def fillings(self) -> Iterator[Callable[[], Any]]:
        """Yield functions that each write to a piece of memory that is held, by which the system really gives it.

        On a virtual machine that can take seconds for a gigabyte. They overwrite what is staged.
        """
        for block in self._blocks:
            for done in range(0, block.numel(), _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, block.numel() - done)
                yield partial(_fill, block, done, size)

    def _spans(self, start: int, count: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield where the bytes from `start` on lie: a block, an offset in it, and how many of them."""
        number = bisect.bisect_right(self._starts, start) - 1
        while count:
            block, offset = self._blocks[number], start - self._starts[number]
            length = min(count, block.numel() - offset)
            yield block, offset, length
            start, count, number = start + length, count - length, number + 1

    def _pieces(self, start: int, count: int) -> list[torch.Tensor]:
        """Return the bytes from `start` on, one piece for each block that they lie in."""
        return [block[offset : offset + length] for block, offset, length in self._spans(start, count)]

    def _cut(self, source: int, position: int, size: int, copies: list[Copy]) -> None:
        """Add what is to be copied of memory at the address `source`. Training waits: no object is made of it."""
        for block, offset, length in self._spans(position, size):
            target = block.data_ptr() + offset
            for done in range(0, length, _CHUNK_BYTES):
                copies.append((target + done, source + done, min(_CHUNK_BYTES, length - done)))
            source += length

    def _gather(self, tensor: torch.Tensor, position: int, size: int) -> None:
        """Copy a tensor that is not plain host memory, or start to, from a device that copies beside the host."""
        pieces = self._pieces(position, size)
        on_host = tensor.device.type == "cpu"
        if on_host and len(pieces) == 1:
            pieces[0].view(tensor.dtype).view(tensor.shape).copy_(tensor)  # in one go, without a contiguous copy
            return
        # The next operation in a device's queue may take the memory of `flat`: by then it has been read.
        flat = flat_bytes(tensor.detach().resolve_neg().contiguous())
        for piece, part in zip(pieces, torch.split(flat, [len(piece) for piece in pieces]), strict=True):
            piece.copy_(part, non_blocking=properties(tensor.device.type).copies_beside)


def _fill(block: torch.Tensor, offset: int, size: int) -> None:
    ctypes.memset(block.data_ptr() + offset, 0, size)  # it lets go of the interpreter


def _block(size: int, *, pinned: bool) -> torch.Tensor:
    """Allocate bytes that begin a page of the system; large pages where there are such, since each is filled once."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
