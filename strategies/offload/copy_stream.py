"""Copies between the host and a device, made beside the computation and in the order in which they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CopyStream:
    """Copies of one direction, one after the other. On the CPU, which has nothing beside, they are made at once.

    Memory on the device belongs to the stream that computes: what is copied to is allocated there before `queue` and
    freed there after `join`, what is copied from is kept until `release`. So the allocator may give it to others at
    once, and the device never holds more than the program says.

    Args:
        device: that one end of each copy is on.

    Attributes:
        num_queued: copies so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device=device) if device.type != "cpu" else None
        self._kept: list[torch.Tensor] = []
        self._last: Any = None
        self.num_queued = 0

    def mark(self) -> Any:
        """Return an event for all that the computation has been given so far."""
        return None if self._stream is None else torch.accelerator.current_stream(self._device).record_event()

    def queue(self, copy: Callable[[], None], *, after: Any = None, source: torch.Tensor | None = None) -> Any:
        """Have a copy made, and return the event of its end; waits for nothing.

        Args:
            copy: starts it on the present stream.
            after: a `mark` that it must not begin before; all that the computation has been given, unless told.
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

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Have a tensor of the device copied into memory of the host that is made for it; waits for nothing.

        Returns:
            That memory, and the event of the copy's end. The tensor itself where it is on the host.
        """
        if self._stream is None:
            self.num_queued += 1
            return source, None
        made = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)

        def copy() -> None:
            made.copy_(source, non_blocking=True)

        return made, self.queue(copy, source=source)

    def join(self, event: Any) -> None:
        """Let the computation go on from here when a copy is made; the host goes on at once."""
        if event is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)

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
