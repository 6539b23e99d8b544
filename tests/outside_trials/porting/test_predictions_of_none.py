"""A `predict_step` may return None: it writes its predictions itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader


class _Writes(RegressionTask):
    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.written += 1


@pytest.mark.parametrize("keep", [True, False])
def test_a_prediction_of_none_is_kept_as_none(keep: bool) -> None:
    task = _Writes()
    found = quiet_trainer().predict(task, regression_loader(3), return_predictions=keep)
    assert found == ([None] * 3 if keep else None)
    assert task.written == 3


def test_two_loaders_of_nones() -> None:
    loaders = [regression_loader(2), regression_loader(1)]
    assert quiet_trainer().predict(_Writes(), loaders) == [[None] * 2, [None]]
