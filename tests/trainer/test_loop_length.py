from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.tasks import Batch, RecordingCallback, RegressionTask, StepTask, regression_loader
from tests.trainer.runs import AfterBatch, Endless, Tally, ask_to_stop, fitted, quiet_trainer, weights_of
from trainwright import EarlyStopping, ModelCheckpoint
from trainwright.callbacks import LambdaCallback, Timer
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.loggers import CSVLogger
from trainwright.trainer.trainer import Trainer


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "steps", "epoch"), [(3, 42, 42, 1), (2, 192, 64, 2), (2, -1, 64, 2), (None, 7, 7, 0)]
)
def test_a_fit_ends_at_whichever_bound_comes_first(
    max_epochs: int | None, max_steps: int, steps: int, epoch: int
) -> None:
    trainer = fitted(RegressionTask(), regression_loader(32), max_epochs=max_epochs, max_steps=max_steps)
    assert (trainer.global_step, trainer.current_epoch) == (steps, epoch)


def test_a_fit_without_a_limit_tells_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    stop = LambdaCallback(on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", True))
    fitted(RegressionTask(), regression_loader(2), callbacks=stop)
    assert "training ends after 1000 epochs" in capsys.readouterr().out
    fitted(RegressionTask(), regression_loader(2), callbacks=stop, max_epochs=1)
    assert "1000" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("limits", "reached"),
    [
        ({"max_epochs": 1}, "max_epochs=1 is reached"),
        ({"max_steps": 4}, "max_steps=4 is reached"),
        ({"max_epochs": 1, "max_samples": 4}, "max_epochs=1 and the limit of 4 samples is reached"),
    ],
)
def test_a_fit_with_nothing_left_to_train_says_which_limit_is_reached(
    limits: dict[str, int], reached: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = RegressionTask()
    trainer = fitted(task, regression_loader(4), **limits)
    assert "nothing is left" not in capsys.readouterr().out
    trainer.fit(task, regression_loader(4))
    assert f"nothing is left to train: {reached} at epoch 1, step 4. Increase it" in capsys.readouterr().out
    assert trainer.global_step == 4


def test_a_stop_request_finishes_the_batch_and_validates_once() -> None:
    tally, stop = Tally(), AfterBatch(lambda trainer, batch_idx: batch_idx == 4, ask_to_stop)
    loader = regression_loader(10)
    trainer = fitted(RegressionTask(), loader, loader, max_epochs=5, callbacks=[stop, tally])
    assert (tally.train_batches, tally.validations) == (5, [(0, 5)])
    assert (trainer.global_step, trainer.current_epoch) == (5, 1)


@pytest.mark.parametrize(
    ("batches", "min_epochs", "min_steps", "steps"), [(3, 0, 10, 10), (3, 2, 0, 6), (3, 3, 10, 10), (5, 3, 10, 15)]
)
def test_a_wish_to_stop_waits_for_the_minimum_of_epochs_and_steps(
    batches: int, min_epochs: int, min_steps: int, steps: int
) -> None:
    stop = RecordingCallback("on_train_epoch_end", note=lambda _, trainer: ask_to_stop(trainer))
    trainer = quiet_trainer(max_epochs=20, min_epochs=min_epochs, min_steps=min_steps, callbacks=stop)
    with pytest.warns(TrainwrightWarning, match="Training continues until .* reached"):
        trainer.fit(RegressionTask(), regression_loader(batches))
    assert trainer.global_step == steps


@pytest.mark.parametrize(("wish", "batches"), [(True, 1), (3, 3)])
def test_a_fast_dev_run_takes_so_many_batches_of_everything_once_and_writes_nothing(
    wish: bool | int, batches: int, tmp_path: Path
) -> None:
    tally, saver = Tally(), ModelCheckpoint(tmp_path / "saved", monitor="never_logged", save_on_exception=True)
    arguments = {"max_epochs": 9, "max_steps": 2, "val_check_interval": 0.5, "logger": CSVLogger(tmp_path / "logs")}
    trainer = quiet_trainer(
        fast_dev_run=wish,
        callbacks=[tally, saver, EarlyStopping("never_logged")],
        default_root_dir=tmp_path,
        **arguments,
    )
    task = RegressionTask()
    trainer.fit(task, regression_loader(), regression_loader())
    trainer.test(task, regression_loader(), verbose=False)
    trainer.predict(task, regression_loader())
    assert tally.train_batches == batches
    assert tally.train_epochs == [0]
    assert tally.batches == {"validation": {0: batches}, "test": {0: batches}, "predict": {0: batches}}
    assert list(tmp_path.iterdir()) == []


def test_barebones_leaves_out_everything_but_training() -> None:
    trainer = Trainer(accelerator="cpu", barebones=True, max_epochs=1, val_check_interval=1000)
    trainer.fit(RegressionTask(), regression_loader(4), regression_loader(4))
    assert (trainer.callbacks, trainer.loggers, trainer.global_step) == ([], [], 4)
    assert "val_loss" not in trainer.callback_metrics


class _Counts(RegressionTask):
    def num_tokens(self, batch: Batch) -> int:
        return 100 * len(batch[0])


@pytest.mark.parametrize(
    ("bound", "make", "counted", "steps"),
    [
        ({"max_samples": 40}, lambda: regression_loader(64, 8), ("samples", 40), 5),
        ({"max_tokens": 1000}, lambda: regression_loader(64, 4), ("tokens", 1200), 3),
        ({"max_steps": 7}, lambda: DataLoader(Endless(), batch_size=2), ("samples", 14), 7),
    ],
    ids=["samples", "tokens", "steps of data without end"],
)
def test_a_bound_ends_a_fit_once_it_is_reached(
    bound: dict[str, int], make: Callable[[], Any], counted: tuple[str, int], steps: int
) -> None:
    trainer = fitted(_Counts(), make(), **bound)
    assert (getattr(trainer.state, counted[0]), trainer.global_step) == (counted[1], steps)


@pytest.mark.parametrize("timer", [False, True], ids=["max_time", "Timer"])
def test_a_run_whose_time_is_over_goes_on_in_the_middle_of_its_epoch(
    timer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def step(task: RegressionTask, batch: Batch, batch_idx: int) -> torch.Tensor:
        now[0] += 0.3
        return task.loss(batch)

    def run(limit_s: float, ckpt_path: Path | None = None) -> Trainer:
        bound = {"callbacks": [Timer({"seconds": limit_s})]} if timer else {"max_time": {"seconds": limit_s}}
        task, loader = StepTask(step, momentum=0.9), regression_loader(24, 4)
        return fitted(task, loader, ckpt_path=ckpt_path, max_epochs=2, default_root_dir=tmp_path, **bound)

    whole, first = run(100), run(1)
    assert 0 < first.state.batch_in_epoch < 6
    assert (first.current_epoch, first.should_stop) == (0, timer)
    second = run(100, first.save_checkpoint(tmp_path / "left"))
    assert second.state.step == whole.state.step == 12
    assert torch.equal(weights_of(second.task), weights_of(whole.task))


class _HalvesRateEachEpoch(RegressionTask):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class _SkipsAfterTwo(RegressionTask):
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class _SkipsAndHalves(_SkipsAfterTwo, _HalvesRateEachEpoch):
    pass


@pytest.mark.parametrize("by", ["task", "callback"])
def test_minus_one_from_on_train_batch_start_skips_the_rest_of_the_epoch(by: str) -> None:
    tally = Tally()
    skips = LambdaCallback(on_train_batch_start=lambda trainer, task, batch, idx: -1 if idx == 2 else None)
    task, callbacks = (_SkipsAndHalves(), [tally]) if by == "task" else (_HalvesRateEachEpoch(), [tally, skips])
    trainer = fitted(task, regression_loader(8), max_epochs=3, callbacks=callbacks)
    assert trainer.optimizers[0].param_groups[0]["lr"] == task.lr / 2**3
    assert (tally.train_batches, tally.train_epochs) == (6, [0, 1, 2])
    assert (trainer.global_step, trainer.current_epoch) == (6, 3)


def test_gradients_of_a_group_that_was_skipped_do_not_leak_into_the_next_step() -> None:
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=4)
    task = _SkipsAfterTwo()
    before = weights_of(task)
    trainer.fit(task, regression_loader(8))
    assert trainer.global_step == 0
    assert torch.equal(weights_of(task), before)
    assert all(parameter.grad is None for parameter in task.parameters())


def test_a_limit_below_one_batch_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"limit_val_batches=0\.05 of 10 .* less than one\. Use at least 0\.1"):
        fitted(RegressionTask(), regression_loader(10), regression_loader(10), max_epochs=1, limit_val_batches=0.05)


def _validations(batches: int = 64, val_batches: int = 1, **arguments: Any) -> list[tuple[int, int]]:
    tally = Tally()
    fitted(RegressionTask(), regression_loader(batches), regression_loader(val_batches), callbacks=tally, **arguments)
    return tally.validations


@pytest.mark.parametrize(
    ("batches", "arguments", "expected"),
    [
        (8, {}, [(0, 8), (1, 16)]),
        (10, {"val_check_interval": 4}, [(0, 4), (0, 8), (1, 14), (1, 18)]),
        # 5 batches end inside a group: validated after batches 8 and 10
        (10, {"val_check_interval": 5, "accumulate_grad_batches": 4, "max_epochs": 1}, [(0, 2), (0, 3)]),
        (8, {"check_val_every_n_epoch": 2, "max_epochs": 5}, [(1, 16), (3, 32)]),
        (8, {"val_check_interval": "3 steps", "accumulate_grad_batches": 2}, [(0, 3), (1, 6)]),
        (8, {"val_check_interval": "4 samples", "max_epochs": 1}, [(0, 4), (0, 8)]),
        (8, {"val_check_interval": "0.75 epoch"}, [(0, 6), (1, 12)]),
        (4, {"val_check_interval": 2, "check_val_every_n_epoch": 2}, [(1, 6), (1, 8)]),
        (8, {"limit_val_batches": 0, "num_sanity_val_steps": 2}, []),
    ],
    ids=str,
)
def test_an_interval_counts_in_its_unit_over_epochs_and_batches_within_one(
    batches: int, arguments: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    assert _validations(batches, **{"max_epochs": 2, **arguments}) == expected


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


@pytest.mark.parametrize("none", [{"max_epochs": 1, "max_steps": 0}, {"max_epochs": 0}])
def test_an_interval_of_0_is_accepted_if_nothing_is_trained(none: dict[str, Any]) -> None:
    """As neuralforecast passes it: `val_check_interval=min(val_check_steps, max_steps)`."""
    assert _validations(8, val_check_interval=0, **none) == []
