"""Start a stage's loggers and hand them what is known before the first step: hyper-parameters and the task's graph."""

from __future__ import annotations

import copy
from typing import Any

from trainwright.core.hyperparameters import kept_and_left_out
from trainwright.core.run import Stage
from trainwright.loggers.logger import RunInfo
from trainwright.trainer.run import StageRun


def start_loggers(run: StageRun, stage: Stage) -> None:
    """Start the loggers, after a checkpoint told them which run they continue; not for predictions."""
    if stage != "predict" and run.logging is not None:
        run.logging.start(RunInfo(run.settings.root))


def begin_fit(run: StageRun) -> None:
    """Fire `on_fit_start`, restore what had to wait for it, and tell loggers what callbacks have settled there."""
    run.fire("on_fit_start")
    restore, run.loop.restore_after_fit_start = run.loop.restore_after_fit_start, None
    if restore is not None:
        restore()
    _describe(run, hyperparameters=run.arguments.enable_autolog_hparams)


def _describe(run: StageRun, *, hyperparameters: bool) -> None:
    """Hand the loggers the task's graph and, unless switched off, the hyper-parameters that the fit begins with.

    Those of the task and the data module, as they are once `on_fit_start` has run: a search may have set some.
    """
    if run.logging is None:
        return
    found: dict[str, Any] = {}
    for owner in (run.datamodule, run.task):
        if owner is not None and owner._hparams_log:
            found |= copy.deepcopy(kept_and_left_out(owner.hparams)[0])
    if found and hyperparameters:
        run.logging.log_hyperparams(found)
    run.logging.log_graph(run.task, run.task.example_input_array)
