"""End a stage, however it has ended: report its error, and let go of all that it held."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from trainwright.callbacks.callback import log_through
from trainwright.core.errors import TrainwrightWarning
from trainwright.core.run import Stage
from trainwright.trainer.facts import RunFacts
from trainwright.trainer.failure import note_training_batch


def tell_about(run: RunFacts, error: BaseException) -> Exception | None:
    """Call `on_exception` of every callback and of the data module; nothing here may hide the error.

    Returns:
        What they were told of instead where the strategy has a clearer error, to be raised from `error`; or None.
    """
    if not run._is_set_up:
        return None
    note_training_batch(run, error)
    clearer = run.strategy.clearer(error, run.task)
    told = clearer or error
    listeners: list[Callable[[], Any]] = [partial(hook, run, run._task, told) for hook in run.hooks.on_exception]
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


def tear_down(run: RunFacts, stage: Stage, status: Any) -> None:
    """Undo what a stage has set up, in this order; what fails, or is interrupted, keeps nothing else from being done.

    Args:
        run: the Trainer.
        stage: the stage that ends.
        status: `"success"`, `"failed"` or `"interrupted"`, for the loggers.
    """
    with ExitStack() as last_first:
        last_first.callback(partial(_leave, run))
        if run.logging is not None:
            last_first.callback(partial(run.logging.finish, status))
        if run._is_set_up:
            last_first.callback(run.task.teardown, stage)
            last_first.callback(run.fire, "teardown", stage)
            if run.datamodule is not None:
                last_first.callback(run.datamodule.teardown, stage)
        last_first.callback(run.safe_point.close)
        last_first.callback(partial(_close_loaders, run, keep_state=status != "failed"))


def _close_loaders(run: RunFacts, *, keep_state: bool) -> None:
    """End loader workers: the traceback of an error, or a Trainer that is kept, would keep them too."""
    if run._train_data is not None and keep_state:
        run._train_data.keep_state()
    run.workers.close()
    if run._train_data is not None:
        run._train_data.close()
    for data in run._eval_data.values():
        data.close()


def _leave(run: RunFacts) -> None:
    run.task._sink = None
    log_through(None, run.callbacks)
    run.stage = None
    run.strategy.teardown()
