"""Copies between the host and a device, made beside the computation and in the order in which they are asked for.

What is in pageable memory or in a file passes through pinned buffers that are used again and again: one copy on the
host, read straight from the file where there is one.
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


Weight = tuple[str, torch.Tensor, torch.dtype, Readable | None]  # name, value, the dtype that it gets, its file


class PinnedBuffers:
    """Host buffers that copies to a device pass through, each reused once its last copy is over.

    Args:
        pinned: False for ordinary memory, from which copies wait.
    """

    def __init__(self, num_bytes: int = _BUFFER_BYTES, *, pinned: bool = True) -> None:
        self.num_bytes = num_bytes
        self._pinned = pinned
        self._lock = threading.Lock()
        self._free: list[tuple[torch.Tensor, torch.Event | None]] = []

    def acquire(self) -> torch.Tensor:
        """Return a buffer that nothing reads any more; may wait for the device."""
        with self._lock:
            found = self._free.pop(0) if len(self._free) > 1 else None
        if found is None:
            # Where the user's default device is another, only the host has pinned memory; and a buffer that was made in
            # inference mode could not be written again outside of it.
            with torch.inference_mode(False):
                return torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        buffer, event = found
        if event is not None:
            event.synchronize()
        return buffer

    def give_back(self, buffer: torch.Tensor, event: torch.Event | None) -> None:
        """Take a buffer back, to be used again after `event`."""
        with self._lock:
            self._free.append((buffer, event))


_BUFFERS = PinnedBuffers()


class CopyStream:
    """Copies of one direction, one after the other. On the CPU, which has nothing beside, they are made at once.

    What is copied with `queue` belongs to the stream that computes: memory is allocated there before `queue` and freed
    there after `join`, and what is copied from is kept until `release`. So the allocator may give it to others at once,
    and the device never holds more than the program says. What `bring` makes is this stream's, and waits for no
    computation.

    Args:
        device: that one end of each copy is on.

    Attributes:
        is_beside: whether it is another stream than that of the computation.
        num_queued: copies so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_beside = properties(device.type).copies_beside
        self._stream = torch.Stream(device=device) if self.is_beside else None
        self._kept: list[torch.Tensor] = []
        self._last: Any = None
        self.num_queued = 0

    def mark(self) -> Any:
        """Return an event for all that the computation has been given so far."""
        return None if self._stream is None else torch.accelerator.current_stream(self._device).record_event()

    def queue(self, copy: Callable[[], Any], *, after: Any = None, source: torch.Tensor | None = None) -> Any:
        """Have a copy made, and return the event of its end; waits for nothing.

        Args:
            copy: starts it on the present stream.
            after: a `mark` that it must not begin before. Default: all that the computation has been given.
            source: memory of the device that must stay until it is made.
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

    def bring(self, weights: Iterable[Weight]) -> Fetched:
        """Have tensors of the host, or of the device, copied into memory that is made for them; see `fill`."""
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
        """Copy a contiguous tensor of the host to one of the device, on the present stream; may wait for a buffer.

        Args:
            file: what `source` is a part of, read past its mapping.

        Raises:
            CheckpointError: a file has become shorter.
        """
        if self._stream is None or source.is_pinned():
            target.copy_(source, non_blocking=True)
            return
        source, target = source.reshape(-1).view(torch.uint8), target.reshape(-1).view(torch.uint8)
        for start in range(0, source.numel(), _BUFFERS.num_bytes):
            count = min(_BUFFERS.num_bytes, source.numel() - start)
            buffer = _BUFFERS.acquire()
            if file is None:
                buffer[:count].copy_(source[start : start + count])
            else:
                file.read_into(buffer[:count], start)
            target[start : start + count].copy_(buffer[:count], non_blocking=True)
            _BUFFERS.give_back(buffer, self._stream.record_event())

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Have a tensor of the device copied into memory of the host that is made for it; waits for nothing.

        Returns:
            That memory, and the event of the copy's end. The tensor itself where it is on the host.
        """
        if self._stream is None:
            self.num_queued += 1
            return source.to("cpu"), None
        made = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        return made, self.queue(functools.partial(made.copy_, source, non_blocking=True), source=source)

    def join(self, event: Any, made: Iterable[torch.Tensor] = ()) -> None:
        """Let the computation go on from here when a copy is made; the host goes on at once.

        Args:
            event: of the copy's end; None: it is made.
            made: memory of this stream that the computation uses from now on.
        """
        if event is not None:
            computation = torch.accelerator.current_stream(self._device)
            computation.wait_event(event)
            for tensor in made:
                tensor.record_stream(computation)  # which this stream must not reuse too early

    def wait(self, event: Any) -> None:
        """Return when a copy is made: the host may read and write its end of it."""
        if event is not None:
            event.synchronize()

    def release(self) -> None:
        """Let the computation go on from here when all copies are made, and reuse what they were made from."""
        if self._kept:
            self.join(self._last)
            self._kept.clear()

    def synchronize(self) -> None:
        """Return when all copies are made."""
        self.wait(self._last)
        self._last = None
        self._kept.clear()


@dataclass(slots=True)
class Fetched:
    """Weights on their way to where they are used, or there.

    Attributes:
        tensors: by their names in the module, where they are made for one use.
        copies: the stream that they come on; None: they are there.
        ready: the event of their copies' end.
        free: gives memory back that does not go with `tensors`.
    """

    tensors: dict[str, torch.Tensor]
    copies: CopyStream | None = None
    ready: Any = None
    free: Callable[[], None] | None = None

    def use(self) -> dict[str, torch.Tensor]:
        """Return the tensors, safe for what the calling thread queues on its stream from now on; does not block."""
        if self.copies is not None:
            self.copies.join(self.ready, self.tensors.values())
            self.copies = None
        return self.tensors

    def discard(self) -> None:
        """Give back the memory of what is not going to be used."""
        if self.free is not None:
            self.use()
            self.free()
