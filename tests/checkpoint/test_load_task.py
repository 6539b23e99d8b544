from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.snapshots import same, write_small
from tests.helpers.runs import quiet_trainer
from trainwright.checkpoint import load_task_from_checkpoint
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.hyperparameters import Hyperparameters
from trainwright.core.task import TaskModule


class Task(nn.Module):
    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.net = nn.Linear(width, 2, bias=bias)


class Loose(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.net = nn.Linear(options["width"], 2)


def saved(folder: Path, task: nn.Module, hyper_parameters: Any, **changes: Any) -> Path:
    return write_small(
        folder, trainer={"hyper_parameters": hyper_parameters}, model=task.state_dict(), optimizers=[], **changes
    )


@pytest.mark.parametrize("kind", ["full", "weights"])
def test_a_task_comes_back_with_its_arguments_and_weights(tmp_path: Path, kind: str) -> None:
    task = Task(3, bias=False)
    path = saved(tmp_path, task, {"width": 3, "bias": False}, kind=kind)
    back = load_task_from_checkpoint(Task, path)
    assert isinstance(back, Task)
    assert same(back.state_dict(), task.state_dict())


def test_hyper_parameters_are_left_out_unless_the_constructor_takes_them_or_all(tmp_path: Path) -> None:
    path = saved(tmp_path, Task(3), {"width": 3, "learning_rate": 0.1})
    assert load_task_from_checkpoint(Task, path).net.in_features == 3
    assert load_task_from_checkpoint(Loose, path).options == {"width": 3, "learning_rate": 0.1}


def test_a_missing_argument_is_named_with_the_way_to_give_it(tmp_path: Path) -> None:
    path = saved(tmp_path, Task(3), {"bias": True})
    with pytest.raises(CheckpointError, match=r"missing a required argument: 'width'.*as keyword arguments"):
        load_task_from_checkpoint(Task, path)


class FromOne(TaskModule):
    """Takes all of its settings in one argument, and is lenient about weights."""

    def __init__(self, config: Any, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.strict_loading = False
        self.scale = scale
        self.net = nn.Linear(config["width"], config.outputs)


def test_settings_that_were_one_argument_are_handed_over_as_that_argument(tmp_path: Path) -> None:
    task = FromOne(Hyperparameters(width=3, outputs=2))
    trainer = quiet_trainer(max_epochs=0)
    task.training_step = lambda batch, batch_idx: task.net(batch).sum()  # type: ignore[method-assign]
    task.configure_optimizers = lambda: None  # type: ignore[method-assign]
    with pytest.warns(TrainwrightWarning, match="without an optimizer"):
        trainer.fit(task, [torch.ones(1, 3)])
    path = trainer.save_checkpoint(tmp_path / "saved")
    back = FromOne.load_from_checkpoint(path, lr=0.5, scale=2.0)
    assert back.hparams == {"width": 3, "outputs": 2, "lr": 0.5}
    assert back.scale == 2.0
    assert same(back.net.state_dict(), task.net.state_dict())
