"""Runs whose steps overlap with copies, and callbacks that do or do not let them."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.strategies.offload.test_training import Tiny, batches
from trainwright.callbacks.callback import Callback


class Losses(Callback):
    """Writes down the losses, and nothing else."""

    reads_only = True

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if result.loss is not None:
            self.values.append(float(result.loss))


def writes(trainer: Any, task: Any, *_: Any) -> None:
    """Shrink all weights in a way that no version counter sees."""
    for parameter in task.parameters():
        parameter.data.mul_(0.9)


def writer(event: str, base: type[Callback] = Callback, **attributes: Any) -> Callback:
    """Return a callback that writes weights at an event."""
    made: Callback = type("Writer", (base,), {event: lambda self, *args: writes(*args), **attributes})()
    return made


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
