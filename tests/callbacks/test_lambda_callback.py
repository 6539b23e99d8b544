"""LambdaCallback: functions at events."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.callbacks.fake_run import FakeRun
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.hook_table import HookTable
from trainwright.callbacks.lambda_callback import LambdaCallback
from trainwright.core.errors import ConfigurationError


def test_its_functions_are_called_with_the_event_s_arguments(tmp_path: Path) -> None:
    seen = []
    callback = LambdaCallback(
        setup=lambda trainer, task, stage: seen.append(stage),
        on_train_epoch_end=lambda trainer, task: seen.append(trainer.state.step),
    )
    FakeRun([callback], tmp_path).fit(epochs=2, batches=3)
    assert seen == ["fit", 3, 6]


def test_only_the_given_events_have_a_listener(tmp_path: Path) -> None:
    run = FakeRun([], tmp_path)
    table = HookTable([LambdaCallback(on_fit_end=print)], run.task)
    assert [name for name, listeners in vars(table).items() if listeners] == ["on_fit_end"]


def test_an_unknown_event_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'on_train_epoch_end'"):
        LambdaCallback(on_train_epoch_ends=print)


def test_a_value_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected a function"):
        LambdaCallback(on_fit_end=3)  # type: ignore[arg-type]


def test_two_of_them_do_not_share_their_functions() -> None:
    first, second = LambdaCallback(on_fit_end=print), LambdaCallback()
    assert "on_fit_end" in vars(first)
    assert second.on_fit_end.__func__ is Callback.on_fit_end  # type: ignore[attr-defined]
