"""The hook table: who is called, in which order, and that misspelt hooks are found."""

from __future__ import annotations

import pytest

from tests.callbacks.fake_run import Task
from trainwright.callbacks.callback import EVENTS, Callback
from trainwright.callbacks.hook_table import HookTable, check_hook_names
from trainwright.core.task import TaskModule

KNOWN_TASK_HOOKS = [name for name in dir(TaskModule) if not name.startswith("_")]


def test_an_event_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="on_train_epoch_ends"):
        _ = HookTable([], Task()).on_train_epoch_ends


@pytest.mark.parametrize(
    "name", ["helper", "_on_train_epoch_ends", "step_size", "on_something_of_my_own", "compute_loss"]
)
def test_methods_of_the_user_s_own_are_let_through(name: str) -> None:
    check_hook_names(type("Mine", (Callback,), {name: lambda self: None})(), Callback, EVENTS)
    check_hook_names(type("Mine", (Task,), {name: lambda self: None})(), TaskModule, KNOWN_TASK_HOOKS)
