"""Length of a fit: epochs, steps, samples, tokens, seconds, stop requests, a second fit, and the loop's warnings."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights
from tests.helpers.tasks import Batch, RecordingCallback, RegressionTask, StepTask, regression_loader
from tests.trainer.runs import AfterBatch, Endless, Tally, ask_to_stop, fitted, quiet_trainer, weights_of
from trainwright import EarlyStopping, ModelCheckpoint
from trainwright.callbacks import LambdaCallback, Timer
from trainwright.callbacks.callback import Callback
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


def test_max_steps_counts_optimizer_steps_not_batches() -> None:
    trainer = quiet_trainer(max_steps=42, accumulate_grad_batches=10)
    tally = Tally()
    trainer.settings.callbacks.append(tally)
    trainer.fit(RegressionTask(), regression_loader(32))
    # 4 steps an epoch, the last of a window of 2: ten epochs give 40, and the eleventh its first two windows.
    assert trainer.global_step == 42
    assert trainer.current_epoch == 10
    assert tally.train_batches == 10 * 32 + 2 * 10


class _StopsInItsStep(RegressionTask):
    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.trainer.should_stop = batch_idx == 4
        return self.loss(batch)


@pytest.mark.parametrize("in_step", [False, True], ids=["in a callback", "in the training step itself"])
def test_a_stop_request_finishes_the_batch_and_validates_once(in_step: bool) -> None:
    tally, stop = Tally(), AfterBatch(lambda trainer, batch_idx: batch_idx == 4 and not in_step, ask_to_stop)
    task = _StopsInItsStep() if in_step else RegressionTask()
    trainer = fitted(task, regression_loader(10), regression_loader(10), max_epochs=5, callbacks=[stop, tally])
    assert (tally.train_batches, tally.validations) == (5, [(0, 5)])
    assert (trainer.global_step, trainer.current_epoch) == (5, 1)


@pytest.mark.parametrize(
    ("batches", "min_epochs", "min_steps", "steps"),
    [(3, 0, 10, 10), (3, 2, 0, 6), (3, 3, 10, 10), (5, 3, 10, 15)],
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


@pytest.mark.parametrize("max_time", ["00:00:00:01", {"seconds": 1}])
def test_max_time_ends_a_fit_in_the_middle_of_an_epoch(max_time: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def step(task: RegressionTask, batch: Batch, batch_idx: int) -> torch.Tensor:
        now[0] += 0.3
        return task.loss(batch)

    trainer = fitted(StepTask(step), regression_loader(), max_time=max_time)
    assert trainer.global_step == 4  # 0.9 s are not enough, 1.2 s are


@pytest.mark.parametrize("timer", [False, True], ids=["max_time", "Timer"])
def test_a_run_whose_time_is_over_goes_on_in_the_middle_of_its_epoch(
    timer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Task(RegressionTask):
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            now[0] += 0.3
            return self.loss(batch)

    def trainer(limit_s: float) -> Trainer:
        bound = {"callbacks": [Timer({"seconds": limit_s})]} if timer else {"max_time": {"seconds": limit_s}}
        return quiet_trainer(max_epochs=2, seed=1, default_root_dir=tmp_path, **bound)

    tasks = [Task(), Task()]
    tasks[1].load_state_dict(tasks[0].state_dict())
    whole = trainer(100)
    whole.fit(tasks[0], regression_loader(24, 4))
    first = trainer(1)
    first.fit(tasks[1], regression_loader(24, 4))
    assert 0 < first.state.batch_in_epoch < 6
    assert (first.current_epoch, first.should_stop) == (0, timer)
    path = first.save_checkpoint(tmp_path / "left")
    capsys.readouterr()
    trainer(1).fit(Task(), regression_loader(24, 4), ckpt_path=path)
    assert ("nothing is left to train: the limit of 1 seconds is reached" in capsys.readouterr().out) is not timer
    second = trainer(100)
    second.fit(tasks[1], regression_loader(24, 4), ckpt_path=path)
    assert second.state.step == whole.state.step == 12
    assert_equal_weights(weights_of(tasks[1]), weights_of(tasks[0]))


def test_a_wish_closes_the_epoch_that_it_cuts_short_unless_it_says_otherwise() -> None:
    def epochs(stop: Any) -> tuple[int, int]:
        at_second = AfterBatch(lambda run, idx: run.current_epoch == 0 and idx == 1, stop)
        trainer = fitted(RegressionTask(), regression_loader(24, 4), max_epochs=3, callbacks=[at_second])
        return trainer.current_epoch, trainer.state.batch_in_epoch

    assert epochs(ask_to_stop) == (1, 0)
    assert epochs(lambda run: run.request_stop("enough")) == (1, 0)
    assert epochs(lambda run: run.request_stop("later", closes_epoch=False)) == (0, 2)


def test_without_any_bound_a_fit_has_a_thousand_epochs() -> None:
    assert quiet_trainer().max_epochs == 1000
    assert quiet_trainer(max_steps=3).max_epochs == -1


class _SkipsAfterTwo(RegressionTask):
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


@pytest.mark.parametrize("by", ["task", "callback"])
def test_minus_one_from_on_train_batch_start_skips_the_rest_of_the_epoch(by: str) -> None:
    tally = Tally()
    skips = LambdaCallback(on_train_batch_start=lambda trainer, task, batch, idx: -1 if idx == 2 else None)
    task, callbacks = (_SkipsAfterTwo(), [tally]) if by == "task" else (RegressionTask(), [tally, skips])
    trainer = fitted(task, regression_loader(8), max_epochs=3, callbacks=callbacks)
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


def test_missing_losses_are_a_warning_before_a_long_epoch_ends() -> None:
    task = StepTask(lambda task, batch, batch_idx: None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        recorder = RecordingCallback("on_train_batch_end", note=lambda *_: len(told))
        fitted(task, regression_loader(64), max_epochs=1, callbacks=recorder)
    assert [number for _, number in recorder.notes].index(1) in range(49, 60)
    assert "so far" in str(told[0].message)


class _Worsening(RegressionTask):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", float(self.global_step))


def _stopped_early() -> tuple[int, int, int]:
    record = RecordingCallback("on_validation_start")
    trainer = quiet_trainer(
        devices="auto",
        max_epochs=3,
        val_check_interval=2,
        num_sanity_val_steps=0,
        callbacks=[EarlyStopping("val_loss", patience=2), record],
    )
    trainer.fit(_Worsening(), regression_loader(40, 2), regression_loader(4, 2))
    return trainer.global_step, len(record.events), trainer.current_epoch


def test_early_stopping_within_an_epoch_stops_at_the_step_of_the_request() -> None:
    assert _stopped_early() == (6, 3, 1)


@pytest.mark.distributed
def test_two_ranks_stop_at_the_step_of_the_request() -> None:
    assert run_distributed(_stopped_early, 2, init=False) == [(6, 3, 1)] * 2


class _StopsAtSafePoint(Callback):
    def __init__(self, step: int, how: str) -> None:
        self.step, self.how = step, how

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.global_step == self.step:
            trainer.at_step_end(partial(self._stop, trainer))

    def _stop(self, trainer: Any) -> None:
        if self.how == "request":
            trainer.request_stop("enough")
        else:
            trainer.should_stop = True


@pytest.mark.parametrize("how", ["request", "attribute"])
def test_an_action_at_a_safe_point_stops_at_its_step(how: str) -> None:
    trainer = fitted(RegressionTask(), regression_loader(10), max_epochs=2, callbacks=_StopsAtSafePoint(3, how))
    assert (trainer.global_step, trainer.current_epoch) == (3, 1)
