"""Start a stage's loggers, log hyper-parameters and the task's graph, and record the start of the stage."""

from __future__ import annotations

import copy
import os
import platform
import sys
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.core.hyperparameters import differ, kept_and_left_out
from trainwright.core.run import Stage
from trainwright.core.tree import full_numel
from trainwright.loggers.logger import RunInfo
from trainwright.loggers.run_record import code_version, package_versions
from trainwright.trainer.planning.forecast import data_types
from trainwright.trainer.planning.setting_sources import as_data, planned_settings
from trainwright.trainer.run import StageRun


def start_loggers(run: StageRun, stage: Stage) -> None:
    """Start the loggers, except in the stage `"predict"`.

    Called after the checkpoint of a resumed run is loaded, because loggers continue the checkpoint's run.
    """
    if stage != "predict" and run.logs.group is not None:
        run.logs.group.start(RunInfo(run.settings.root))
        if run.logs.group.record is not None:
            run.note(stage, **_facts(run, run.logs.group.record.folder))


def _facts(run: StageRun, folder: Path) -> dict[str, Any]:
    """Return the code, environment, settings and folders of a run. Paths are relative to the folder of its record."""
    selection = run.settings.selection
    outline = selection.strategy.outline(None, selection.settings)
    settings = planned_settings(run.settings)
    logs = [logger.log_dir for logger in run.settings.loggers if logger.log_dir is not None]
    script = Path(sys.argv[0] or ".").absolute()
    is_own = script.suffix == ".py" and script.name != "__main__.py"  # not the command line of a package
    owners = [owner for owner in (run.data.datamodule, run.task) if owner is not None]
    return {
        "run_id": run.history.run_id,
        "resumed_from": None if run.resume.origin is None else str(run.resume.origin),
        "task": type(run.task).__qualname__,
        "parameters": sum(full_numel(parameter) for parameter in run.task.parameters()),
        "settings": {name: [setting.value, setting.source] for name, setting in settings.items()},
        "hyperparameters": {k: v for owner in owners for k, v in kept_and_left_out(owner.hparams)[0].items()},
        "strategy": type(selection.strategy).__name__,
        "options": as_data(selection.strategy.changed_options),
        "mesh": {name: length for name, length in outline.mesh.lengths.items() if length > 1},
        "precision": data_types(run.task, selection.settings.precision, outline, run.engine.processes.world_size),
        "device": str(run.engine.device),
        "processes": run.engine.processes.world_size,
        "seed": run.history.seed,
        "callbacks": [type(callback).__name__ for callback in run.components.callbacks],
        "loggers": [type(logger).__name__ for logger in run.settings.loggers],
        "folders": {
            "logs": [os.path.relpath(path, folder) for path in logs],
            "checkpoints": os.path.relpath(run.checkpoint_dir, folder),
        },
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "code": code_version(script.parent if is_own and script.is_file() else Path.cwd()),
        "python": platform.python_version(),
        "host": platform.node(),
        "platform": platform.platform(),
        "packages": package_versions(),
    }


def begin_fit(run: StageRun) -> None:
    """Call `on_fit_start`, then restore optimizers that wait for it, and log hyper-parameters and the graph."""
    run.fire("on_fit_start")
    restore, run.loop.restore_after_fit_start = run.loop.restore_after_fit_start, None
    if restore is not None:
        restore()
    _describe(run, hyperparameters=run.settings.arguments.enable_autolog_hparams)


def _describe(run: StageRun, *, hyperparameters: bool) -> None:
    """Log the task's graph and, if enabled, the hyper-parameters of the task and the data module.

    Called after `on_fit_start`, where callbacks such as BatchSizeFinder may set hyper-parameters.
    """
    if run.logs.group is None or not run.logs.group.loggers:
        return
    found: dict[str, Any] = {}
    for owner in (run.data.datamodule, run.task):
        if owner is None or not owner._hparams_log or not hyperparameters:
            continue
        for name, value in kept_and_left_out(owner.hparams)[0].items():
            # `found` has the data module's values here, and loggers hold one value under a name.
            if name in found and differ(found[name], value):
                raise ConfigurationError(
                    f"{type(run.task).__name__} and {type(run.data.datamodule).__name__} both have the hyper-parameter "
                    f"{name}: {value!r} and {found[name]!r}. Rename one, or pass logger=False to save_hyperparameters "
                    "of one of them."
                )
            found[name] = copy.deepcopy(value)
    if found:
        run.logs.group.log_hyperparams(found)
    run.logs.group.log_graph(run.task, run.task.example_input_array)
