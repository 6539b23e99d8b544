"""GradientAccumulationScheduler: which factor holds in which epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.fake_run import FakeRun
from trainwright.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from trainwright.core.errors import ConfigurationError


def test_the_trainer_s_own_value_is_back_afterwards(tmp_path: Path) -> None:
    callback = GradientAccumulationScheduler({0: 4})
    run = FakeRun([callback], tmp_path)
    run.fit(epochs=1, batches=1)
    assert run.accumulate_grad_batches == 1


def test_a_task_that_optimizes_by_hand_is_refused(tmp_path: Path) -> None:
    run = FakeRun([GradientAccumulationScheduler({0: 4})], tmp_path)
    run.task.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="uses manual optimization"):
        run.fit(epochs=1, batches=1)


@pytest.mark.parametrize("scheduling", [{}, {-1: 2}, {0: 0}, {1.5: 2}, {0: True}])
def test_tables_that_mean_nothing_are_refused(scheduling: dict[Any, Any]) -> None:
    with pytest.raises(ConfigurationError, match="GradientAccumulationScheduler"):
        GradientAccumulationScheduler(scheduling)
