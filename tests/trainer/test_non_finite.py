from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.runs import assert_equal_weights, weights_of
from tests.helpers.tasks import Batch, RecordingCallback, RegressionTask, StepTask, regression_loader
from tests.trainer.runs import fitted, quiet_trainer
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import read_manifest
from trainwright.core.errors import NonFiniteError, TrainwrightWarning
from trainwright.strategies.steps import non_finite
from trainwright.trainer.trainer import Trainer

NAN = float("nan")


class Bad(RegressionTask):
    """The loss of some (epoch, batch_idx) is multiplied with `factor`."""

    def __init__(self, *bad: tuple[int, int], factor: float = NAN, **options: Any) -> None:
        super().__init__(**{"momentum": 0.9, **options})
        self.bad = bad
        self.factor = factor
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        here = self.current_epoch, batch_idx
        self.seen.append(here)
        if here in self.bad:
            loss = loss * self.factor
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"}]


def batches(num: int, *without: int) -> list[Batch]:
    return [batch for i, batch in enumerate(regression_loader(2 * num, 2)) if i not in without]


def skip(task: RegressionTask, loader: Any, **arguments: Any) -> Trainer:
    with pytest.warns(TrainwrightWarning, match="it is skipped"):
        trainer = fitted(task, loader, **{"max_epochs": 1, "on_nonfinite": "skip", **arguments})
    return trainer


def test_raise_says_where_and_what_and_leaves_the_weights_as_they_were() -> None:
    task, trainer = Bad((0, 3)), quiet_trainer(max_epochs=1, seed=3, on_nonfinite="raise")
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit(task, regression_loader(12, 2, shuffle=True))
    error = caught.value
    assert (error.step, error.epoch, error.ranks, error.source) == (3, 0, (0,), "loss")
    assert error.parameters[0] == "net.0.weight"
    text = str(error)
    assert error.sample_ids is not None
    for part in ("step 3", "epoch 0", "batch 3", "rank 0", "net.0.weight", ", ".join(map(str, error.sample_ids[0]))):
        assert part in text
    until_then = Bad()
    quiet_trainer(max_epochs=1, seed=3, max_steps=3).fit(until_then, regression_loader(12, 2, shuffle=True))
    assert_equal_weights(weights_of(task), weights_of(until_then))


@pytest.fixture
def _behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU looked at as a device that runs behind the host."""
    monkeypatch.setattr(non_finite, "reading_waits", lambda device: True)


@pytest.mark.usefixtures("_behind")
@pytest.mark.filterwarnings("ignore:no checkpoint .* of the failed run")
@pytest.mark.parametrize(
    ("options", "saved"),
    [({"every_n_train_steps": 1}, [1, 2, 3]), ({"every_n_train_steps": 100, "save_on_exception": True}, [])],
    ids=["periodic", "on an exception"],
)
def test_nothing_is_saved_behind_a_step_that_was_not_finite(
    options: dict[str, Any], saved: list[int], tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **options)
    arguments = {"max_epochs": 1, "on_nonfinite": "raise", "log_every_n_steps": 100, "callbacks": saver}
    with pytest.raises(NonFiniteError):
        fitted(Bad((0, 3)), regression_loader(6), **arguments)
    assert sorted(read_manifest(path.parent).step for path in tmp_path.glob("*/manifest.json")) == saved


@pytest.mark.usefixtures("_behind")
def test_each_step_is_looked_at_where_its_own_gradients_are() -> None:
    task = StepTask(lambda task, batch, batch_idx: task.net[-batch_idx].weight.sum() * (1.0, NAN)[batch_idx])
    with pytest.raises(NonFiniteError) as caught:
        fitted(task, batches(2), max_epochs=1, on_nonfinite="raise")
    assert caught.value.parameters == ("net.3.weight",)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler:UserWarning")  # the first scaled step overflows
def test_a_skipped_group_changes_neither_weights_nor_optimizer_nor_schedule(precision: str) -> None:
    task, without = Bad((0, 1), (0, 4), (0, 5)), Bad()
    trainer = skip(task, batches(6), precision=precision)
    expected = fitted(without, batches(6, 1, 4, 5), max_epochs=1, precision=precision)
    assert_equal_weights(weights_of(task), weights_of(without))
    torch.testing.assert_close(trainer.optimizers[0].state_dict(), expected.optimizers[0].state_dict())
    assert trainer.run.loop.schedules.state_dict() == expected.run.loop.schedules.state_dict()
    assert (trainer.global_step, trainer.state.batches, trainer.state.samples) == (3, 6, 12)


def test_running_statistics_of_a_bad_forward_are_undone() -> None:
    class Normed(Bad):
        def __init__(self, *bad: tuple[int, int]) -> None:
            super().__init__(*bad)
            self.net.insert(1, nn.BatchNorm1d(8))

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            bad = (self.current_epoch, batch_idx) in self.bad
            return self.loss([batch[0] * NAN, batch[1]] if bad else batch)

    task, without = Normed((0, 1), (0, 3)), Normed()
    skip(task, batches(5))
    quiet_trainer(max_epochs=1).fit(without, batches(5, 1, 3))
    assert_equal_weights(weights_of(task), weights_of(without))


ALL_STEPS = tuple(itertools.product(range(30), range(4)))


def test_a_run_ends_after_max_skipped_consecutive_steps() -> None:
    task, trainer = Bad(*ALL_STEPS), quiet_trainer(max_steps=1000, on_nonfinite="skip", max_skipped=6)
    with (
        pytest.warns(TrainwrightWarning, match="it is skipped"),
        pytest.raises(NonFiniteError, match=r"The 6 steps before it were skipped .* max_skipped=6.*max_skipped=None"),
    ):
        trainer.fit(task, regression_loader(4))  # epochs are shorter than that
    assert (len(task.seen), trainer.global_step) == (7, 0)


def test_a_gradient_that_overflows_under_scaling_is_the_scalers_business() -> None:
    def step(task: RegressionTask, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = task.loss(batch)
        steep = 1e37 * task.net[3].bias.sum()  # finite, until it is scaled
        return loss + (steep - steep.detach()) if batch_idx == 1 else loss

    guarded, plain = StepTask(step), StepTask(step)
    trainers = [quiet_trainer(max_epochs=1, precision="16-mixed", on_nonfinite=p) for p in ("skip", None)]
    for trainer, task in zip(trainers, (guarded, plain), strict=True):
        trainer.fit(task, batches(4))
    assert trainers[0].skipped_batches == []
    assert trainers[0].strategy.state_dict() == trainers[1].strategy.state_dict()
    assert trainers[0].strategy.state_dict()["scaler"]["scale"] < 2.0**16  # so one has overflowed
    assert_equal_weights(weights_of(guarded), weights_of(plain))


def test_without_a_policy_a_bad_loss_is_warned_of_once_where_it_is_read_anyway() -> None:
    task = Bad((0, 1))
    with pytest.warns(TrainwrightWarning, match="on_nonfinite='raise'") as warned:
        quiet_trainer(max_epochs=2, log_every_n_steps=1).fit(task, batches(4))
    assert len(warned) == 1
    assert "train_loss is nan at step 2" in str(warned[0].message)


def saves(every: int) -> ModelCheckpoint:
    return ModelCheckpoint(every_n_train_steps=every, save_top_k=-1)


def roll_back(task: RegressionTask, loader: Any, folder: Path, **arguments: Any) -> Trainer:
    """Fit an epoch with a checkpoint of every third step and at least one rollback."""
    defaults = {"max_epochs": 1, "callbacks": saves(3), "on_nonfinite": "rollback", "default_root_dir": folder}
    with pytest.warns(TrainwrightWarning, match="Rolled back"):
        trainer = fitted(task, loader, **{**defaults, **arguments})
    return trainer


def test_a_rollback_goes_on_as_if_the_group_had_not_been_there(tmp_path: Path) -> None:
    task, without = Bad((1, 4)), Bad((1, 4))
    recorder = RecordingCallback("setup", "on_fit_start", "on_train_start", "on_train_epoch_start")
    trainer = roll_back(task, regression_loader(12, 2), tmp_path, max_epochs=2, callbacks=[saves(3), recorder])
    begins = ["setup", "on_fit_start", "on_train_start"]
    assert recorder.events == [*begins, *["on_train_epoch_start"] * 2, *begins]  # as in a resume
    assert task.seen.count((1, 4)) == 1
    assert task.seen.count((1, 3)) == 2
    assert (trainer.global_step, trainer.state.batches) == (11, 12)
    expected = skip(without, regression_loader(12, 2), max_epochs=2)
    assert_equal_weights(weights_of(task), weights_of(without))
    torch.testing.assert_close(trainer.optimizers[0].state_dict(), expected.optimizers[0].state_dict())
    assert [s.first_batch for s in trainer.skipped_batches] == [4]


def test_checkpoints_of_another_run_in_the_same_folder_are_not_gone_back_to(tmp_path: Path) -> None:
    quiet_trainer(max_epochs=1, callbacks=saves(1), default_root_dir=tmp_path).fit(Bad(), batches(3))
    trainer = quiet_trainer(max_epochs=1, callbacks=saves(5), on_nonfinite="rollback", default_root_dir=tmp_path)
    with pytest.warns(TrainwrightWarning, match="this run has no checkpoint"):
        trainer.fit(Bad((0, 3)), batches(6))


def test_a_rollback_goes_back_to_the_checkpoint_that_the_run_was_resumed_from(tmp_path: Path) -> None:
    without = skip(Bad((1, 0)), batches(4), max_epochs=2)
    first = fitted(Bad(), batches(4), max_epochs=1, callbacks=saves(9), default_root_dir=tmp_path / "first")
    saved, task = first.save_checkpoint(tmp_path / "saved"), Bad((1, 0))
    draws = RecordingCallback("on_train_epoch_start", note=lambda *_: float(torch.rand(())))
    arguments = {"max_epochs": 2, "callbacks": [saves(9), draws], "ckpt_path": saved}
    trainer = roll_back(task, batches(4), tmp_path / "second", **arguments)
    assert task.seen == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert draws.notes[0] == draws.notes[1]
    assert_equal_weights(weights_of(trainer.task), weights_of(without.task))


def test_it_goes_back_no_more_than_so_many_times(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        max_epochs=1, callbacks=saves(1), on_nonfinite="rollback", max_rollbacks=2, default_root_dir=tmp_path
    )
    task = Bad(*((0, i) for i in range(1, 6)))
    with (
        pytest.warns(TrainwrightWarning, match="Rolled back"),
        pytest.raises(NonFiniteError, match="rolled back 2 time"),
    ):
        trainer.fit(task, batches(6))
    assert task.seen == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_a_resume_after_a_rollback_leaves_the_group_out_as_well(tmp_path: Path) -> None:
    task = Bad((0, 4))
    trainer = roll_back(task, batches(8), tmp_path, max_epochs=None, max_steps=5)
    trainer.save_checkpoint(tmp_path / "later")
    resumed = quiet_trainer(max_epochs=1, callbacks=saves(3), on_nonfinite="rollback", default_root_dir=tmp_path)
    resumed.fit(Bad(), batches(8), ckpt_path=tmp_path / "later")
    assert (resumed.skipped_batches, resumed.num_rollbacks) == (trainer.skipped_batches, 1)
