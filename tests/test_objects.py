"""Objects are small, and a step is few calls away from the verb."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

import trainwright
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.core.hooks import TaskHooks


def frames_above(module: str = "trainwright.") -> list[str]:
    """Return the names of the project's functions that are being called, the Trainer's verb first."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(module):
            found.append(frame.f_code.co_name)
            if found[-1] == "fit":
                break
        frame = frame.f_back  # type: ignore[assignment]  # None ends it
    return found[::-1]


class _Optimizer(torch.optim.SGD):
    frames: ClassVar[list[str]] = []

    def step(self, closure: Any = None) -> Any:
        type(self).frames = frames_above()
        return super().step(closure)


class _Task(RegressionTask):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.frames = frames_above()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return _Optimizer(self.parameters(), lr=0.01)


def test_every_class_has_few_bases() -> None:
    """The names of tasks, callbacks and data modules are their users'."""
    tall = {}
    for cls in _classes():
        if issubclass(cls, (TaskHooks, Callback)):
            continue
        found = [base for base in cls.__bases__ if base.__module__.startswith("trainwright.")]
        if len(found) > 2:
            tall[cls.__qualname__] = [base.__name__ for base in found]
    assert tall == {}


def _classes() -> Iterator[type]:
    for module in pkgutil.walk_packages(trainwright.__path__, "trainwright."):
        if ".templates" in module.name or module.name.endswith("__main__"):
            continue
        for cls in vars(importlib.import_module(module.name)).values():
            if isinstance(cls, type) and cls.__module__ == module.name:
                yield cls


def test_a_trainer_and_its_run_hold_few_objects() -> None:
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(RegressionTask(), regression_loader(4, 2))
    assert len(vars(trainer)) <= 10
    assert len(vars(trainer.run)) <= 12


def test_a_step_is_few_calls_away_from_fit() -> None:
    task = _Task()
    quiet_trainer(max_epochs=1).fit(task, regression_loader(2, 2))
    assert len(_Optimizer.frames) <= 5, _Optimizer.frames
    assert len(task.frames) <= 6, task.frames
