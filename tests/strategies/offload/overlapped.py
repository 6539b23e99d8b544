"""Runs whose steps overlap with copies, callbacks that do or do not let them, and copies that are made late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.strategies.offload.test_training import Tiny, batches
from trainwright.callbacks.callback import Callback
from trainwright.strategies.offload.copy_stream import CopyStream


class Losses(Callback):
    """Writes down the losses and the sums of accumulated gradients, and nothing else."""

    reads_only = True

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if result.loss is not None:
            self.values.append(float(result.loss))

    def on_train_batch_end(self, trainer: Any, task: Any, *_: Any) -> None:
        self.values += [float(p.grad.sum()) for p in task.parameters() if p.grad is not None]


def writes(trainer: Any, task: Any, *_: Any) -> None:
    """Shrink all weights in a way that no version counter sees."""
    for parameter in task.parameters():
        parameter.data.mul_(0.9)


def writer(event: str, base: type[Callback] = Callback, **attributes: Any) -> Callback:
    return type("Writer", (base,), {event: lambda self, *args: writes(*args), **attributes})()


def train(
    strategy: Any = "single", *callbacks: Callback, task: Tiny | None = None, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    task = Tiny() if task is None else task
    losses = Losses()
    settings: dict[str, Any] = {"max_epochs": 2, "callbacks": [losses, *callbacks], **options}
    trainer = quiet_trainer(strategy=strategy, **settings)
    torch.manual_seed(3)
    trainer.fit(task, batches(5), batches(2) if settings.get("limit_val_batches") != 0 else None)
    return losses.values, weights_of(task), trainer


def assert_same(found: Any, wanted: Any) -> None:
    assert found[0] == wanted[0]
    assert_equal_weights(found[1], wanted[1])
    assert found[2].callback_metrics == wanted[2].callback_metrics


class LateStream(CopyStream):
    """Makes copies as late as can be, where the device is the host; an event is the number of its copy.

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
            self._sources.append(source)
            self.most_kept = max(self.most_kept, sum(each.nbytes for each in self._sources))
        return self.num_queued

    def fetch(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        made = torch.full_like(source, float("nan"))
        return made, self.queue(lambda: copy_to(made, source), source=source)

    def join(self, event: Any, allocated: Iterable[torch.Tensor] = ()) -> None:
        self.wait(event)

    def wait(self, event: Any) -> None:
        while event is not None and self.waiting and self.waiting[0][0] <= event:
            self.waiting.popleft()[1]()

    def release(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        self.wait(self.num_queued)
        self._sources.clear()


def copy_to(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
