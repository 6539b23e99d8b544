"""Host memory that is kept between saves, and the copy of a checkpoint's tensors into it.

That copy is all that a training step waits for. The memory is a row of blocks which the files' bytes fill one after
the other, so that a state that grows only adds a block, and each file is a few long pieces when it is written.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from trainwright.checkpoint.planned_file import PlannedFile, host_bytes

# Powers of two: torch rounds pinned memory up to one, and would take up to twice as much for other sizes.
BLOCK_BYTES = 64 * 2**20
_SMALLEST_BLOCK_BYTES = 2**20
_BATCH_BYTES = 16 * 2**20
_ALIGNMENT = 64  # of each file's first tensor byte, so that a slot can be seen as any dtype
_PINNABLE = ("cuda", "xpu")  # devices whose copies run beside the host only into pinned memory

_Copy = tuple[Any, Any]  # to, from: uint8 arrays of equal length


class HostBuffers:
    """Blocks of host memory for one copy of a state, allocated when first needed and then reused.

    They are pinned if a tensor comes from an accelerator. A checkpoint that needs less leaves the rest for the next.

    Args:
        num_threads: for copies within the host, during which the training waits: one a core, four at most, unless
            told. One alone may use half of what the memory gives.
    """

    def __init__(self, *, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or min(4, os.cpu_count() or 1)
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

    def stage(self, files: Sequence[PlannedFile]) -> None:
        """Copy the tensors of `files` into the buffers; the files then hold the copies and forget the tensors.

        What was staged before is overwritten. Blocks until the copies are done, those from devices too; the state may
        change as soon as it returns. Tensors on several devices are copied at the same time.
        """
        starts: list[int] = []
        end = 0
        for file in files:
            starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            end = starts[-1] + file.num_tensor_bytes
        tensors = [tensor for file in files for tensor in file.tensors]
        self._reserve(end, pinned=any(tensor.device.type in _PINNABLE for tensor in tensors))
        on_host = sum(file.num_tensor_bytes for file in files if all(t.device.type == "cpu" for t in file.tensors))
        # A small state is not worth a thread.
        _copy_on_host(self._all_copies(files, starts), self._num_threads if on_host >= BLOCK_BYTES else 1)
        for device in {tensor.device for tensor in tensors if tensor.device.type in _PINNABLE}:
            torch.accelerator.synchronize(device)
        for file, start in zip(files, starts, strict=True):
            staged = [memoryview(host_bytes(piece)) for piece in self._pieces(start, file.num_tensor_bytes)]
            file.tensors, file.staged = [], staged

    def _reserve(self, num_bytes: int, *, pinned: bool) -> None:
        if pinned and not self._pinned:
            self.release()
        self._pinned |= pinned
        missing = num_bytes - self.num_bytes
        # Not as inference tensors, if a save happens to be asked for in inference mode: those are never written again.
        with torch.inference_mode(False):
            while missing > 0:
                size = min(BLOCK_BYTES, max(_SMALLEST_BLOCK_BYTES, 1 << (missing - 1).bit_length()))
                self._starts.append(self.num_bytes)
                self._blocks.append(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned))
                missing -= size

    def _pieces(self, start: int, count: int) -> Iterator[torch.Tensor]:
        """Yield the bytes from `start` on, in one piece for each block that they lie in."""
        number = bisect.bisect_right(self._starts, start) - 1
        while count:
            block = self._blocks[number]
            offset = start - self._starts[number]
            piece = block[offset : offset + count]
            yield piece
            start, count, number = start + piece.numel(), count - piece.numel(), number + 1

    def _all_copies(self, files: Sequence[PlannedFile], starts: Sequence[int]) -> Iterator[_Copy]:
        """Start every copy from a device, and yield what there is to copy on the host; devices copy meanwhile."""
        for file, position in zip(files, starts, strict=True):
            for tensor in file.tensors:
                yield from self._copies(tensor, position)
                position += tensor.numel() * tensor.element_size()

    def _copies(self, tensor: torch.Tensor, position: int) -> list[_Copy]:
        """Start the copy of a device tensor; return what there is to copy of one on the host."""
        pieces = list(self._pieces(position, tensor.numel() * tensor.element_size()))
        if tensor.device.type != "cpu":
            # The next operation in the device's queue may take the memory of `flat`: by then it has been read.
            flat = tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            for piece, part in zip(pieces, torch.split(flat, [len(piece) for piece in pieces]), strict=True):
                piece.copy_(part, non_blocking=tensor.device.type in _PINNABLE)
            return []
        if len(pieces) == 1 and not tensor.is_contiguous():
            pieces[0].view(tensor.dtype).view(tensor.shape).copy_(tensor)  # in one go, without a contiguous copy
            return []
        source, copies, start = host_bytes(tensor), [], 0
        for piece in pieces:
            copies.append((piece.numpy(), source[start : start + len(piece)]))
            start += len(piece)
        if not tensor.is_contiguous():  # `source` is a copy, of which only one is to be in memory at a time
            _copy_on_host(copies, 1)
            return []
        return copies


def _copy_on_host(copies: Iterable[_Copy], num_threads: int) -> None:
    # NumPy copies as the C library does and lets go of the interpreter. torch's own copy divides each tensor among all
    # its threads and waits for the slowest, which takes twice as long where another process needs a core.
    if num_threads == 1:
        _copy_all(copies)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="trainwright-copy") as pool:
        running: list[Future[None]] = []
        batch: list[_Copy] = []  # handing each copy over by itself would cost a fifth of the time
        size = 0
        for copy in copies:
            batch.append(copy)
            size += len(copy[0])
            if size >= _BATCH_BYTES:
                running.append(pool.submit(_copy_all, batch))
                batch, size = [], 0
        running.append(pool.submit(_copy_all, batch))
    for done in running:
        done.result()


def _copy_all(copies: Iterable[_Copy]) -> None:
    for target, source in copies:
        np.copyto(target, source)
