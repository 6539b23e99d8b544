"""Tasks among the modules of a task."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.helpers.tasks import RegressionTask, regression_loader
from tests.trainer.runs import fitted
from trainwright.core.task import TaskModule


class Inner(TaskModule):
    """A task without parameters that logs through the Trainer of the outer task."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[Any, ...]] = set()

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        self.log("inner_loss", loss)
        gathered = self.all_gather(loss.detach())
        self.seen.add((self.trainer.max_epochs, self.device, self.current_epoch, len(gathered)))
        return loss


class Outer(RegressionTask):
    def __init__(self) -> None:
        super().__init__()
        self.inners = nn.ModuleList([Inner()])

    def configure_model(self) -> None:
        if len(self.inners) == 1:
            self.inners.append(Inner())

    def configure_optimizers(self) -> Any:
        assert [inner.trainer.max_epochs for inner in self.inners] == [2, 2]
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        for inner in self.inners:
            loss = inner(loss)
        return loss


def test_tasks_within_a_task_reach_its_trainer_and_log() -> None:
    task = Outer()
    trainer = fitted(task, regression_loader(8, 4), max_epochs=2)
    assert "inner_loss" in trainer.callback_metrics
    for inner in task.inners:
        assert inner.seen == {(2, torch.device("cpu"), epoch, 1) for epoch in (0, 1)}
        assert inner._sink is None
