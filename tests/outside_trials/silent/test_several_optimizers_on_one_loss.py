"""Several optimizers in automatic optimization step together on one loss: legitimate, but said once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader


class _Two(RegressionTask):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 3)]


def test_it_is_said_once_with_the_way_out() -> None:
    task = _Two()
    with pytest.warns(UserWarning, match=r"_Two.* returned 2 optimizers.*automatic_optimization = False"):
        quiet_trainer(max_epochs=1).fit(task, regression_loader(2))
    quiet_trainer(max_epochs=1).fit(task, regression_loader(2))  # warnings are errors here


def test_one_optimizer_or_a_task_that_steps_them_itself_is_quiet() -> None:
    class Manual(_Two):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers():
                optimizer.step()

    class Meant(_Two):
        automatic_optimization = True

    quiet_trainer(max_epochs=1).fit(Meant(), regression_loader(2))
    quiet_trainer(max_epochs=1).fit(Manual(), regression_loader(2))
    quiet_trainer(max_epochs=1).fit(RegressionTask(), regression_loader(2))
