"""Start a stage's loggers and hand them what is known before the first step: hyper-parameters and the task's graph."""

from __future__ import annotations

from typing import Any

from trainwright.core.run import Stage
from trainwright.loggers.logger import RunInfo
from trainwright.trainer.facts import RunFacts


def start_loggers(run: RunFacts, stage: Stage, *, hyperparameters: bool) -> None:
    """Start the loggers, after a checkpoint told them which run they continue; not for predictions.

    Args:
        run: its loggers, task and data module.
        stage: what begins.
        hyperparameters: hand those of the task and the data module to the loggers when a fit begins.
    """
    if stage == "predict" or run.logging is None:
        return
    run.logging.start(RunInfo(run.default_root_dir))
    if stage != "fit":
        return
    found: dict[str, Any] = {}
    for owner in (run.datamodule, run.task):
        if owner is not None and getattr(owner, "_hparams_log", True):
            found |= owner.hparams_initial
    if found and hyperparameters:
        run.logging.log_hyperparams(found)
    run.logging.log_graph(run.task, run.task.example_input_array)
