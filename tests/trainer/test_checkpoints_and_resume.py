from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.snapshots import same
from tests.helpers.runs import StepRecorder, assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import Batch, RecordingCallback, RegressionTask, regression_loader
from tests.trainer.runs import DecayingTask
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import find_checkpoints, read_checkpoint
from trainwright.core.errors import ConfigurationError, TrainwrightWarning

FOUR_BATCHES = 8  # samples, by 2


def saved_in(folder: Path) -> list[tuple[int, int]]:
    return [(found.manifest.epoch, found.manifest.step) for found in find_checkpoints(folder)]


class ScriptedTask(RegressionTask):
    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = iter(values)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", next(self.values))


@pytest.mark.slow
def test_a_resumed_run_writes_the_checkpoints_that_the_whole_run_wrote(tmp_path: Path) -> None:
    def run(folder: Path, ckpt_path: Path | None = None) -> StepRecorder:
        recorder = StepRecorder()
        saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = quiet_trainer(max_epochs=4, callbacks=[recorder, saver])
        trainer.fit(DecayingTask(), regression_loader(FOUR_BATCHES, 2, shuffle=True), ckpt_path=ckpt_path)
        return recorder

    whole = run(tmp_path / "whole")
    with pytest.warns(TrainwrightWarning, match="step=2 .* not found"):  # the new folder does not have it
        resumed = run(tmp_path / "resumed", tmp_path / "whole" / "step=2")
    assert resumed.losses == whole.losses[2:]
    assert saved_in(tmp_path / "resumed") == saved_in(tmp_path / "whole")[1:]
    assert len(saved_in(tmp_path / "whole")) == 8
    for step in range(4, 18, 2):
        first, second = (read_checkpoint(tmp_path / name / f"step={step}") for name in ("whole", "resumed"))
        first.state.pop("seconds"), second.state.pop("seconds")
        assert first.state == second.state
        assert first.trainer["schedulers"] == second.trainer["schedulers"]
        assert first.trainer["data"] == second.trainer["data"]
        assert_equal_weights(first.model or {}, second.model or {})
        assert same(first.optimizers, second.optimizers)


def _fit_with(
    folder: Path, saver: ModelCheckpoint, task: RegressionTask, ckpt_path: Path | None = None, **arguments: Any
) -> Any:
    trainer = quiet_trainer(callbacks=[saver], default_root_dir=folder, num_sanity_val_steps=0, **arguments)
    trainer.fit(task, regression_loader(FOUR_BATCHES, 2), regression_loader(1), ckpt_path=ckpt_path)
    return trainer


def test_a_fit_from_last_without_any_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    trainer = quiet_trainer(default_root_dir=tmp_path, max_steps=2)
    with pytest.warns(TrainwrightWarning, match=r"checkpoints has no checkpoint"):
        trainer.fit(RegressionTask(), regression_loader(2), ckpt_path="last")
    assert trainer.global_step == 2
    with pytest.raises(FileNotFoundError, match="checkpoints"):
        trainer.validate(RegressionTask(), regression_loader(2), ckpt_path="last")


def test_best_continues_from_the_best_by_the_monitored_metric(tmp_path: Path) -> None:
    saver = ModelCheckpoint(monitor="val_loss", save_top_k=1)
    trainer = _fit_with(tmp_path, saver, ScriptedTask([3.0, 1.0, 2.0]), max_epochs=3)
    seen = RecordingCallback("on_train_batch_end", note=lambda event, run: run.global_step)
    trainer.settings.callbacks.append(seen)
    trainer.fit(ScriptedTask([4.0]), regression_loader(FOUR_BATCHES, 2), regression_loader(1), ckpt_path="best")
    assert [note for _, note in seen.notes] == [9, 10, 11, 12]


def test_best_of_an_earlier_run_is_not_one_whose_metric_is_nan(tmp_path: Path) -> None:
    saver = ModelCheckpoint(monitor="val_loss", save_top_k=-1, mode="max")
    _fit_with(tmp_path, saver, ScriptedTask([float("nan"), -1.0, -2.0]), max_epochs=3)
    trainer = quiet_trainer(callbacks=[ModelCheckpoint(monitor="val_loss", mode="max")], default_root_dir=tmp_path)
    trainer.validate(ScriptedTask([0.0]), regression_loader(1), ckpt_path="best", verbose=False)
    assert "epoch=1" in str(trainer.ckpt_path)


def test_a_checkpoint_that_is_saved_after_an_evaluation_says_that_it_holds_weights_only(tmp_path: Path) -> None:
    trainer, task = quiet_trainer(max_steps=1), RegressionTask()
    trainer.fit(task, regression_loader(2))
    assert read_checkpoint(trainer.save_checkpoint(tmp_path / "full")).kind == "full"
    trainer.validate(task, regression_loader(2), verbose=False)
    with pytest.warns(TrainwrightWarning, match="holds weights only, because no fit is current"):
        path = trainer.save_checkpoint(tmp_path / "late")
    assert read_checkpoint(path).kind == "weights"
    assert_equal_weights(weights_of(task), read_checkpoint(path).model or {})


def _best_two(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True)


@pytest.mark.parametrize("how", ["moved", "copied", "link"])
def test_a_folder_that_was_moved_or_copied_or_is_a_link_is_continued_as_the_same(how: str, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    _fit_with(tmp_path, _best_two(old), ScriptedTask([1.0, 3.0]), max_epochs=2, limit_val_batches=1)
    if how == "copied":
        shutil.copytree(old, new)
    elif how == "link":
        new.symlink_to(old)
    else:
        old.rename(new)
    saver = _best_two(new)
    _fit_with(tmp_path, saver, ScriptedTask([2.0]), max_epochs=3, limit_val_batches=1, ckpt_path=new / "last")
    kept = {found.path.name: found.manifest.epoch for found in find_checkpoints(new)}
    assert kept == {"epoch=0-step=4": 0, "epoch=2-step=12": 2, "last": 2}
    assert saver.best_model_path == str(new / "epoch=0-step=4")


class _Task(RegressionTask):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", abs(self.current_epoch - 1))  # the second epoch is the best

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


def _fitted(folder: Path) -> tuple[Any, _Task]:
    saver = ModelCheckpoint(monitor="val_loss")
    trainer, task = quiet_trainer(max_epochs=3, default_root_dir=folder, callbacks=[saver]), _Task()
    trainer.fit(task, regression_loader(4), regression_loader(2))
    return trainer, task


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_without_a_task_the_best_weights_are_used_and_one_line_says_so(
    stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, task = _fitted(tmp_path)
    last, best = weights_of(task), dict(read_checkpoint(trainer.checkpoint_callback.best_model_path).model or {})
    capsys.readouterr()
    getattr(trainer, stage)(dataloaders=regression_loader(2))
    assert_equal_weights(weights_of(task), best)
    assert not torch.equal(best["net.0.weight"], last["net.0.weight"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trainwright:")]
    used = f"{stage} uses the best weights by 'val_loss', {trainer.checkpoint_callback.best_model_path}"
    assert lines == [f"trainwright: {used}. Pass ckpt_path=None to use the task's current weights."]


def test_the_best_checkpoint_by_an_unknown_metric_or_without_a_callback_is_an_error(tmp_path: Path) -> None:
    _fitted(tmp_path)
    loader = regression_loader(2)
    trainer = quiet_trainer(default_root_dir=tmp_path, callbacks=ModelCheckpoint(monitor="other"))
    with pytest.raises(ConfigurationError, match=r"no checkpoint with the metric 'other' in .*checkpoints.*dirpath"):
        trainer.test(_Task(), loader, ckpt_path="best")
    with pytest.raises(ConfigurationError, match=r"callbacks=\[ModelCheckpoint\(monitor=…\)\]"):
        quiet_trainer(default_root_dir=tmp_path).test(_Task(), loader, ckpt_path="best")
