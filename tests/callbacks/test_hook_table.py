"""The hook table: who is called, in which order, and that misspelt hooks are found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.fake_run import FakeRun, Task
from trainwright.callbacks.callback import EVENTS, Callback, Order
from trainwright.callbacks.hook_table import HookTable, check_hook_names
from trainwright.core.hooks import TaskHooks
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule

KNOWN_TASK_HOOKS = [name for name in dir(TaskModule) if not name.startswith("_")]


class Noting(Callback):
    def __init__(self, name: str, notes: list[str], order: int = Order.NORMAL) -> None:
        self.name, self.notes, self.order = name, notes, order

    def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
        self.notes.append(self.name)


class Quiet(Callback):
    """Overrides nothing."""


def test_callbacks_run_in_their_order_and_equal_ones_as_given() -> None:
    notes: list[str] = []
    callbacks = [
        Noting("last", notes, Order.LAST),
        Noting("a", notes),
        Noting("early", notes, 10),
        Noting("b", notes),
        Noting("first", notes, Order.FIRST),
    ]
    for hook in HookTable(callbacks, Task()).on_train_epoch_start:
        hook(None, None)
    assert notes == ["first", "early", "a", "b", "last"]


def test_every_event_has_an_entry_and_nobody_listens_without_overriding() -> None:
    table = HookTable([Quiet(), Callback()], Task())
    assert set(EVENTS) <= set(vars(table))
    assert set(vars(table).values()) == {()}


def test_eight_callbacks_that_do_nothing_add_no_python_call_to_a_run(tmp_path: Path) -> None:
    def calls(callbacks: list[Callback]) -> int:
        run = FakeRun(callbacks, tmp_path)
        run.hooks = HookTable(run.callbacks, run.task)
        count = 0

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            run._step(None)
        finally:
            sys.setprofile(None)
        return count

    assert calls([]) == calls([Quiet() for _ in range(8)])


def test_an_inherited_hook_counts_as_overridden() -> None:
    class Child(Noting):
        """Inherits the hook."""

    assert overrides(Child("a", []), "on_train_epoch_start", Callback)
    assert not overrides(Child("a", []), "on_train_epoch_end", Callback)


def test_an_event_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="on_train_epoch_ends"):
        _ = HookTable([], Task()).on_train_epoch_ends


@pytest.mark.parametrize(
    "name", ["helper", "_on_train_epoch_ends", "step_size", "on_something_of_my_own", "compute_loss"]
)
def test_methods_of_the_user_s_own_are_let_through(name: str) -> None:
    check_hook_names(type("Mine", (Callback,), {name: lambda self: None})(), Callback, EVENTS)
    check_hook_names(type("Mine", (Task,), {name: lambda self: None})(), TaskModule, KNOWN_TASK_HOOKS)


def test_every_hook_of_a_task_with_an_event_s_name_has_its_arguments_less_two() -> None:
    import inspect

    for event in set(EVENTS) & set(vars(TaskHooks)) - {"setup", "teardown"}:
        of_callback = list(inspect.signature(getattr(Callback, event)).parameters)
        of_task = list(inspect.signature(getattr(TaskHooks, event)).parameters)
        assert of_callback[3:] == of_task[1:], event
