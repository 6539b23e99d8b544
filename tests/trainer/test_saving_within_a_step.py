"""Checkpoints that are written within a step or at the end of a fit, and runs that resume from them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.data.sources import Resumable
from tests.helpers.runs import assert_equal_weights, fitted, quiet_trainer, weights_of
from tests.helpers.tasks import Batch, RegressionTask, StepTask, regression_loader
from trainwright.callbacks import Callback, ModelCheckpoint
from trainwright.callbacks.lambda_callback import LambdaCallback
from trainwright.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from trainwright.checkpoint import newest_valid, read_checkpoint, verify
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.task import TaskModule

_EPOCHS = 3
_INPUTS = torch.linspace(-1.0, 1.0, 4 * 2 * 3).reshape(-1, 3)  # four batches of two


class Watched(TaskModule):
    """Its learning rate goes by the validation's score, whose noise comes from the global generator."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Linear(3, 1)
        self.events: list[tuple[Any, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.events.append(("train", self.current_epoch, batch_idx))
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.events.append(("validate", self.global_step, batch_idx))
        self.log("score", self.net(batch[0]).square().mean() + torch.rand(()))

    def on_train_epoch_end(self) -> None:
        self.events.append(("end", self.current_epoch, self.trainer.callback_metrics.get("score")))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "score"}}


def saving_at(hook: str, step: int, path: Path) -> Callback:
    def save(self: Any, trainer: Any, task: Any, *_: Any) -> None:
        if trainer.global_step == step and not path.exists():
            trainer.save_checkpoint(path)
            task.events.append("saved")

    return type("Saving", (Callback,), {hook: save})()  # type: ignore[no-any-return]  # made by hand


def train(folder: Path, *callbacks: Callback, interval: float | int, resume: Path | None = None) -> Watched:
    torch.manual_seed(5 if resume is None else 6)
    task = Watched()
    trainer = quiet_trainer(
        max_epochs=_EPOCHS, seed=1, num_sanity_val_steps=0, val_check_interval=interval,
        callbacks=list(callbacks), default_root_dir=folder, on_interrupt="return",
    )  # fmt: skip
    data = TensorDataset(_INPUTS)
    trainer.fit(task, DataLoader(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=4), ckpt_path=resume)
    return task


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "step", "interval"),
    [
        ("on_train_step_end", 8, 1.0),
        ("on_validation_start", 8, 1.0),
        ("on_train_epoch_end", 8, 1.0),
        ("on_train_batch_end", 6, 2),
        ("on_validation_end", 6, 2),
        ("on_train_epoch_start", 8, 2),
    ],
)
def test_a_checkpoint_that_a_hook_writes_goes_on_with_what_was_left_of_its_step(
    hook: str, step: int, interval: float, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    whole = train(tmp_path, saving_at(hook, step, saved), interval=interval)
    resumed = train(tmp_path, interval=interval, resume=saved)
    assert resumed.events == whole.events[whole.events.index("saved") + 1 :]  # type: ignore[arg-type]  # the mark
    assert_equal_weights(weights_of(resumed), weights_of(whole))


_STEPS = 8


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_step_leaves_a_checkpoint_of_the_step_before(error: type[BaseException], tmp_path: Path) -> None:
    def fails_in_its_fourth_step(task: Any, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = task.loss(batch)
        if batch_idx == 3:
            raise error("the fourth step")
        return loss

    trainer = quiet_trainer(max_epochs=1, callbacks=OnExceptionCheckpoint(tmp_path), default_root_dir=tmp_path)
    with pytest.raises(error):
        trainer.fit(StepTask(fails_in_its_fourth_step), regression_loader(_STEPS))
    saved = tmp_path / "on_exception"
    assert verify(saved) == []
    assert read_checkpoint(saved).state["step"] == 3
    whole, resumed = RegressionTask(), RegressionTask()
    quiet_trainer(max_epochs=1).fit(whole, regression_loader(_STEPS))
    with pytest.warns(TrainwrightWarning, match="was written within the step after step 3"):
        trainer = fitted(resumed, regression_loader(_STEPS), ckpt_path=saved, max_epochs=1)
    assert trainer.global_step == _STEPS
    assert_equal_weights(weights_of(resumed), weights_of(whole))


def test_nothing_is_saved_while_the_optimizer_steps(tmp_path: Path) -> None:
    class Breaks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError("half-way")

    task = RegressionTask()
    task.configure_optimizers = lambda: Breaks(task.parameters(), lr=0.1)  # type: ignore[method-assign]
    trainer = quiet_trainer(max_epochs=1, callbacks=OnExceptionCheckpoint(tmp_path), default_root_dir=tmp_path)
    with (
        pytest.warns(TrainwrightWarning, match="it stopped while an optimizer was stepping"),
        pytest.raises(ArithmeticError),
    ):
        trainer.fit(task, regression_loader(_STEPS))
    with pytest.raises(ConfigurationError, match="the fit ended while an optimizer was stepping"):
        trainer.save_checkpoint(tmp_path / "mine")
    assert not list(tmp_path.iterdir())


def test_nothing_is_saved_in_a_step_whose_batch_a_loader_with_a_state_has_left_behind(tmp_path: Path) -> None:
    trainer = quiet_trainer(max_epochs=1, callbacks=OnExceptionCheckpoint(tmp_path), default_root_dir=tmp_path)
    with pytest.warns(TrainwrightWarning, match="loader had already read the batches"), pytest.raises(OSError):
        trainer.fit(StepTask(lambda task, batch, batch_idx: fail(trainer)), Resumable(_STEPS))
    assert not list(tmp_path.iterdir())


_BATCHES = 9


def at_13(act: Callable[[Any], object]) -> Callback:
    return LambdaCallback(on_train_step_end=lambda trainer, task, result: trainer.global_step == 13 and act(trainer))


def fail(trainer: Any) -> None:
    raise OSError("the data is gone")


BOUNDS: dict[str, tuple[dict[str, Any], list[Callback], int]] = {
    "max_steps in an epoch": ({"max_steps": 13}, [], 13),
    "max_steps at an epoch's end": ({"max_steps": 18}, [], 18),
    "max_epochs": ({"max_epochs": 2}, [], 18),
    "a stop request": ({"max_epochs": 3}, [at_13(lambda trainer: setattr(trainer, "should_stop", True))], 13),
    "a late stop": ({"max_epochs": 3}, [at_13(lambda t: t.at_step_end(lambda: setattr(t, "should_stop", True)))], 13),
    "max_time": ({"max_epochs": 3}, [at_13(lambda trainer: trainer.request_stop("time", closes_epoch=False))], 13),
    "a signal": ({"max_epochs": 3}, [at_13(lambda trainer: os.kill(os.getpid(), signal.SIGTERM))], 13),
    "an error": ({"max_epochs": 3}, [at_13(fail)], 13),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "every",
    [
        {"every_n_train_steps": 5},
        pytest.param({"every_n_epochs": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"monitor": "train_loss"}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
@pytest.mark.parametrize("bound", BOUNDS)
def test_the_last_state_is_on_disk(bound: str, every: dict[str, Any], tmp_path: Path) -> None:
    arguments, stops, steps = BOUNDS[bound]
    # A state in which something failed is saved only where that is asked for.
    saver = ModelCheckpoint(save_last=True, save_on_exception=bound == "an error", **every)
    trainer = quiet_trainer(**arguments, default_root_dir=tmp_path, callbacks=[*stops, saver])
    with contextlib.suppress(SystemExit, OSError):
        trainer.fit(RegressionTask(), regression_loader(_BATCHES), regression_loader(2))
    assert trainer.global_step == steps
    newest = newest_valid(tmp_path / "checkpoints")
    assert newest is not None
    assert read_checkpoint(newest).state["step"] == steps
    if bound not in ("a signal", "an error"):  # those are saved beside what ModelCheckpoint keeps
        assert read_checkpoint(saver.last_model_path).state["step"] == steps
