from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.hooks import TaskHooks
from trainwright.core.signatures import arguments_of, bind, fits
from trainwright.core.task import TaskModule

STEP = ("batch", "batch_idx", "dataloader_idx")
END = ("outputs", *STEP)


def test_a_hook_is_called_with_what_its_base_declares() -> None:
    assert arguments_of(TaskHooks, "on_validation_batch_end") == END
    assert arguments_of(TaskModule, "backward") == ("loss",)
    assert arguments_of(TaskModule, "training_step") == ("batch", "batch_idx")


def test_a_recorder_around_a_default_adds_no_counts() -> None:
    task = RegressionTask()
    called = []
    for name in ("num_items", "on_train_start"):
        default = getattr(task, name)
        setattr(task, name, functools.wraps(default)(lambda *args, name=name: called.append(name)))
    quiet_trainer(max_steps=1).fit(task, regression_loader(2))
    assert called == ["on_train_start"]


@pytest.mark.parametrize(
    ("function", "name", "names", "right"),
    [
        (lambda: None, "test_step", STEP, False),
        (lambda batch: None, "test_step", STEP, True),
        (lambda batch_idx: None, "test_step", STEP, False),
        (lambda outputs, batch, batch_idx: None, "on_test_batch_end", END, True),
        (lambda outputs, batch, batch_idx, a=0, b=0: None, "on_test_batch_end", END, True),
        (lambda *args, batch_idx: None, "on_test_batch_end", END, True),
        (lambda *, stage: None, "setup", ("stage",), True),
        (lambda *, step: None, "setup", ("stage",), False),
    ],
)
def test_what_cannot_be_called_is_found(function: Any, name: str, names: tuple[str, ...], right: bool) -> None:
    assert fits(function, name, names) is right


@pytest.mark.parametrize(
    ("function", "with_loader", "without_loader"),
    [
        (lambda batch: (batch,), ("b",), ("b",)),
        (lambda batch, dataloader_idx=7: (batch, dataloader_idx), ("b", 2), ("b", 7)),
        (lambda batch, dataloader_idx: (batch, dataloader_idx), ("b", 2), ("b", 0)),
        (lambda dataloader_idx, batch: (dataloader_idx, batch), (2, "b"), (0, "b")),
        (lambda batch, *, dataloader_idx: (batch, dataloader_idx), ("b", 2), ("b", 0)),
        (lambda dataloader_idx, *args: (dataloader_idx, args), (2, ("b", 1)), (0, ("b", 1))),
        (lambda *args: args, ("b", 1, 2), ("b", 1)),
    ],
)
def test_a_step_gets_the_arguments_that_it_declares(function: Any, with_loader: Any, without_loader: Any) -> None:
    step = bind(function, "test_step", STEP)
    assert step("b", 1, 2) == with_loader
    assert step("b", 1) == without_loader
