"""The verbs of the Trainer take the task as `model=`, as `task=` and as the first positional argument."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.errors import ConfigurationError
from trainwright.trainer.trainer import Trainer

VERBS = ("fit", "validate", "test", "predict")


def _call(verb: str, *args: Any, **named: Any) -> Trainer:
    trainer = quiet_trainer(max_steps=2)
    data = {"train_dataloaders": regression_loader(4)} if verb == "fit" else {"dataloaders": regression_loader(4)}
    if verb in ("validate", "test"):
        data["verbose"] = False
    if len(args) == 2:
        data.pop("train_dataloaders" if verb == "fit" else "dataloaders")
    getattr(trainer, verb)(*args, **named, **data)
    return trainer


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["model", "task"])
def test_the_task_has_two_names(verb: str, name: str) -> None:
    task = RegressionTask()
    assert _call(verb, **{name: task}).task is task


@pytest.mark.parametrize("verb", VERBS)
def test_task_and_data_are_taken_by_position(verb: str) -> None:
    task = RegressionTask()
    assert _call(verb, task, regression_loader(4)).task is task


@pytest.mark.parametrize("verb", VERBS)
def test_two_different_tasks_are_an_error(verb: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{verb}\(\) received two tasks, as task= and as model=. Pass only"):
        _call(verb, RegressionTask(), model=RegressionTask())


def test_a_fit_without_a_task_says_what_to_pass() -> None:
    with pytest.raises(ConfigurationError, match=r"fit\(\) needs a task: pass a TaskModule as its first argument"):
        _call("fit")


@pytest.mark.parametrize("verb", VERBS)
def test_positional_arguments_come_in_lightnings_order(verb: str) -> None:
    orders = {
        "fit": ["task", "train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path", "weights_only"],
        "validate": ["task", "dataloaders", "ckpt_path", "verbose", "datamodule", "weights_only"],
        "test": ["task", "dataloaders", "ckpt_path", "verbose", "datamodule", "weights_only"],
        "predict": ["task", "dataloaders", "datamodule", "return_predictions", "ckpt_path", "weights_only"],
    }
    parameters = inspect.signature(getattr(Trainer, verb)).parameters.values()
    positional = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional[1:] == orders[verb]
