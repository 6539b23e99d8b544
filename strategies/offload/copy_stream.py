"""Copies between host and device on a separate stream, in the order of the calls.

Pageable memory is copied through reused pinned buffers. Files are read directly into these buffers.
"""

from __future__ import annotations

import functools
import threading
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

    def __init__(self, num_bytes: int = _BUFFER_BYTES, *, pinned: bool = True) -> None:
        self.num_bytes = num_bytes
        self._pinned = pinned
        self._lock = threading.Lock()
        self._free: list[tuple[torch.Tensor, torch.Event | None]] = []

    def acquire(self) -> torch.Tensor:
        """Return a buffer that no copy is reading. May wait for the device."""
        with self._lock:
            found = self._free.pop(0) if len(self._free) > 1 else None
        if found is None:
            # The device is explicit because the user may have set another default device. A buffer that was created in
            # inference mode could not be written outside of it.
            with torch.inference_mode(False):
                return torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        buffer, event = found
        if event is not None:
            event.synchronize()
        return buffer

    def release(self, buffer: torch.Tensor, event: torch.Event | None) -> None:
        """Release a buffer for reuse after `event`."""
        with self._lock:
            self._free.append((buffer, event))


_BUFFERS = PinnedBuffers()


class CopyStream:
    """Consecutive copies in one direction. On devices without a copy stream, such as the CPU, copies are synchronous.

    Memory for `queue` belongs to the computation stream: allocate it there before `queue`, and free it there after
    `join`. Sources are referenced until `release`. The allocator can therefore reuse the memory at once, without extra
    device memory. Memory that `copy_in` allocates belongs to the copy stream, and does not wait for the computation.

    Args:
        device: The device at one end of each copy.

    Attributes:
        is_async: True if copies have their own stream.
        num_queued: Number of copies so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_async = properties(device.type).copies_beside
        self._stream = torch.Stream(device=device) if self.is_async else None
        self._kept: list[torch.Tensor] = []
        self._last: Any = None
        self.num_queued = 0

    def mark(self) -> Any:
        """Return an event that follows all work queued so far on the computation stream. None without a copy stream."""
        return None if self._stream is None else torch.accelerator.current_stream(self._device).record_event()

    def queue(self, copy: Callable[[], Any], *, after: Any = None, source: torch.Tensor | None = None) -> Any:
        """Queue a copy, and return an event that marks its end. Does not block.

        Args:
            copy: Starts the copy on the current stream.
            after: A `mark` after which the copy starts. Default: all work queued on the computation stream.
            source: Device memory that must not be freed before the copy is complete.
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
            self._kept.append(source)
        return self._last

    def copy_in(self, weights: Iterable[Weight]) -> Fetched:
        """Start to copy tensors from host or device into new device memory. May wait for a buffer; see `fill`."""
        if self._stream is None:
            return Fetched({name: tensor.to(self._device, dtype) for name, tensor, dtype, _ in weights})
        with self._stream:
            made = {name: self._copied(tensor, file).to(dtype) for name, tensor, dtype, file in weights}
            return Fetched(made, self, self._stream.record_event())

    def _copied(self, tensor: torch.Tensor, file: Readable | None) -> torch.Tensor:
        if tensor.device == self._device or tensor.is_pinned() or tensor.numel() == 0:
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

        Raises:
            CheckpointError: The file has become shorter.
        """
        if self._stream is None or source.is_pinned():
            target.copy_(source, non_blocking=True)
            return
        source = source.reshape(-1).view(torch.uint8)
        target = target.reshape(-1).view(torch.uint8)
        for start in range(0, source.numel(), _BUFFERS.num_bytes):
            count = min(_BUFFERS.num_bytes, source.numel() - start)
            buffer = _BUFFERS.acquire()
            if file is None:
                buffer[:count].copy_(source[start : start + count])
            else:
                file.read_into(buffer[:count], start)
            target[start : start + count].copy_(buffer[:count], non_blocking=True)
            _BUFFERS.release(buffer, self._stream.record_event())

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Copy a device tensor into new host memory. Does not block.

        Returns:
            The host tensor, and an event that marks the end of the copy. A tensor on the host is returned as it is.
        """
        if self._stream is None:
            self.num_queued += 1
            return source.to("cpu"), None
        made = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        return made, self.queue(functools.partial(made.copy_, source, non_blocking=True), source=source)

    def join(self, event: Any, made: Iterable[torch.Tensor] = ()) -> None:
        """Make the computation stream wait for a copy. Does not block the host.

        Args:
            event: Event of the copy. None if it is complete.
            made: Memory of the copy stream that the computation stream uses from now on.
        """
        if event is not None:
            computation = torch.accelerator.current_stream(self._device)
            computation.wait_event(event)
            for tensor in made:
                tensor.record_stream(computation)  # the copy stream must not reuse it earlier

    def wait(self, event: Any) -> None:
        """Wait on the host until a copy is complete."""
        if event is not None:
            event.synchronize()

    def release(self) -> None:
        """Make the computation stream wait for all copies, and release their sources."""
        if self._kept:
            self.join(self._last)
            self._kept.clear()

    def synchronize(self) -> None:
        """Wait on the host until all copies are complete."""
        self.wait(self._last)
        self._last = None
        self._kept.clear()


@dataclass(slots=True)
class Fetched:
    """Weights that are on the device or are being copied to the device.

    Attributes:
        tensors: Tensors for one use, by their names in the module.
        copies: The stream of the copies. None if they are complete.
        ready: Event that marks the end of the copies.
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
            self.use()
            self.free()
