"""An evaluation without a task after a fit takes the best checkpoint, and says so; an explicit None does not."""

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


class _Task(RegressionTask):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", float(abs(self.current_epoch - 1)))  # the second epoch is the best

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


def _fitted(folder: Path, *savers: Any, **options: Any) -> tuple[Any, _Task, dict[str, torch.Tensor]]:
    savers = savers or (ModelCheckpoint(monitor="val_loss"),)
    trainer = quiet_trainer(max_epochs=3, default_root_dir=folder, callbacks=list(savers), **options)
    task = _Task()
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
    assert lines == [f"trainwright: {used}. Pass ckpt_path=None for those that the task has now."]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("given", ["ckpt_path", "task"])
def test_an_explicit_none_or_a_task_keeps_the_present_weights(
    stage: str, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, task, last = _fitted(tmp_path)
    arguments: dict[str, Any] = {"ckpt_path": None} if given == "ckpt_path" else {"task": task}
    getattr(trainer, stage)(dataloaders=regression_loader(2), **arguments)
    assert_equal_weights(weights_of(task), last)
    assert "weights by" not in capsys.readouterr().out


def test_without_a_monitored_checkpoint_the_present_weights_are_used(tmp_path: Path) -> None:
    trainer, task, last = _fitted(tmp_path, ModelCheckpoint())
    trainer.test(dataloaders=regression_loader(2))
    assert_equal_weights(weights_of(task), last)


def test_a_fast_development_run_has_no_best_weights(tmp_path: Path) -> None:
    trainer, task, last = _fitted(tmp_path, fast_dev_run=True)
    trainer.test(dataloaders=regression_loader(2))
    assert_equal_weights(weights_of(task), last)


def test_of_several_checkpoint_callbacks_the_first_that_watches_a_metric_counts(tmp_path: Path) -> None:
    plain = ModelCheckpoint(dirpath=tmp_path / "plain")
    watching = ModelCheckpoint(dirpath=tmp_path / "watching", monitor="val_loss")
    trainer, task, _ = _fitted(tmp_path, plain, watching)
    trainer.test(dataloaders=regression_loader(2))
    assert_equal_weights(weights_of(task), _best(watching))


def _on_rank(folder: Path) -> bool:
    trainer, task, last = _fitted(folder, devices="auto")
    trainer.test(dataloaders=regression_loader(4))
    return torch.equal(weights_of(task)["net.0.weight"], last["net.0.weight"])


@pytest.mark.distributed
def test_two_ranks_take_the_best_weights(tmp_path: Path) -> None:
    assert run_distributed(_on_rank, 2, tmp_path, init=False) == [False, False]


@pytest.mark.distributed
@pytest.mark.exhaustive
def test_processes_that_the_trainer_starts_take_the_best_weights(tmp_path: Path) -> None:
    trainer, task, last = _fitted(tmp_path, devices=2)
    trainer.test(dataloaders=regression_loader(4))
    best = _best(trainer.checkpoint_callback)
    assert_equal_weights(weights_of(task), best)
    assert not torch.equal(best["net.0.weight"], last["net.0.weight"])
