"""Start a stage's loggers and log hyper-parameters and the task's graph."""

from __future__ import annotations

import copy
from typing import Any

from trainwright.core.hyperparameters import kept_and_left_out
from trainwright.core.run import Stage
from trainwright.loggers.logger import RunInfo
from trainwright.trainer.run import StageRun


def start_loggers(run: StageRun, stage: Stage) -> None:
    """Start the loggers, except for predictions. Restore a checkpoint first, so that they continue its run."""
    if stage != "predict" and run.logging is not None:
        run.logging.start(RunInfo(run.settings.root))


def begin_fit(run: StageRun) -> None:
    """Call `on_fit_start`, then restore optimizers that wait for it, and log hyper-parameters and the graph."""
    run.fire("on_fit_start")
    restore, run.loop.restore_after_fit_start = run.loop.restore_after_fit_start, None
    if restore is not None:
        restore()
    _describe(run, hyperparameters=run.arguments.enable_autolog_hparams)


def _describe(run: StageRun, *, hyperparameters: bool) -> None:
    """Log the task's graph and, if enabled, the hyper-parameters of the task and the data module.

    Called after `on_fit_start`, where a search may set hyper-parameters.
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
