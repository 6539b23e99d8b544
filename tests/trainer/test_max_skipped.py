"""The bound on consecutive skipped steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.core.errors import ConfigurationError, NonFiniteError, TrainwrightWarning


class _Spoilt(RegressionTask):
    """Its loss is NaN in the given steps, counted from the first."""

    def __init__(self, bad: range) -> None:
        super().__init__()
        self.bad, self.seen = bad, 0

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        return self.loss(batch) * (float("nan") if self.seen - 1 in self.bad else 1.0)


def test_a_run_ends_after_max_skipped_consecutive_steps() -> None:
    task = _Spoilt(range(10**6))
    trainer = quiet_trainer(max_steps=1000, on_nonfinite="skip", max_skipped=6)
    with (
        pytest.warns(TrainwrightWarning, match="it is skipped"),
        pytest.raises(NonFiniteError, match=r"The 6 steps before it were skipped .* max_skipped=6.*max_skipped=None"),
    ):
        trainer.fit(task, regression_loader(4))  # epochs are shorter than that
    assert task.seen == 7
    assert trainer.global_step == 0


def test_max_skipped_counts_consecutive_steps() -> None:
    class Often(_Spoilt):
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            self.bad = range(self.seen, self.seen + (self.seen % 3 < 2))  # two of three
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(max_epochs=3, on_nonfinite="skip", max_skipped=2)
    with pytest.warns(TrainwrightWarning, match="it is skipped"):
        trainer.fit(Often(range(0)), regression_loader(6))
    assert trainer.global_step == 6


def test_max_skipped_none_never_ends_the_run() -> None:
    task = _Spoilt(range(10**6))
    with pytest.warns(TrainwrightWarning, match="it is skipped"):
        quiet_trainer(max_epochs=30, on_nonfinite="skip", max_skipped=None).fit(task, regression_loader(4))
    assert task.seen == 120


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "many"])
def test_an_invalid_max_skipped_is_an_error(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_skipped"):
        quiet_trainer(max_skipped=wrong)
