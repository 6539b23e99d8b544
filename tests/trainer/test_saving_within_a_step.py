"""Checkpoints that are written before everything that follows a step has been done, and what a resume makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from trainwright.core.task import TaskModule

_BATCHES, _EPOCHS = 4, 3
_INPUTS = torch.linspace(-1.0, 1.0, _BATCHES * 2 * 3).reshape(-1, 3)


class Watched(TaskModule):
    """Its learning rate goes by the validation's score, whose noise comes from the global generator."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Linear(3, 1)
        self.events: list[tuple[Any, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the mean square of the output."""
        self.events.append(("train", self.current_epoch, batch_idx))
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the score."""
        self.events.append(("validate", self.global_step, batch_idx))
        self.log("score", self.net(batch[0]).square().mean() + torch.rand(()))

    def on_train_epoch_end(self) -> None:
        """Note what the epoch's metrics are at its end."""
        self.events.append(("end", self.current_epoch, self.trainer.callback_metrics.get("score")))

    def configure_optimizers(self) -> Any:
        """Return Adam, whose rate falls whenever the score has not halved."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "score"}}


def saving_at(hook: str, step: int, path: Path) -> Callback:
    """Return a callback that calls `trainer.save_checkpoint` in `hook`."""

    def save(self: Any, trainer: Any, task: Any, *_: Any) -> None:
        if trainer.global_step == step and not path.exists():
            trainer.save_checkpoint(path)
            task.events.append("saved")

    return type("Saving", (Callback,), {hook: save})()  # type: ignore[no-any-return]  # made by hand


def failing_at(hook: str, step: int) -> Callback:
    """Return a callback that presses Ctrl-C in `hook`, once."""

    def fail(self: Any, trainer: Any, task: Any, *_: Any) -> None:
        if trainer.global_step == step and not trainer.interrupted:
            raise KeyboardInterrupt

    return type("Failing", (Callback,), {hook: fail})()  # type: ignore[no-any-return]  # made by hand


def train(folder: Path, *callbacks: Callback, interval: float | int, resume: Path | None = None) -> Watched:
    """Train to the end, or to an interruption."""
    torch.manual_seed(5 if resume is None else 6)
    task = Watched()
    trainer = quiet_trainer(
        max_epochs=_EPOCHS, seed=1, num_sanity_val_steps=0, val_check_interval=interval,
        callbacks=list(callbacks), default_root_dir=folder, on_interrupt="return",
    )  # fmt: skip
    data = TensorDataset(_INPUTS)
    trainer.fit(task, DataLoader(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=4), ckpt_path=resume)
    return task


_MOMENTS = [
    ("on_train_batch_end", 4, 1.0),
    ("on_train_step_end", 8, 1.0),
    ("on_validation_start", 8, 1.0),
    ("on_validation_end", 4, 1.0),
    ("on_train_epoch_end", 8, 1.0),
    ("on_train_batch_end", 6, 2),
    ("on_validation_end", 6, 2),
    ("on_train_epoch_start", 8, 2),
]


@pytest.mark.parametrize(("hook", "step", "interval"), _MOMENTS)
def test_a_checkpoint_that_a_hook_writes_goes_on_with_what_was_left_of_its_step(
    hook: str, step: int, interval: float, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    whole = train(tmp_path, saving_at(hook, step, saved), interval=interval)
    resumed = train(tmp_path, interval=interval, resume=saved)
    assert resumed.events == whole.events[whole.events.index("saved") + 1 :]  # type: ignore[arg-type]  # the mark
    assert_equal_weights(weights_of(resumed), weights_of(whole))


@pytest.mark.parametrize(
    ("hook", "step"), [("on_train_batch_end", 4), ("on_validation_batch_end", 8), ("on_validation_end", 8)]
)
def test_a_run_that_was_interrupted_beside_a_validation_comes_to_the_same_end(
    hook: str, step: int, tmp_path: Path
) -> None:
    whole = train(tmp_path, interval=1.0)
    train(tmp_path, failing_at(hook, step), OnExceptionCheckpoint(tmp_path / "left"), interval=1.0)
    resumed = train(tmp_path, interval=1.0, resume=tmp_path / "left" / "on_exception")
    assert_equal_weights(weights_of(resumed), weights_of(whole))


def test_an_older_score_is_still_known_after_a_resume(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looking(Callback):
        def on_train_start(self, trainer: Any, task: Any) -> None:
            seen.append(trainer.callback_metrics.get("score"))

    saved = tmp_path / "saved"
    train(tmp_path, saving_at("on_train_step_end", 7, saved), interval=1.0)
    train(tmp_path, Looking(), interval=1.0, resume=saved)
    assert seen[0] is not None
