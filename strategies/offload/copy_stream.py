"""Copies between host and device on a separate stream, in the order of the calls.

Pageable memory is copied through reused pinned buffers. Files are read directly into these buffers.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainwright.core.host.device_types import properties

_BUFFER_BYTES = 32 * 2**20


class Readable(Protocol):
    """A tensor's bytes in a file."""

    def read_into(self, buffer: torch.Tensor, start: int) -> None:
        """Fill a buffer (uint8 on the CPU, contiguous) with the tensor's bytes from `start` on."""


Weight = tuple[str, torch.Tensor, torch.dtype, Readable | None]  # name, value, target dtype, file


class PinnedBuffers:
    """Host buffers for copies to a device. Each buffer is reused once its last copy is complete.

    Args:
        num_bytes: Size of each buffer.
        pinned: Use pinned memory. False uses pageable memory, from which copies block. Default: True.
    """

    # Number of buffers that must be free before one is reused. With two, the host fills one buffer while the device
    # copies the other one, and the reused buffer is the one whose copy began first.
    _MIN_FREE = 2

    def __init__(self, num_bytes: int = _BUFFER_BYTES, *, pinned: bool = True) -> None:
        self.num_bytes = num_bytes
        self._pinned = pinned
        self._lock = threading.Lock()
        # Released buffers, the oldest first. The event marks the end of the buffer's last copy; None if it has ended.
        self._free: deque[tuple[torch.Tensor, torch.Event | None]] = deque()

    def acquire(self) -> torch.Tensor:
        """Return a buffer that no copy is reading. May wait for the device."""
        with self._lock:
            reused = self._free.popleft() if len(self._free) >= self._MIN_FREE else None
        if reused is None:
            # The device is explicit because the user may have set another default device. A buffer that was created in
            # inference mode could not be written outside of it.
            with torch.inference_mode(False):
                return torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        buffer, event = reused
        if event is not None:
            event.synchronize()
        return buffer

    def release(self, buffer: torch.Tensor, event: torch.Event | None) -> None:
        """Release a buffer for reuse after `event`. None if no copy is reading it."""
        with self._lock:
            self._free.append((buffer, event))


_BUFFERS = PinnedBuffers()


class CopyStream:
    """Consecutive copies in one direction. On devices without a copy stream, such as the CPU, copies are synchronous.

    The computation stream is the current stream of the thread that calls a method.

    Memory for `queue` belongs to the computation stream: allocate it there before `queue`, and free it there after
    `join`. Sources are referenced until `release` or `synchronize`. The allocator can therefore reuse the memory at
    once, without extra device memory. Memory that `copy_in` allocates belongs to the copy stream, and does not wait for
    the computation.

    Args:
        device: The device at one end of each copy.

    Attributes:
        is_async: True if copies have their own stream.
        num_queued: Number of calls of `queue` and `fetch` so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_async = properties(device.type).copies_beside
        self._stream = torch.Stream(device=device) if self.is_async else None
        self._sources: list[torch.Tensor] = []  # referenced so that the allocator does not reuse their memory
        self._last: Any = None  # event after the last copy of `queue`. None before it, and after `synchronize`.
        self.num_queued = 0

    def mark(self) -> Any:
        """Return an event that follows all work queued so far on the computation stream. None without a copy stream."""
        return None if self._stream is None else torch.accelerator.current_stream(self._device).record_event()

    def queue(self, copy: Callable[[], Any], *, after: Any = None, source: torch.Tensor | None = None) -> Any:
        """Queue a copy, and return an event that marks its end. Does not block.

        Args:
            copy: Starts the copy on the current stream.
            after: A `mark` after which the copy starts. Default: None, after all work that is queued on the computation
                stream.
            source: Device memory that must not be freed before the copy is complete. Default: None, which requires the
                caller to keep the memory.

        Returns:
            The event. None if the copy is complete, on devices without a copy stream.
        """
        self.num_queued += 1
        if self._stream is None:
            copy()
            return None
        self._stream.wait_event(self.mark() if after is None else after)
        with self._stream:
            copy()
            self._last = self._stream.record_event()
        if source is not None:
            self._sources.append(source)
        return self._last

    def copy_in(self, weights: Iterable[Weight]) -> Fetched:
        """Start to copy tensors from host or device into new device memory. May wait for a buffer; see `fill`.

        On devices without a copy stream, the copies are complete when the method returns, and a tensor that needs none
        is returned as it is.

        Raises:
            CheckpointError: A file has become shorter.
        """
        if self._stream is None:
            return Fetched({name: tensor.to(self._device, dtype) for name, tensor, dtype, _ in weights})
        with self._stream:
            copied: dict[str, torch.Tensor] = {}
            for name, tensor, dtype, file in weights:
                copied[name] = self._copy_to_device(tensor, file).to(dtype)  # converted on the device
            return Fetched(copied, self, self._stream.record_event())

    def _copy_to_device(self, tensor: torch.Tensor, file: Readable | None) -> torch.Tensor:
        needs_buffer = tensor.device != self._device and not tensor.is_pinned() and tensor.numel() > 0
        if not needs_buffer:
            return tensor.to(self._device, non_blocking=True)
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        self.fill(target, tensor.contiguous(), file)
        return target

    def fill(self, target: torch.Tensor, source: torch.Tensor, file: Readable | None = None) -> None:
        """Copy a contiguous host tensor to a device tensor on the current stream. May wait for a buffer.

        Args:
            target: The device tensor.
            source: The host tensor.
            file: The file that `source` is mapped to. The bytes are read from the file, not through the mapping.
                Default: None, which copies from `source`.

        Raises:
            CheckpointError: The file has become shorter.
        """
        if self._stream is None or source.is_pinned():
            target.copy_(source, non_blocking=True)
            return
        source_bytes = source.reshape(-1).view(torch.uint8)
        target_bytes = target.reshape(-1).view(torch.uint8)
        for start in range(0, source_bytes.numel(), _BUFFERS.num_bytes):
            end = min(start + _BUFFERS.num_bytes, source_bytes.numel())
            buffer = _BUFFERS.acquire()
            chunk = buffer[: end - start]
            if file is None:
                chunk.copy_(source_bytes[start:end])
            else:
                file.read_into(chunk, start)
            target_bytes[start:end].copy_(chunk, non_blocking=True)
            _BUFFERS.release(buffer, self._stream.record_event())

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy a device tensor into new host memory. Does not block.

        Returns:
            The host tensor, and an event that marks the end of the copy. The event is None if the copy is complete, on
            devices without a copy stream. A tensor on the host is returned as it is.
        """
        if self._stream is None:
            self.num_queued += 1
            return source.to("cpu"), None
        on_host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        event = self.queue(functools.partial(on_host.copy_, source, non_blocking=True), source=source)
        return on_host, event

    def join(self, event: Any, allocated: Iterable[torch.Tensor] = ()) -> None:
        """Make the computation stream wait for a copy. Does not block the host.

        Args:
            event: Event of the copy. None if it is complete.
            allocated: Tensors of `copy_in`, in memory of the copy stream. The computation stream uses them from now on.
        """
        if event is not None:
            computation = torch.accelerator.current_stream(self._device)
            computation.wait_event(event)
            for tensor in allocated:
                # When the tensor is freed, the copy stream reuses the memory only after the computations queued so far.
                tensor.record_stream(computation)

    def wait(self, event: Any) -> None:
        """Wait on the host until a copy is complete. `event` is None for a complete copy."""
        if event is not None:
            event.synchronize()

    def release(self) -> None:
        """Make the computation stream wait for all copies of `queue`, and release their sources. Does not block."""
        if self._sources:
            self.join(self._last)
            self._sources.clear()

    def synchronize(self) -> None:
        """Wait on the host until all copies of `queue` and `fetch` are complete, and release their sources."""
        self.wait(self._last)
        self._last = None
        self._sources.clear()


@dataclass(slots=True)
class Fetched:
    """Weights that are on the device or are being copied to the device.

    Attributes:
        tensors: Tensors for one use, by their names in the module. Empty for units of `OffloadStrategy`, which own
            their device memory.
        copies: The stream of the copies. None if they are complete, and after `use`.
        ready: Event that marks the end of the copies. None without a copy stream.
        free: Function that frees further memory of the weights. None if `tensors` owns all of it.
    """

    tensors: dict[str, torch.Tensor]
    copies: CopyStream | None = None
    ready: Any = None
    free: Callable[[], None] | None = None

    def use(self) -> dict[str, torch.Tensor]:
        """Make the calling thread's current stream wait for the copies, and return the tensors. Does not block."""
        if self.copies is not None:
            self.copies.join(self.ready, self.tensors.values())
            self.copies = None
        return self.tensors

    def discard(self) -> None:
        """Free the memory of weights that will not be used."""
        if self.free is not None:
            self.use()  # the memory is freed on the computation stream, after the copies
            self.free()
