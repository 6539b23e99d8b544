"""`save_hyperparameters` keeps what a checkpoint can hold and leaves out the rest with a warning, never an error."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.task import TaskModule
from trainwright.data import DataModule
from trainwright.loggers import CSVLogger


class Colour(enum.Enum):
    """Neither text nor a number."""

    RED = (255, 0, 0)
    BLUE = (0, 0, 255)


class Level(enum.IntEnum):
    """A number with a name."""

    LOW = 1


class Keeping(RegressionTask):
    """Keeps everything that it is given."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class Needing(RegressionTask):
    """Needs a module and a function."""

    def __init__(self, width: int, loss_fn: nn.Module, make: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def _saved(task: TaskModule, folder: Path, **arguments: Any) -> Path:
    trainer = quiet_trainer(max_steps=1, **arguments)
    trainer.fit(task, regression_loader(4))
    return trainer.save_checkpoint(folder / "saved")


KINDS: dict[str, Any] = {
    "colour": Colour.RED, "level": Level.LOW, "dtype": torch.bfloat16, "device": torch.device("cpu"),
    "names": {"a", "b"}, "numbers": frozenset({1, 2}), "single": np.float32(0.1), "many": np.int64(3),
    "nested": {"list": [Colour.BLUE, ({"deep": Level.LOW}, 2)], "plain": 1}, "nothing": float("inf"),
}  # fmt: skip


def test_what_a_checkpoint_can_hold_comes_back_as_it_was(tmp_path: Path) -> None:
    path = _saved(Keeping(**KINDS), tmp_path)
    found = Keeping.load_from_checkpoint(path).hparams
    assert found == KINDS
    assert {name: type(value) for name, value in found.items()} == {name: type(value) for name, value in KINDS.items()}
    assert found["nested"]["list"][0] is Colour.BLUE


def test_what_it_cannot_hold_is_left_out_with_a_warning_and_can_still_be_read(tmp_path: Path) -> None:
    loss_fn = nn.MSELoss()
    with pytest.warns(
        TrainwrightWarning, match=r"loss_fn is a MSELoss; make is a .*function.*ignore=\['loss_fn', 'make'\]"
    ):
        task = Needing(3, loss_fn, make=print)
    assert task.hparams.loss_fn is loss_fn
    assert task.hparams_initial == {"width": 3}
    logger = CSVLogger(tmp_path)
    path = _saved(task, tmp_path, logger=logger)
    assert logger.log_dir is not None
    assert Path(logger.log_dir, "hparams.yaml").read_text() == "width: 3\n"
    with pytest.raises(CheckpointError, match=r"loss_fn.*save_hyperparameters could not keep: loss_fn is a MSELoss"):
        Needing.load_from_checkpoint(path)
    with pytest.warns(TrainwrightWarning, match="loss_fn is a L1Loss"):
        assert Needing.load_from_checkpoint(path, loss_fn=nn.L1Loss()).hparams.width == 3


def test_what_is_assigned_later_and_cannot_be_kept_is_said_once_when_a_checkpoint_is_written(tmp_path: Path) -> None:
    task = Keeping(a=1)
    task.hparams.late = print
    with pytest.warns(TrainwrightWarning, match=r"hparams: late is a .*; the checkpoint is written without it") as told:
        path = _saved(task, tmp_path)
    assert len(told) == 1
    assert Keeping.load_from_checkpoint(path).hparams == {"a": 1}


def test_an_enumeration_that_is_not_imported_has_to_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wanting(RegressionTask):
        def __init__(self, colour: Colour) -> None:
            super().__init__()
            self.save_hyperparameters()

    path = _saved(Wanting(Colour.RED), tmp_path)
    monkeypatch.delitem(globals(), "Colour")
    with pytest.raises(
        CheckpointError, match=r"could not keep: RED of the enumeration .*:Colour, which is not imported"
    ):
        Wanting.load_from_checkpoint(path)
    assert Wanting.load_from_checkpoint(path, colour=Level.LOW).hparams.colour is Level.LOW


def test_ignored_ones_can_be_forgotten_later() -> None:
    task = Keeping(a=1, b=2)
    task.remove_ignored_hparams(["b"])
    assert (task.hparams, task.hparams_initial) == ({"a": 1}, {"a": 1})


class Numbers(DataModule):
    """Has a hyper-parameter and a state."""

    def __init__(self, count: int, level: Level = Level.LOW) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen = 0

    def train_dataloader(self) -> Any:
        return regression_loader(self.hparams.count)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def test_a_data_module_is_built_from_a_checkpoint(tmp_path: Path) -> None:
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(RegressionTask(), datamodule=Numbers(4))
    path = trainer.save_checkpoint(tmp_path / "saved")
    found = Numbers.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    assert (found.hparams, found.seen, found.name) == ({"count": 4, "level": Level.LOW}, 7, "Numbers")
    assert Numbers.load_from_checkpoint(path, count=8).hparams.count == 8
