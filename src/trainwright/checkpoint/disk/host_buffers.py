"""Host buffers that are reused between saves, and the copy of a checkpoint's tensors into them.

Training waits for this copy. Large tensors that do not change before the next optimizer step can be copied later. The
bytes of the files fill consecutive blocks of memory, so that each file is written from a few large contiguous ranges.
If the state grows, blocks are added.
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
from trainwright.checkpoint.disk.low_priority_thread import usable_cores
from trainwright.checkpoint.disk.planned_file import PlannedFile, flat_bytes, host_bytes
from trainwright.core.host.device_types import properties

# Powers of two, since torch rounds the size of pinned memory up to one.
BLOCK_BYTES = 64 * 2**20
_SMALLEST_BLOCK_BYTES = 2**20
_CHUNK_BYTES = 8 * 2**20  # copied by one thread in one call; small, so that all threads end at about the same time
_ALIGNMENT = 64  # of each file's first tensor byte, so that a range can be viewed as any dtype
_LATER_FROM_BYTES = 2**16  # smaller tensors are counters and learning rates, which not only an optimizer changes


class HostBuffers:
    """Blocks of host memory for one copy of a checkpoint's tensors, allocated when first needed and then reused.

    The memory is pinned if a tensor is on an accelerator with asynchronous copies.

    Args:
        num_threads: threads that copy host tensors while training waits. Default: one per core, at most 4.
    """

    def __init__(self, *, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or min(4, usable_cores())
        self._blocks: list[torch.Tensor] = []  # of uint8, filled as if they were one vector
        self._starts: list[int] = []  # position of each block's first byte in this vector
        self._pinned = False  # True once a save needed pinned memory. All blocks are then pinned

    @property
    def num_bytes(self) -> int:
        """Size of the allocated memory."""
        return sum(block.numel() for block in self._blocks)

    def release(self) -> None:
        """Free the memory. Copies in the buffers must not be used afterwards."""
        self._blocks.clear()
        self._starts.clear()

    def stage(self, files: Sequence[PlannedFile], *, may_copy_later: bool = True) -> LaterCopy | None:
        """Copy the tensors of `files` into the buffers, and make the files refer to the copies.

        Overwrites the previous copies. Blocks until the copies from all devices, which run in parallel, are done.
        Afterwards the tensors may change, except those of the returned copies.

        Args:
            files: the files of a save.
            may_copy_later: leave out large host tensors of files with `state_rests`. Default: True.

        Returns:
            The remaining copies, which are of the tensors that were left out. Call `finish` of the result before these
            files are read or these tensors change. None if no copies remain.
        """
        # Files at rest come last: the memory that `fillings` has prepared is for the copies that training waits for.
        ordered = sorted(files, key=lambda file: file.state_rests)
        starts: list[int] = []  # position in the buffers of the first tensor byte of each file
        end = 0
        for file in ordered:
            size = file.num_tensor_bytes
            alignment = DISK_BLOCK_BYTES if size >= DIRECT_FROM_BYTES else _ALIGNMENT
            # Rounded up: after 100 bytes, the next multiple of 64 is 128.
            start = -(-end // alignment) * alignment
            starts.append(start)
            end = start + size
        devices: set[torch.device] = set()  # with asynchronous copies
        for file in ordered:
            devices.update(tensor.device for tensor in file.tensors if properties(tensor.device.type).copies_beside)
        self.reserve(end, pinned=bool(devices))
        now: list[Copy] = []
        later: list[Copy] = []
        later_tensors: list[torch.Tensor] = []
        for file, start in zip(ordered, starts, strict=True):
            may_wait = may_copy_later and file.state_rests
            later_tensors += self._place(file, start, now, later if may_wait else None)
        copy_now(now, self._num_threads)  # devices copy at the same time
        for device in devices:
            torch.accelerator.synchronize(device)
        for file, start in zip(ordered, starts, strict=True):
            ranges = self._ranges(start, file.num_tensor_bytes)
            file.staged = [memoryview(host_bytes(part)) for part in ranges]
            file.tensors = []
        return LaterCopy(later, later_tensors) if later else None

    def _place(self, file: PlannedFile, position: int, now: list[Copy], later: list[Copy] | None) -> list[torch.Tensor]:
        """Copy a file's tensors or add their copies to `now` or `later`. Return the tensors of those in `later`.

        Copies from devices start here. `later=None` adds all copies of host tensors to `now`.
        """
        later_tensors: list[torch.Tensor] = []
        for tensor in file.tensors:
            size = tensor.numel() * tensor.element_size()
            if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_neg():
                self._gather(tensor, position, size)
            elif later is None or size < _LATER_FROM_BYTES or tensor.is_inference():
                # `LaterCopy` compares version counters, which tensors of inference mode lack.
                self._add_copies(tensor.data_ptr(), position, size, now)
            else:
                self._add_copies(tensor.data_ptr(), position, size, later)
                later_tensors.append(tensor)
            position += size
        return later_tensors

    def reserve(self, num_bytes: int, *, pinned: bool = False) -> None:
        """Allocate blocks until there are at least `num_bytes`. With `pinned`, unpinned blocks are freed first.

        Blocks that are added after a pinned save are pinned, too.
        """
        if pinned and not self._pinned:
            self.release()
        self._pinned |= pinned
        missing = num_bytes - self.num_bytes
        # A save may run in inference mode, and inference tensors cannot be overwritten outside of it.
        with torch.inference_mode(False):
            while missing > 0:
                power_of_two = 1 << (missing - 1).bit_length()  # the next one: 8 for 5, and 8 for 8
                size = min(BLOCK_BYTES, max(_SMALLEST_BLOCK_BYTES, power_of_two))
                self._starts.append(self.num_bytes)
                self._blocks.append(_block(size, pinned=self._pinned))
                missing -= size

    def fillings(self) -> Iterator[Callable[[], Any]]:
        """Yield functions that each write zeros to a range of the memory, so that the system maps its pages.

        On a virtual machine, mapping can take seconds for a gigabyte. Do not call these functions after `stage`.
        """
        for block in self._blocks:
            for offset in range(0, block.numel(), _CHUNK_BYTES):
                size = min(_CHUNK_BYTES, block.numel() - offset)
                yield partial(_fill, block, offset, size)

    def _spans(self, start: int, count: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield the locations of `count` bytes from `start` on: block, offset in the block, and length.

        With two blocks of 64 MB, 10 MB from 60 MB on are the last 4 MB of the first block and the first 6 MB of the
        second one.
        """
        number = bisect.bisect_right(self._starts, start) - 1  # the block that contains the byte `start`
        while count:
            block = self._blocks[number]
            offset = start - self._starts[number]
            length = min(count, block.numel() - offset)
            yield block, offset, length
            start += length
            count -= length
            number += 1

    def _ranges(self, start: int, count: int) -> list[torch.Tensor]:
        """Return `count` bytes from `start` on, as one view for each block that contains some of these bytes."""
        return [block[offset : offset + length] for block, offset, length in self._spans(start, count)]

    def _add_copies(self, source: int, position: int, size: int, copies: list[Copy]) -> None:
        """Add the copies of `size` bytes from the address `source` to `position`, in chunks.

        Uses addresses instead of views, which take longer to create.
        """
        for block, offset, length in self._spans(position, size):
            target = block.data_ptr() + offset
            for chunk_start in range(0, length, _CHUNK_BYTES):
                chunk_size = min(_CHUNK_BYTES, length - chunk_start)
                copies.append((target + chunk_start, source + chunk_start, chunk_size))
            source += length

    def _gather(self, tensor: torch.Tensor, position: int, size: int) -> None:
        """Copy a tensor that is not contiguous host memory, or start an asynchronous copy from its device."""
        ranges = self._ranges(position, size)
        on_host = tensor.device.type == "cpu"
        if on_host and len(ranges) == 1:
            ranges[0].view(tensor.dtype).view(tensor.shape).copy_(tensor)  # without a contiguous copy
            return
        # `flat` is freed before an asynchronous copy ends. The device runs operations in order, so that the memory is
        # read before it is reused.
        flat = flat_bytes(tensor.detach().resolve_neg().contiguous())
        for target, part in zip(ranges, torch.split(flat, [len(part) for part in ranges]), strict=True):
            target.copy_(part, non_blocking=properties(tensor.device.type).copies_beside)


def _fill(block: torch.Tensor, offset: int, size: int) -> None:
    """Write zeros to a range of a block."""
    ctypes.memset(block.data_ptr() + offset, 0, size)  # ctypes releases the GIL


def _block(size: int, *, pinned: bool) -> torch.Tensor:
    """Allocate page-aligned memory. Memory that is not pinned has huge pages if the system has them."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
