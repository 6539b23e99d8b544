"""Several loaders: what iterating over them gives, and whose metrics are whose."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.errors import ConfigurationError
from trainwright.data import CombinedLoader


def test_a_combined_loader_gives_batches_with_their_places() -> None:
    side_by_side = CombinedLoader({"a": range(2), "b": range(3)})
    assert list(side_by_side) == [({"a": 0, "b": 0}, 0, 0), ({"a": 1, "b": 1}, 1, 0)]
    one_by_one = CombinedLoader([range(1), range(2)], mode="sequential")
    batch, batch_idx, dataloader_idx = next(iter(one_by_one))
    assert (batch, batch_idx, dataloader_idx) == (0, 0, 0)
    assert list(one_by_one) == [(0, 0, 0), (0, 0, 1), (1, 1, 1)]


def test_a_combined_loader_in_another_gives_its_batches_there() -> None:
    outer = CombinedLoader({"x": CombinedLoader([range(2), range(2)]), "y": range(2)})
    assert list(outer) == [({"x": [0, 0], "y": 0}, 0, 0), ({"x": [1, 1], "y": 1}, 1, 0)]


class _Two(RegressionTask):
    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.log(f"x{dataloader_idx}", float(batch_idx), add_dataloader_idx=False)
        self.log("y", float(dataloader_idx))

    def on_test_epoch_end(self) -> None:
        self.log("total", 7.0)


def test_each_loader_s_results_are_its_own() -> None:
    loaders = [regression_loader(4), regression_loader(4)]
    assert quiet_trainer().test(_Two(), loaders, verbose=False) == [
        {"x0": 1.5, "y/dataloader_idx_0": 0.0, "total": 7.0},
        {"x1": 1.5, "y/dataloader_idx_1": 1.0, "total": 7.0},
    ]


def test_one_name_over_two_loaders_is_an_error() -> None:
    class Mixes(RegressionTask):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("y", 1.0, add_dataloader_idx=False)

    with pytest.raises(ConfigurationError, match=r"log\('y'.*dataloaders 0 and 1, whose values would mix"):
        quiet_trainer().test(Mixes(), [regression_loader(2), regression_loader(2)], verbose=False)
