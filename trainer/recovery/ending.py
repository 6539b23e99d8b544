"""End a stage, however it has ended: report its error, and let go of all that it held."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from trainwright.callbacks.callback import log_through
from trainwright.core.errors import TrainwrightWarning
from trainwright.loggers.logger import Status
from trainwright.trainer import profiling
from trainwright.trainer.checkpoints import safe_point
from trainwright.trainer.recovery.failure import note_missing_weights, note_training_batch
from trainwright.trainer.run import StageRun


def report_error(run: StageRun, error: BaseException) -> Exception | None:
    """Call `on_exception` of every callback and of the data module; nothing here may hide the error.

    Returns:
        What they received instead if the engine has a clearer error, to be raised from `error`; or None.
    """
    if not run.is_set_up:
        return None
    note_training_batch(run, error)
    note_missing_weights(run, error)
    clearer = run.engine.explain_error(error, run.task)
    told = clearer or error
    listeners: list[Callable[[], Any]] = [partial(hook, run.trainer, run.task, told) for hook in run.hooks.on_exception]
    if run.datamodule is not None:
        listeners.append(partial(run.datamodule.on_exception, told))
    for listener in listeners:
        try:
            listener()
        except Exception as second:  # noqa: BLE001  # reported; the first error is the one to raise
            warnings.warn(
                f"on_exception itself failed: {type(second).__name__}: {second}", TrainwrightWarning, stacklevel=2
            )
    return clearer


def tear_down(run: StageRun, status: Status) -> None:
    """Undo what a stage has set up, in this order; what fails, or is interrupted, keeps nothing else from being done.

    Args:
        run: whose stage ends.
        status: `"success"`, `"failed"` or `"interrupted"`, for the loggers.
    """
    stage = run.stage or "fit"
    with ExitStack() as last_first:
        last_first.callback(partial(_leave, run))
        last_first.callback(profiling.end, run)
        if run.logging is not None:
            last_first.callback(partial(run.logging.finish, status))
        if run.is_set_up:
            last_first.callback(run.task.teardown, stage)
            last_first.callback(run.fire, "teardown", stage)
            if run.datamodule is not None:
                last_first.callback(run.datamodule.teardown, stage)
        last_first.callback(safe_point.close, run)
        last_first.callback(partial(run.data.close, keep_state=status != "failed"))


def _leave(run: StageRun) -> None:
    run.task._sink = None
    log_through(None, run.callbacks)
    run.stage = None
    run.engine.close()
