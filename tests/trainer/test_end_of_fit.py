"""Whatever ends a fit, its last state is on disk; `best` and `last` name it unless the fit was broken off."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import Callback, ModelCheckpoint
from trainwright.checkpoint import newest_valid, read_checkpoint

_BATCHES = 9


class At13(Callback):
    """Does something after step 13."""

    def __init__(self, act: Callable[[Any], object]) -> None:
        self.act = act

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.global_step == 13:
            self.act(trainer)


def fail(trainer: Any) -> None:
    raise OSError("the data is gone")


BOUNDS: dict[str, tuple[dict[str, Any], list[Callback], int]] = {
    "max_steps in an epoch": ({"max_steps": 13}, [], 13),
    "max_steps at an epoch's end": ({"max_steps": 18}, [], 18),
    "max_epochs": ({"max_epochs": 2}, [], 18),
    "a stop request": ({"max_epochs": 3}, [At13(lambda trainer: setattr(trainer, "should_stop", True))], 13),
    "max_time": ({"max_epochs": 3}, [At13(lambda trainer: trainer.request_stop("time", closes_epoch=False))], 13),
    "a signal": ({"max_epochs": 3}, [At13(lambda trainer: os.kill(os.getpid(), signal.SIGTERM))], 13),
    "an error": ({"max_epochs": 3}, [At13(fail)], 13),
}
SAVERS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "every 5 steps": {"every_n_train_steps": 5},
    "every 2 epochs": {"every_n_epochs": 2},
    "last": {"every_n_train_steps": 5, "save_last": True},
    "last of the best": {"monitor": "train_loss", "save_last": True},
}


@pytest.mark.parametrize("validates", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("bound", BOUNDS)
def test_the_last_state_is_on_disk(bound: str, saver: str, validates: bool, tmp_path: Path) -> None:
    arguments, stops, steps = BOUNDS[bound]
    options = SAVERS[saver]
    if bound == "an error":  # a state in which something failed is saved only where that is asked for
        options = {**(options or {}), "save_on_exception": True}
    callbacks = [*stops] if options is None else [*stops, ModelCheckpoint(**options)]
    trainer = quiet_trainer(**arguments, default_root_dir=tmp_path, callbacks=callbacks, enable_checkpointing=True)
    loader = regression_loader(_BATCHES)
    with contextlib.suppress(SystemExit, OSError):
        trainer.fit(RegressionTask(), loader, loader if validates else None)
    assert trainer.global_step == steps
    newest = newest_valid(tmp_path / "checkpoints")
    assert newest is not None
    assert read_checkpoint(newest).state["step"] == steps
    if bound in ("a signal", "an error"):
        return  # saved beside what ModelCheckpoint keeps
    checkpoint = trainer.checkpoint_callback
    named = checkpoint.last_model_path if options and "save_last" in options else checkpoint.best_model_path
    assert read_checkpoint(named).state["step"] == steps
