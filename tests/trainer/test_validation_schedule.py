"""When a fit validates: fractions of an epoch, batches, steps, epochs, seconds."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.tasks import Batch, RecordingCallback, RegressionTask, StepTask, regression_loader
from tests.trainer.runs import Endless, Tally, fitted, quiet_trainer, weights_of
from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError


def _validations(batches: int = 64, val_batches: int = 1, **arguments: Any) -> list[tuple[int, int]]:
    tally = Tally()
    fitted(RegressionTask(), regression_loader(batches), regression_loader(val_batches), callbacks=tally, **arguments)
    return tally.validations


@pytest.mark.parametrize(
    ("batches", "arguments", "expected"),
    [
        (8, {}, [(0, 8), (1, 16)]),
        (10, {"val_check_interval": 4}, [(0, 4), (0, 8), (1, 14), (1, 18)]),
        (10, {"val_check_interval": 6, "check_val_every_n_epoch": None}, [(0, 6), (1, 12), (1, 18)]),
        # 5 batches end inside a group: validated after batches 8 and 10
        (10, {"val_check_interval": 5, "accumulate_grad_batches": 4, "max_epochs": 1}, [(0, 2), (0, 3)]),
        (8, {"val_check_interval": 1 / 4}, [(0, 2), (0, 4), (0, 6), (0, 8), (1, 10), (1, 12), (1, 14), (1, 16)]),
        (8, {"check_val_every_n_epoch": 2, "max_epochs": 5}, [(1, 16), (3, 32)]),
        (8, {"val_check_interval": "3 steps", "accumulate_grad_batches": 2}, [(0, 3), (1, 6)]),
        (8, {"val_check_interval": "4 samples", "max_epochs": 1}, [(0, 4), (0, 8)]),
        (8, {"val_check_interval": "2 epochs"}, [(1, 16)]),
        (8, {"val_check_interval": "0.75 epoch"}, [(0, 6), (1, 12)]),
        (8, {"limit_val_batches": 0, "num_sanity_val_steps": 2}, []),
    ],
    ids=str,
)
def test_an_interval_counts_in_its_unit_over_epochs_and_batches_within_one(
    batches: int, arguments: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    assert _validations(batches, **{"max_epochs": 2, **arguments}) == expected


def test_an_interval_in_tokens_has_them_counted() -> None:
    class Task(RegressionTask):
        def num_tokens(self, batch: Batch) -> int:
            return 100 * len(batch[0])

    tally = Tally()
    trainer = quiet_trainer(max_epochs=1, val_check_interval="400 tokens", callbacks=tally)
    trainer.fit(Task(), regression_loader(8), regression_loader(1))
    assert tally.validations == [(0, 4), (0, 8)]


@pytest.mark.parametrize(("denominator", "batches"), [(10, 10), (7, 21)])
def test_a_fraction_with_a_unit_loses_no_validation_to_rounding(denominator: int, batches: int) -> None:
    found = _validations(batches, max_epochs=2, val_check_interval=Duration(1 / denominator, "epochs"))
    assert [step for _, step in found] == [i * batches // denominator for i in range(1, 2 * denominator + 1)]


def test_an_interval_of_time_goes_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def step(task: RegressionTask, batch: Batch, batch_idx: int) -> torch.Tensor:
        now[0] += 15.0
        return task.loss(batch)

    tally = Tally()
    trainer = quiet_trainer(max_epochs=1, val_check_interval={"minutes": 1}, callbacks=tally)
    trainer.fit(StepTask(step), regression_loader(10), regression_loader(1))
    assert tally.validations == [(0, 4), (0, 8)]


@pytest.mark.parametrize(("steps", "batches"), [(0, 0), (2, 2), (-1, 5), (9, 5)])
def test_the_sanity_check_tries_so_many_validation_batches(steps: int, batches: int) -> None:
    recorder = RecordingCallback("on_validation_batch_end", note=lambda _, trainer: trainer.sanity_checking)
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=0, num_sanity_val_steps=steps, callbacks=recorder)
    trainer.fit(RegressionTask(), regression_loader(2), regression_loader(5))
    assert recorder.notes == [("on_validation_batch_end", True)] * batches


def test_a_validation_changes_neither_weights_nor_generators() -> None:
    def final_weights(validate: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        task = RegressionTask(dropout=0.5)
        loader = regression_loader(4) if validate else None
        quiet_trainer(max_epochs=2, num_sanity_val_steps=2, seed=0).fit(task, regression_loader(8), loader)
        return weights_of(task)

    torch.testing.assert_close(final_weights(True), final_weights(False), rtol=0, atol=0)


def test_an_interval_longer_than_the_epoch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"val_check_interval=9 batches, but an epoch has 8"):
        _validations(8, max_epochs=1, val_check_interval=9)


def test_the_interval_follows_a_loader_that_is_loaded_anew() -> None:
    class Task(RegressionTask):
        def train_dataloader(self) -> Any:
            return regression_loader(8 if self.current_epoch == 0 else 4)

    tally = Tally()
    trainer = quiet_trainer(max_epochs=2, val_check_interval=0.5, reload_dataloaders_every_n_epochs=1, callbacks=tally)
    trainer.fit(Task(), val_dataloaders=regression_loader(1))
    assert tally.validations == [(0, 4), (0, 8), (1, 10), (1, 12)]


@pytest.mark.parametrize("limits", [{}, {"limit_val_batches": 0}])
def test_an_interval_has_no_effect_without_validation(limits: dict[str, int]) -> None:
    loaders = [regression_loader(1)] if limits else []
    for data, interval in ((DataLoader(Endless()), 0.5), (regression_loader(4), 1000)):
        trainer = fitted(RegressionTask(), data, *loaders, max_steps=4, val_check_interval=interval, **limits)
        assert trainer.global_step == 4
