"""Computation of a fit's plan, for `Trainer.plan`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.core.signatures import method_of
from trainwright.core.task import TaskModule
from trainwright.data.datamodule import DataModule
from trainwright.processes.devices import peak_memory
from trainwright.strategies.strategy import StrategyOutline
from trainwright.trainer.configuration.assembly import with_task_callbacks
from trainwright.trainer.configuration.checks import check_callbacks, check_needs
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.data import Sources
from trainwright.trainer.planning.forecast import (
    batch_counts,
    built_task,
    data_types,
    forecast_bytes,
    parameter_counts,
)
from trainwright.trainer.planning.run_plan import Plan
from trainwright.trainer.planning.setting_sources import as_data, planned_settings
from trainwright.trainer.run import StageRun


@contextmanager
def set_up_data(data: DataModule, trainer: object) -> Iterator[None]:
    """Set up a data module for a fit, and tear it down at the end, also after an error in between."""
    former = data.trainer
    data.trainer = trainer
    try:
        method_of(data, "prepare_data")()
        method_of(data, "setup")("fit")
        try:
            yield
        finally:
            method_of(data, "teardown")("fit")
    finally:
        data.trainer = former


def plan_fit(settings: Settings, last_run: StageRun, task: TaskModule, sources: Sources, *, is_set_up: bool) -> Plan:
    """Return the plan of a fit.

    Args:
        settings: the Trainer's settings.
        last_run: its last stage, which has measured the peak memory if it was a fit of the task.
        task: the task, which is not changed.
        sources: the loaders and the data module.
        is_set_up: True if the data module is set up, so that a batch can be read.
    """
    notes: list[str] = []
    selection = settings.selection
    engine = selection.settings
    started_by: str = selection.topology.launcher
    if started_by == "none":  # no launcher's variables were found
        started_by = "this process" if selection.runs_alone else "the Trainer"
    callbacks = with_task_callbacks(settings.callbacks, task)
    check_callbacks(callbacks, "fit")
    check_needs(callbacks, selection)
    built = built_task(task, engine.precision, notes)
    outline = selection.strategy.outline(built, engine)
    # Ranks along `cp` read the same samples and reduce gradients like ranks with other samples.
    num_readers = outline.mesh.dp_replicate * outline.mesh.dp_shard
    num_data_ranks = num_readers * outline.mesh.cp
    memory: dict[str, int | str | None] = {
        "forecast_bytes": forecast_bytes(built, engine.precision, outline, engine.device_type, notes),
        "forecast_of": "weights, gradients and Adam's averages on one device, without activations",
    }
    return Plan(
        settings=planned_settings(settings),
        strategy=_strategy_facts(settings, None if built is None else outline),
        processes={
            "count": engine.num_processes,
            "started_by": started_by,
            "device": engine.device_type,
            "data_ranks": num_readers,
            "mesh": {name: length for name, length in outline.mesh.lengths.items() if length > 1},
        },
        precision=data_types(built, engine.precision, outline, num_data_ranks),
        parameters=parameter_counts(built, outline.shards),
        memory=memory | _peak(last_run, task),
        data=batch_counts(settings, task, sources, num_readers, notes, is_set_up=is_set_up),
        callbacks=[type(each).__name__ for each in callbacks],
        loggers=[type(each).__name__ for each in settings.loggers],
        notes=notes,
    )


def _strategy_facts(settings: Settings, outline: StrategyOutline | None) -> dict[str, Any]:
    strategy = settings.selection.strategy
    """Return the content of `Plan.strategy`. Units are unknown without an outline."""
    facts = {
        "name": type(strategy).__name__,
        "options": as_data(strategy.changed_options),
        "units": None,
        "unit_classes": None,
    }
    if outline is not None:
        facts["units"] = len(outline.units)
        facts["unit_classes"] = sorted({type(unit).__name__ for unit in outline.units})
    return facts


def _peak(run: StageRun, task: TaskModule) -> dict[str, int | str | None]:
    """Return the peak memory of this process, if it has trained the task."""
    if not run.loop.trains or run.task is not task:
        return {}
    device = run.engine.device
    peak = peak_memory(device)
    if peak is None:
        return {}
    if device.type == "cpu":
        return {"peak_bytes": peak, "peak_of": "all host memory of this process since its start"}
    return {"peak_bytes": peak, "peak_of": f"tensors on {device} in this process"}
