"""Evaluation with the best checkpoint, after a fit and in a new process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.callbacks import ModelCheckpoint
from trainwright.checkpoint import read_checkpoint
from trainwright.core.errors import ConfigurationError


class _Task(RegressionTask):
    worse_by = 0.0

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", abs(self.current_epoch - 1) + self.worse_by)  # the second epoch is the best

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


def _fitted(
    folder: Path, *savers: Any, worse_by: float = 0.0, **options: Any
) -> tuple[Any, _Task, dict[str, torch.Tensor]]:
    savers = savers or (ModelCheckpoint(monitor="val_loss"),)
    trainer = quiet_trainer(max_epochs=3, default_root_dir=folder, callbacks=list(savers), **options)
    task = _Task(lr=0.02 if worse_by else 0.05)  # another run has other weights
    task.worse_by = worse_by
    trainer.fit(task, regression_loader(4), regression_loader(2))
    return trainer, task, weights_of(task)


def _best(saver: ModelCheckpoint) -> dict[str, torch.Tensor]:
    found = read_checkpoint(saver.best_model_path).model
    assert found is not None
    return dict(found)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_without_a_task_the_best_weights_are_used_and_one_line_says_so(
    stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, task, last = _fitted(tmp_path)
    best = _best(trainer.checkpoint_callback)
    capsys.readouterr()
    getattr(trainer, stage)(dataloaders=regression_loader(2))
    assert_equal_weights(weights_of(task), best)
    assert not torch.equal(best["net.0.weight"], last["net.0.weight"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trainwright:")]
    used = f"{stage} uses the best weights by 'val_loss', {trainer.checkpoint_callback.best_model_path}"
    assert lines == [f"trainwright: {used}. Pass ckpt_path=None to use the task's current weights."]


@pytest.mark.parametrize(("stage", "name"), [("fit", "last"), ("validate", "best")])
def test_one_line_says_which_checkpoint_last_and_best_are(
    stage: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, task, _ = _fitted(tmp_path, ModelCheckpoint(monitor="val_loss", save_last=True))
    saver = trainer.checkpoint_callback
    capsys.readouterr()
    loaders = [regression_loader(4), regression_loader(2)] if stage == "fit" else [regression_loader(2)]
    getattr(trainer, stage)(task, *loaders, ckpt_path=name)
    path = saver.best_model_path if name == "best" else saver.last_model_path
    named = [line for line in capsys.readouterr().out.splitlines() if "ckpt_path" in line]
    assert named == [f'trainwright: ckpt_path="{name}" is {path}.']


@pytest.mark.parametrize(("stage", "given"), [("test", "ckpt_path"), ("predict", "task")])
def test_an_explicit_none_or_a_task_keeps_the_current_weights(
    stage: str, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, task, last = _fitted(tmp_path)
    arguments: dict[str, Any] = {"ckpt_path": None} if given == "ckpt_path" else {"task": task}
    getattr(trainer, stage)(dataloaders=regression_loader(2), **arguments)
    assert_equal_weights(weights_of(task), last)
    assert "weights by" not in capsys.readouterr().out


@pytest.mark.parametrize("fast", [False, True], ids=["without a monitor", "a fast development run"])
def test_without_best_weights_the_current_ones_are_used(fast: bool, tmp_path: Path) -> None:
    trainer, task, last = _fitted(tmp_path, ModelCheckpoint(monitor="val_loss" if fast else None), fast_dev_run=fast)
    trainer.test(dataloaders=regression_loader(2))
    assert_equal_weights(weights_of(task), last)


def _on_rank(folder: Path) -> bool:
    trainer, task, last = _fitted(folder, devices="auto")
    trainer.test(dataloaders=regression_loader(4))
    return torch.equal(weights_of(task)["net.0.weight"], last["net.0.weight"])


@pytest.mark.distributed
def test_two_ranks_take_the_best_weights(tmp_path: Path) -> None:
    assert run_distributed(_on_rank, 2, tmp_path, init=False) == [False, False]


def _weights_of_best(folder: Path, saver: ModelCheckpoint | None) -> dict[str, torch.Tensor]:
    """Evaluate `ckpt_path="best"` with a Trainer that has not trained, and return the weights."""
    task = _Task()
    trainer = quiet_trainer(default_root_dir=folder, callbacks=[saver] if saver else [])
    trainer.test(task, regression_loader(2), ckpt_path="best")
    return weights_of(task)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_new_trainer_finds_the_best_of_the_run(tmp_path: Path, mode: str) -> None:
    trainer, _, _ = _fitted(tmp_path, ModelCheckpoint(monitor="val_loss", mode=mode, save_top_k=-1))
    found = _weights_of_best(tmp_path, ModelCheckpoint(monitor="val_loss", mode=mode))
    assert_equal_weights(found, _best(trainer.checkpoint_callback))


def test_the_best_checkpoint_by_an_unknown_metric_is_an_error(tmp_path: Path) -> None:
    _fitted(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no checkpoint with the metric 'other' in .*checkpoints.*dirpath"):
        _weights_of_best(tmp_path, ModelCheckpoint(monitor="other"))


def test_the_best_checkpoint_needs_a_model_checkpoint_callback(tmp_path: Path) -> None:
    _fitted(tmp_path)
    with pytest.raises(ConfigurationError, match=r"callbacks=\[ModelCheckpoint\(monitor=…\)\]"):
        _weights_of_best(tmp_path, None)
