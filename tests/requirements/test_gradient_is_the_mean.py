"""Each step's gradient is the mean of what the step consumed, for any number of batches, any group, any world."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from trainwright.core.task import TaskModule


class _Slope(TaskModule):
    """Its loss is `slope × value`, so that the gradient of a batch is the value itself."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.gradients: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the mean over the batch's values."""
        return self.slope * batch.mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Note what the step is about to use."""
        assert self.slope.grad is not None
        self.gradients.append(self.slope.grad.item())

    def configure_optimizers(self) -> Any:
        """Return SGD that stands still."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _values(num: int) -> list[torch.Tensor]:
    """Return batches of one value each, so far apart that no two sums of them are alike."""
    return [torch.tensor([float(2**i)], dtype=torch.float64) for i in range(num)]


def _means(values: list[float], size: int) -> list[float]:
    return [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]


@settings(max_examples=40)
@given(num_batches=st.integers(1, 23), accumulate=st.integers(1, 9))
def test_one_process_takes_the_mean_of_each_group_the_short_last_one_included(
    num_batches: int, accumulate: int
) -> None:
    batches, task = _values(num_batches), _Slope()
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(task, batches)
    assert trainer.global_step == math.ceil(num_batches / accumulate)
    assert task.gradients == pytest.approx(_means([b.item() for b in batches], accumulate), rel=1e-12)


_ON_TWO = [(9, 2), (5, 4)]  # the number of batches and of those in a group


def _on_rank() -> list[list[float]]:
    found = []
    for num_batches, accumulate in _ON_TWO:
        task = _Slope()
        quiet_trainer(devices="auto", max_epochs=1, accumulate_grad_batches=accumulate).fit(task, _values(num_batches))
        found.append(task.gradients)
    return found


@pytest.mark.distributed
def test_two_real_processes_take_the_mean_of_what_both_consumed() -> None:
    first, second = run_distributed(_on_rank, 2)
    assert first == second
    for (num_batches, accumulate), found in zip(_ON_TWO, first, strict=True):
        values = [value.item() for value in _values(num_batches)]
        assert found == pytest.approx(_means(values, 2 * accumulate), rel=1e-12)
