from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.core.hyperparameters import kept_and_left_out
from trainwright.core.task import TaskModule
from trainwright.data import DataModule
from trainwright.loggers import CSVLogger


class Task(TaskModule):
    def __init__(self, width: int, *, lr: float = 0.1, **options: Any) -> None:
        super().__init__()
        helper = 3  # a local that is no argument
        self.save_hyperparameters()
        del helper


def test_every_argument_is_kept_with_its_default_and_the_extra_ones() -> None:
    assert Task(4, dropout=0.2).hparams == {"width": 4, "lr": 0.1, "dropout": 0.2}


def test_entries_are_attributes_as_well() -> None:
    hparams = Task(4).hparams
    assert hparams.width == 4
    hparams.width = 5
    assert hparams["width"] == 5
    with pytest.raises(AttributeError, match=r"'depth'. Known: width, lr"):
        _ = hparams.depth


def test_a_name_that_is_no_argument_is_an_error() -> None:
    class Misspelt(TaskModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters("widht")

    with pytest.raises(ConfigurationError, match="no argument 'widht'; it has: width"):
        Misspelt(1)


def test_the_key_none_hides_no_other_key() -> None:
    assert kept_and_left_out({"names": {None: 1, "a": 2}})[1] == {}
    left_out = {"names": "names.inner has the key 2, and keys must be text"}
    assert kept_and_left_out({"names": {"inner": {None: 1, 2: 3}}})[1] == left_out


def test_a_set_with_none_and_an_object_is_left_out() -> None:
    others = [object() for _ in range(64)]  # None comes before one of these in at least one of the sets
    reasons = [kept_and_left_out({"names": {None, other}})[1] for other in others]
    assert reasons == [{"names": "names holds a object"}] * len(others)
    assert kept_and_left_out({"names": {None, "a"}})[1] == {}


class Colour(enum.Enum):
    RED = (255, 0, 0)
    BLUE = (0, 0, 255)


class Level(enum.IntEnum):
    LOW = 1


class Keeping(RegressionTask):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


def _saved(made: TaskModule, folder: Path, **arguments: Any) -> Path:
    trainer = quiet_trainer(max_steps=1, **arguments)
    trainer.fit(made, regression_loader(4))
    return trainer.save_checkpoint(folder / "saved")


KINDS: dict[str, Any] = {
    "colour": Colour.RED, "level": Level.LOW, "dtype": torch.bfloat16, "device": torch.device("cpu"),
    "names": {"a", "b"}, "numbers": frozenset({1, 2}), "single": np.float32(0.1), "many": np.int64(3),
    "nested": {"list": [Colour.BLUE, ({"deep": Level.LOW}, 2)], "plain": 1}, "nothing": float("inf"),
}  # fmt: skip


def test_hyperparameters_of_supported_types_are_loaded_unchanged(tmp_path: Path) -> None:
    path = _saved(Keeping(**KINDS), tmp_path)
    found = Keeping.load_from_checkpoint(path).hparams
    assert found == KINDS
    assert {name: type(value) for name, value in found.items()} == {name: type(value) for name, value in KINDS.items()}
    assert found["nested"]["list"][0] is Colour.BLUE


class Numbers(DataModule):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return regression_loader(self.hparams.count)


class WithAct(RegressionTask):
    def __init__(self, act: nn.Module | None = None, init: Any = torch.nn.init.zeros_) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.filterwarnings("ignore:.*(is a ReLU|function):trainwright.core.errors.TrainwrightWarning")
@pytest.mark.parametrize(
    ("cls", "arguments", "lost"),
    [
        (WithAct, {"act": nn.ReLU()}, "act is a ReLU"),
        (WithAct, {"act": None}, None),  # nothing but the default function is omitted
    ],
)
def test_an_argument_that_was_not_saved_must_be_passed_to_load(
    cls: Any, arguments: dict[str, Any], lost: str | None, tmp_path: Path
) -> None:
    made = cls(**arguments)
    path = _saved(made, tmp_path)
    if lost is None:
        assert cls.load_from_checkpoint(path).hparams == made.hparams
        return
    with pytest.raises(CheckpointError, match=rf"could not save: {lost}"):
        cls.load_from_checkpoint(path)
    assert cls.load_from_checkpoint(path, **{lost.split()[0]: None}).hparams[lost.split()[0]] is None


class Configured(RegressionTask):
    def __init__(self, cfg: Any, widths: Any = (), colour: Colour = Colour.RED) -> None:
        super().__init__()
        self.save_hyperparameters(*([] if widths else [cfg]))


@pytest.mark.requires("omegaconf", reason="its containers are arguments")
@pytest.mark.parametrize("one_argument", [True, False])
def test_containers_of_omegaconf_are_stored_as_data_and_loaded_as_containers(
    one_argument: bool, tmp_path: Path
) -> None:
    from omegaconf import DictConfig, OmegaConf

    cfg = OmegaConf.create({"model": {"width": 3, "double": "${model.width}", "colour": Colour.BLUE}, "tags": ["a"]})
    logger = CSVLogger(tmp_path)
    widths = () if one_argument else OmegaConf.create([1, {"two": 2}])
    path = _saved(Configured(cfg, widths), tmp_path, logger=logger)
    found = Configured.load_from_checkpoint(path).hparams
    loaded = found if one_argument else found.cfg
    assert loaded.model == OmegaConf.create({"width": 3, "double": 3, "colour": Colour.BLUE})
    assert isinstance(loaded.model, DictConfig)
    assert loaded.tags == ["a"]
    if one_argument:
        assert found == OmegaConf.create({**cfg, "model": loaded.model})
    assert one_argument or found.widths[1].two == 2
    assert logger.log_dir is not None
    assert "double: 3" in Path(logger.log_dir, "hparams.yaml").read_text()


@dataclass(eq=False)
class AsDataclass(RegressionTask):
    width: int
    names: list[str] = field(default_factory=lambda: ["a"])
    secret: str = "x"
    made: int = field(default=9, init=False)

    def __post_init__(self) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="secret")


class OfDataclass(AsDataclass):
    def __init__(self, depth: int) -> None:
        super().__init__(width=2 * depth)


def test_arguments_of_a_sub_class_of_a_dataclass() -> None:
    task = OfDataclass(2)
    assert task.hparams == task.hparams_initial == {"width": 4, "names": ["a"], "depth": 2}


@pytest.mark.parametrize(("value", "collides"), [(8, True), (4.0, True), (4, False)])
def test_different_values_of_task_and_data_module_under_one_name_are_an_error(
    value: Any, collides: bool, tmp_path: Path
) -> None:
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(max_steps=1, logger=logger)
    if collides:
        with pytest.raises(ConfigurationError, match=rf"both have the hyper-parameter count: {value!r} and 4"):
            trainer.fit(Keeping(count=value), datamodule=Numbers(4))
    else:
        trainer.fit(Keeping(count=value), datamodule=Numbers(4))
    for unlogged in ({"logger": logger, "enable_autolog_hparams": False}, {"logger": False}):
        quiet_trainer(max_steps=1, **unlogged).fit(Keeping(count=value), datamodule=Numbers(4))


@pytest.mark.requires("omegaconf", reason="its containers are arguments")
def test_a_container_of_omegaconf_that_cannot_be_stored_is_left_out(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    with pytest.warns(TrainwrightWarning, match=r"a cannot be resolved: .*nowhere.*; b\.key is"):
        Keeping(
            a=OmegaConf.create({"key": "${nowhere}"}), b=OmegaConf.create({"key": range}, flags={"allow_objects": True})
        )
    path = _saved(Keeping(a=OmegaConf.create({"key": r"\${oc.env:HOME}"})), tmp_path)
    with pytest.raises(CheckpointError, match=r"a holds '\$\{', which OmegaConf would evaluate"):
        Keeping.load_from_checkpoint(path)


def test_an_enumeration_that_is_not_imported_has_to_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wanting(RegressionTask):
        def __init__(self, colour: Colour) -> None:
            super().__init__()
            self.save_hyperparameters()

    path = _saved(Wanting(Colour.RED), tmp_path)
    monkeypatch.delitem(globals(), "Colour")
    with pytest.raises(
        CheckpointError, match=r"could not save: RED of the enumeration .*:Colour, which is not imported"
    ):
        Wanting.load_from_checkpoint(path)
    assert Wanting.load_from_checkpoint(path, colour=Level.LOW).hparams.colour is Level.LOW
