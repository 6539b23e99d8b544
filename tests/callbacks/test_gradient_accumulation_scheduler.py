"""GradientAccumulationScheduler: which factor holds in which epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.fake_run import FakeRun
from trainwright.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from trainwright.core.errors import ConfigurationError


@pytest.mark.parametrize(
    ("scheduling", "factors"),
    [({1: 2, 3: 4}, [1, 2, 2, 4]), ({0: 2, 2: 1}, [2, 2, 1, 1]), ({2: 3, 1: 5}, [1, 5, 3, 3])],
)
def test_each_epoch_runs_with_the_factor_of_the_latest_entry(
    tmp_path: Path, scheduling: dict[int, int], factors: list[int]
) -> None:
    seen = []
    run = FakeRun([GradientAccumulationScheduler(scheduling)], tmp_path)
    run.fit(epochs=4, batches=1, on_step=lambda run: seen.append(run.accumulate_grad_batches))
    assert seen == factors


def test_the_trainer_s_own_value_is_back_afterwards(tmp_path: Path) -> None:
    callback = GradientAccumulationScheduler({0: 4})
    run = FakeRun([callback], tmp_path)
    run.fit(epochs=1, batches=1)
    assert run.accumulate_grad_batches == 1


def test_a_trainer_with_its_own_accumulation_is_refused_and_left_alone(tmp_path: Path) -> None:
    callback = GradientAccumulationScheduler({0: 4})
    run = FakeRun([callback], tmp_path)
    run.accumulate_grad_batches = 2
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches=2"):
        run.fit(epochs=1, batches=1)
    callback.teardown(run, run.task, "fit")  # type: ignore[arg-type]
    assert run.accumulate_grad_batches == 2


def test_a_task_that_optimizes_by_hand_is_refused(tmp_path: Path) -> None:
    run = FakeRun([GradientAccumulationScheduler({0: 4})], tmp_path)
    run.task.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="uses manual optimization"):
        run.fit(epochs=1, batches=1)


@pytest.mark.parametrize("scheduling", [{}, {-1: 2}, {0: 0}, {1.5: 2}, {0: True}])
def test_tables_that_mean_nothing_are_refused(scheduling: dict[Any, Any]) -> None:
    with pytest.raises(ConfigurationError, match="GradientAccumulationScheduler"):
        GradientAccumulationScheduler(scheduling)
