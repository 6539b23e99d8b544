from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, fitted, quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import Callback, LambdaCallback
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.trainer.checkpoints.shown import ShownCheckpoint


class _Growing(RegressionTask):
    def __init__(self, hidden: int) -> None:
        super().__init__(momentum=0.9)
        self.resize(hidden)

    def resize(self, hidden: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hidden)
            self.net = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hidden"] = self.net[0].out_features

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.resize(checkpoint["hidden"])


def _whole_and_resumed(folder: Path, strategy: str, kind: str) -> tuple[dict[str, torch.Tensor], ...]:
    """Train without and with an interruption, and return the weights of both."""
    options: dict[str, Any] = {"devices": "auto", "strategy": strategy, "default_root_dir": folder}
    grows = kind == "resized layer"

    def fit(task: RegressionTask, ckpt_path: Path | None = None, **length: int) -> Any:
        trainer = quiet_trainer(callbacks=[] if grows else _Unfreeze(), **length, **options)
        trainer.fit(task, regression_loader(16, 2), ckpt_path=ckpt_path)
        return trainer

    whole = _Growing(16) if grows else _Head()
    fit(whole, max_epochs=3)
    first = fit(_Growing(16), max_steps=3) if grows else fit(_Head(), max_epochs=2)
    first.save_checkpoint(folder / "saved")
    resumed = _Growing(2) if grows else _Head()
    fit(resumed, folder / "saved", max_epochs=3)
    return weights_of(whole), weights_of(resumed)


class _Late(RegressionTask):
    """Builds its layers in a hook, with or without a guard."""

    def __init__(self, hook: str, *, guarded: bool, lr: float = 0.1, seen: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        del self.net
        setattr(self, hook, self.build)

    def build(self, stage: str = "") -> None:
        if not (self.hparams.guarded and hasattr(self, "net")):
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize(("hook", "stage"), [("setup", "fit"), ("configure_model", "test")])
@pytest.mark.parametrize("guarded", [True, False])
def test_a_hook_that_replaces_trained_weights_is_a_warning(
    hook: str, stage: str, guarded: bool, tmp_path: Path
) -> None:
    trainer = quiet_trainer(max_steps=2, default_root_dir=tmp_path)
    task = _Late(hook, guarded=guarded)
    trainer.test(task, regression_loader(4))  # nothing was trained yet
    trainer.fit(task, regression_loader(4))
    saved = trainer.save_checkpoint(tmp_path / "saved")
    trainer.test(task, regression_loader(4), ckpt_path=saved)  # replaced by trained ones
    warns = pytest.warns(TrainwrightWarning, match=rf"{stage}: setup or .* of _Late has replaced 4 trained weights")
    with contextlib.nullcontext() if guarded else warns:
        getattr(quiet_trainer(max_steps=4), stage)(task, regression_loader(4))


def test_evaluating_a_checkpoint_of_other_hyperparameters_is_a_warning(tmp_path: Path) -> None:
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(_Late("setup", guarded=True, lr=0.1, seen=[float("nan")]), regression_loader(4))
    saved = trainer.save_checkpoint(tmp_path / "saved")
    same, other = _Late("setup", guarded=True, seen=[float("nan")]), _Late("setup", guarded=True, lr=0.2)
    quiet_trainer().test(same, regression_loader(4), ckpt_path=saved)
    words = r"test: _Late has other hyper-parameters than .*saved: lr is 0\.2, and was 0\.1; seen is None, and was"
    with pytest.warns(TrainwrightWarning, match=words):
        quiet_trainer().test(other, regression_loader(4), ckpt_path=saved)
    # A resumed or a new run may change them.
    quiet_trainer(max_steps=2).fit(_Late("setup", guarded=True, lr=0.2), regression_loader(4), ckpt_path=saved)


@pytest.mark.parametrize("kind", ["resized layer", "added group"])
def test_a_hook_that_changes_the_model_or_its_groups_lets_a_run_resume_exactly(kind: str, tmp_path: Path) -> None:
    assert_equal_weights(*_whole_and_resumed(tmp_path, "auto", kind))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [pytest.param("resized layer", "deepspeed_stage_2", marks=pytest.mark.exhaustive), ("added group", "fsdp")],
)
def test_a_hook_that_changes_the_model_or_its_groups_lets_two_ranks_resume(
    kind: str, strategy: str, tmp_path: Path
) -> None:
    for whole, resumed in run_distributed(_whole_and_resumed, 2, tmp_path, strategy, kind, init=False, timeout=300):
        torch.testing.assert_close(whole, resumed)


def test_weights_may_be_changed_and_entries_that_would_have_no_effect_not(tmp_path: Path) -> None:
    def change(trainer: Any, task: Any, checkpoint: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match=r"cannot change checkpoint\['global_step'\]"):
            checkpoint["global_step"] = 5
        checkpoint["state_dict"] = {name: value * 0 for name, value in checkpoint["state_dict"].items()}

    saved = fitted(RegressionTask(), regression_loader(8), max_steps=3).save_checkpoint(tmp_path / "saved")
    task, changes = RegressionTask(), LambdaCallback(on_load_checkpoint=change)
    quiet_trainer(max_steps=3, callbacks=changes).fit(task, regression_loader(8), ckpt_path=saved)
    assert not any(bool(value.any()) for value in weights_of(task).values())


class _Head(RegressionTask):
    def __init__(self) -> None:
        super().__init__(momentum=0.9)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net[3].parameters(), lr=self.lr, momentum=self.momentum)


class _Unfreeze(Callback):
    """Adds the first layer as a group in the second epoch."""

    def __init__(self) -> None:
        self.added = False

    def state_dict(self) -> dict[str, Any]:
        return {"added": self.added}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.added = state_dict["added"]

    def on_fit_start(self, trainer: Any, task: Any) -> None:
        if self.added:
            self._add(trainer, task)

    def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
        if trainer.current_epoch == 1 and not self.added:
            self.added = True
            self._add(trainer, task)

    def _add(self, trainer: Any, task: Any) -> None:
        trainer.optimizers[0].add_param_group({"params": list(task.net[0].parameters()), "lr": 0.01})


def _shown() -> ShownCheckpoint:
    read = {"epoch": lambda: 3, "loops": lambda: {"fit": [{"done": 1}]}}
    return ShownCheckpoint("on_save_checkpoint", {"own": 1}, {"w": 2}, read, advice="do not")


_PLAIN = {"epoch": 3, "loops": {"fit": ({"done": 1},)}, "own": 1, "state_dict": {"w": 2}}


def test_every_way_to_read_the_checkpoint_shows_its_values() -> None:
    assert _shown() == _PLAIN
    assert repr(_shown()) == repr(_PLAIN)
    assert _shown().setdefault("epoch", 5) == 3
    assert _shown() | {} == {} | _shown() == _PLAIN


def test_entries_of_hooks_can_be_changed_and_the_others_cannot() -> None:
    shown = _shown()
    assert shown.pop("own") == 1
    shown |= {"a": 1, "b": 2, "c": 3}
    del shown["a"]
    assert shown.popitem() == ("c", 3)
    with pytest.raises(ConfigurationError, match="epoch"):
        shown.clear()
    assert shown["b"] == 2
