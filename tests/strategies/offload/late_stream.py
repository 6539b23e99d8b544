"""A stream whose copies are made as late as can be: whoever does not wait for them finds what was there before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from trainwright.strategies.offload.copy_stream import CopyStream


class LateStream(CopyStream):
    """Stands in for `CopyStream` where the device is the host; an event is the number of its copy.

    Attributes:
        most_kept: the largest number of bytes that were kept as sources of copies at a time.
        waiting: copies that were asked for and not made yet.
    """

    all: list[LateStream] = []  # noqa: RUF012  # of the run, in the order in which they were made

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self.waiting: deque[tuple[int, Callable[[], Any]]] = deque()
        self.most_kept = 0
        LateStream.all.append(self)

    def mark(self) -> Any:
        return 0

    def queue(self, copy: Callable[[], Any], *, after: Any = None, source: torch.Tensor | None = None) -> Any:
        self.num_queued += 1
        self.waiting.append((self.num_queued, copy))
        if source is not None:
            self._kept.append(source)
            self.most_kept = max(self.most_kept, sum(each.nbytes for each in self._kept))
        return self.num_queued

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        made = torch.full_like(source, float("nan"))
        return made, self.queue(lambda: copy_to(made, source), source=source)

    def join(self, event: Any, made: Iterable[torch.Tensor] = ()) -> None:
        self.wait(event)

    def wait(self, event: Any) -> None:
        while event is not None and self.waiting and self.waiting[0][0] <= event:
            self.waiting.popleft()[1]()

    def release(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        self.wait(self.num_queued)
        self._kept.clear()


def copy_to(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
