"""Assembly of a run's callbacks from the user's, the task's and the default ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.callbacks.callback import Callback
from trainwright.callbacks.roles import Saver
from trainwright.core.errors import ConfigurationError
from trainwright.core.signatures import method_of
from trainwright.core.task import TaskModule
from trainwright.trainer.configuration.checks import check_callbacks


def given_callbacks(callbacks: object) -> list[Any]:
    """Return the `callbacks=` argument as a list."""
    if callbacks is None:
        return []
    if isinstance(callbacks, Sequence):
        return list(callbacks)
    return [callbacks]


def savers_last(callbacks: list[Any]) -> list[Any]:
    """Return the callbacks with each `ModelCheckpoint` last, so that it receives metrics that others log before it."""
    # `sorted` is stable: False comes before True, and the order is otherwise unchanged.
    return sorted(callbacks, key=lambda callback: isinstance(callback, Saver))


def default_callbacks(
    given: list[Any],
    *,
    enable_checkpointing: bool | None,
    enable_progress_bar: bool | None,
    enable_model_summary: bool | None,
    quiet: bool,
) -> list[Any]:
    """Return the default callbacks that the user has neither passed nor disabled.

    Args:
        given: the user's callbacks.
        enable_checkpointing: add a ModelCheckpoint. Default with None: `not quiet`.
        enable_progress_bar, enable_model_summary: add the callback. Default with None: True.
        quiet: `fast_dev_run` or `barebones` is set.

    Raises:
        ConfigurationError: a callback was both passed and disabled.
    """
    from trainwright.callbacks.model_checkpoint import ModelCheckpoint
    from trainwright.callbacks.model_summary import ModelSummary
    from trainwright.callbacks.progress_bar import ProgressBar
    from trainwright.callbacks.tqdm_progress_bar import TQDMProgressBar

    # The argument and its value; the class of the user's callbacks that replace the default; the default callback, and
    # whether it is added if the argument is None.
    choices: list[tuple[str, bool | None, type, Any, bool]] = [
        ("enable_checkpointing", enable_checkpointing, ModelCheckpoint, ModelCheckpoint, not quiet),
        ("enable_model_summary", enable_model_summary, ModelSummary, ModelSummary, True),
        ("enable_progress_bar", enable_progress_bar, ProgressBar, TQDMProgressBar, True),
    ]
    defaults: list[Any] = []
    for name, switch, kind, make_default, by_default in choices:
        users = [callback for callback in given if isinstance(callback, kind)]
        if users and switch is False:
            raise ConfigurationError(
                f"{name}=False, but callbacks contains a {type(users[0]).__name__}. Remove one of the two."
            )
        is_enabled = by_default if switch is None else switch
        if is_enabled and not users:
            defaults.append(make_default())
    return defaults


def with_task_callbacks(callbacks: list[Callback], task: TaskModule) -> list[Callback]:
    """Return the callbacks with those of the task's `configure_callbacks`.

    These replace the Trainer's callbacks of the same type.

    Raises:
        ConfigurationError: see `check_callbacks`.
    """
    of_task = given_callbacks(method_of(task, "configure_callbacks")())
    if not of_task:
        return callbacks
    replaced_types = {type(callback) for callback in of_task}
    remaining = [callback for callback in callbacks if type(callback) not in replaced_types]
    merged = savers_last(remaining + of_task)
    check_callbacks(merged)
    return merged
