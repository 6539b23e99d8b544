"""Each step's gradient is the mean of what the step consumed, for any number of batches, any group, any world."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.helpers.runs import quiet_trainer
from trainwright.core.state import Group
from trainwright.core.task import TaskModule
from trainwright.data import LoaderOptions, iterate_groups, prepare_loader


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


def _group_mean(groups: list[Group], world: int) -> tuple[float, list[float]]:
    """Return the gradient that the ranks' average gives, and the values that the step consumed, by its weights."""
    gradient, consumed = 0.0, []
    for group in groups:
        weights = group.weights or [1 / len(group.batches)] * len(group.batches)
        for weight, batch in zip(weights, group.batches, strict=True):
            gradient += weight * batch.item() / world
            if weight > 0:
                consumed.append(batch.item())
    return gradient, consumed


@settings(max_examples=200)
@given(num_batches=st.integers(1, 40), accumulate=st.integers(1, 9), world=st.integers(1, 6))
def test_the_weights_of_all_ranks_make_the_mean_of_what_they_consumed(
    num_batches: int, accumulate: int, world: int
) -> None:
    values = _values(num_batches)
    by_rank = []
    for rank in range(world):
        loader = prepare_loader(values, LoaderOptions(rank=rank, world=world))
        loader.set_epoch(0)
        by_rank.append(list(iterate_groups(loader, accumulate=accumulate)))
    assert len({len(groups) for groups in by_rank}) == 1  # every rank steps as often
    seen: list[float] = []
    for step in zip(*by_rank, strict=True):
        gradient, consumed = _group_mean(list(step), world)
        assert gradient == pytest.approx(sum(consumed) / len(consumed), rel=1e-12)
        seen += consumed
    assert sorted(seen) == [value.item() for value in values]  # each batch exactly once
