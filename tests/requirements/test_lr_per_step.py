"""The learning rate of the n-th optimizer step is the same for any number of processes and any accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import StepRecorder, quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader


class _Task(RegressionTask):
    """Halves its learning rate with each unit of the given interval."""

    def __init__(self, interval: str) -> None:
        super().__init__()
        self.interval = interval

    def configure_optimizers(self) -> Any:
        """Return SGD with its schedule."""
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]


def _rates(interval: str, num_samples: int, accumulate: int, **bounds: int) -> list[float]:
    """Return the learning rate that each step used."""
    recorder = StepRecorder()
    trainer = quiet_trainer(devices="auto", accumulate_grad_batches=accumulate, callbacks=recorder, **bounds)
    trainer.fit(_Task(interval), regression_loader(num_samples))
    return [rates[0] for rates in recorder.lrs]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulation_does_not_change_the_rate_of_a_step(accumulate: int) -> None:
    assert _rates("step", 16, accumulate, max_steps=6) == [0.5**i for i in range(6)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulation_does_not_change_the_rate_of_an_epoch(accumulate: int) -> None:
    found = _rates("epoch", 6, accumulate, max_epochs=3)
    per_epoch = 6 // accumulate
    assert found == [0.5 ** (i // per_epoch) for i in range(3 * per_epoch)]


@pytest.mark.distributed
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_do_not_change_the_rate_of_a_step(accumulate: int) -> None:
    first, second = run_distributed(_two_ranks, 2, "step", 16, accumulate, {"max_steps": 6}, init=False)
    assert first == second == [0.5**i for i in range(6)]


def _two_ranks(interval: str, num_samples: int, accumulate: int, bounds: dict[str, int]) -> list[float]:
    return _rates(interval, num_samples, accumulate, **bounds)
