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
    """Move each `ModelCheckpoint` to the end, so that it receives metrics that others log at the same event."""
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

    wanted: list[tuple[str, bool | None, type, Any, bool]] = [
        ("enable_checkpointing", enable_checkpointing, ModelCheckpoint, ModelCheckpoint, not quiet),
        ("enable_model_summary", enable_model_summary, ModelSummary, ModelSummary, True),
        ("enable_progress_bar", enable_progress_bar, ProgressBar, TQDMProgressBar, True),
    ]
    found: list[Any] = []
    for name, switch, kind, make, by_default in wanted:
        has = [callback for callback in given if isinstance(callback, kind)]
        if has and switch is False:
            raise ConfigurationError(
                f"{name}=False, but callbacks contains a {type(has[0]).__name__}. Remove one of the two."
            )
        if not has and (by_default if switch is None else switch):
            found.append(make())
    return found


def with_task_callbacks(callbacks: list[Callback], task: TaskModule) -> list[Callback]:
    """Add the callbacks of `configure_callbacks`. They replace the Trainer's callbacks of the same type.

    Raises:
        ConfigurationError: see `check_callbacks`.
    """
    own = given_callbacks(method_of(task, "configure_callbacks")())
    if not own:
        return callbacks
    types = {type(callback) for callback in own}
    found = savers_last([callback for callback in callbacks if type(callback) not in types] + own)
    check_callbacks(found)
    return found
