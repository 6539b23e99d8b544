"""The plan of a fit: `Trainer.plan`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from trainwright.checkpoint.run_folder import OnDamaged
from trainwright.core.errors import ConfigurationError
from trainwright.core.names.known_arguments import known_arguments
from trainwright.core.rng import isolate_rng
from trainwright.core.signatures import method_of
from trainwright.core.task import TaskModule
from trainwright.data.datamodule import DataModule
from trainwright.processes.devices import peak_memory
from trainwright.strategies.strategy import StrategyOutline
from trainwright.trainer.checkpoints.load_request import LoadRequest
from trainwright.trainer.configuration.argument_checks import refuse_of_verb
from trainwright.trainer.configuration.assembly import with_task_callbacks
from trainwright.trainer.configuration.checks import check_callbacks, check_needs, one_task
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
from trainwright.trainer.stage import check_stage


class Planner:
    """The part of a Trainer that plans a fit."""

    settings: Settings
    run: StageRun

    @known_arguments(partial(refuse_of_verb, "plan"))
    def plan(
        self,
        task: TaskModule | None = None,
        train_dataloaders: object = None,
        val_dataloaders: object = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        *,
        model: TaskModule | None = None,
        load_weights_only: bool = False,
        strict: bool | None = None,
        allow_missing: Iterable[str] = (),
        on_damaged: OnDamaged | None = None,
        setup_data: bool = False,
    ) -> Plan:
        """Return what `fit` with the same arguments will do, without training. Not collective.

        The task is not changed: a task with `configure_model` is built as a copy on the device `meta`. By default, no
        process is started, no file is written, and no `setup` or `prepare_data` is called. If the data module or task
        with the loaders defines one of these methods, its batches are not known: pass loaders, or `setup_data=True`
        for a data module.

        Args:
            setup_data: call `prepare_data`, `setup` and `teardown` of the data module, which may download and write
                files, and read one batch. Default: False.

        Raises:
            ConfigurationError, FileNotFoundError, CheckpointError: as in `fit`, before devices are used.
            ConfigurationError: `setup_data=True` without a data module.
        """
        task = one_task("fit", task, model)
        sources = Sources.of("fit", datamodule, train=train_dataloaders, validate=val_dataloaders)
        load = LoadRequest.checked(
            ckpt_path, weights_only=load_weights_only, strict=strict, allow_missing=allow_missing, on_damaged=on_damaged
        )
        with isolate_rng():
            check_stage(self.settings, "fit", task, sources, load)
            if not setup_data:
                return _plan(self, task, sources, is_set_up=False)
            if sources.datamodule is None:
                raise ConfigurationError(
                    "plan(setup_data=True) sets up a data module, and there is none. Pass a data module, or remove "
                    "setup_data."
                )
            with _set_up(sources.datamodule, self):
                return _plan(self, task, sources, is_set_up=True)


@contextmanager
def _set_up(data: DataModule, trainer: object) -> Iterator[None]:
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


def _plan(planner: Planner, task: TaskModule, sources: Sources, *, is_set_up: bool) -> Plan:
    settings = planner.settings
    notes: list[str] = []
    selection = settings.selection
    engine = selection.settings
    callbacks = with_task_callbacks(settings.callbacks, task)
    check_callbacks(callbacks, "fit")
    check_needs(callbacks, selection)
    built = built_task(task, engine.precision, notes)
    outline = selection.strategy.outline(built, engine)
    # Ranks along `cp` read the same samples and reduce gradients like ranks with other samples.
    num_readers = outline.mesh.dp_replicate * outline.mesh.dp_shard
    num_data_ranks = num_readers * outline.mesh.cp
    started_by = "this process" if selection.runs_alone else "the Trainer"
    memory: dict[str, int | str | None] = {
        "forecast_bytes": forecast_bytes(built, engine.precision, outline, engine.device_type, notes),
        "forecast_of": "weights, gradients and Adam's averages on one device, without activations",
    }
    return Plan(
        settings=planned_settings(settings),
        strategy=_strategy_facts(settings, None if built is None else outline),
        processes={
            "count": engine.num_processes,
            "started_by": started_by if selection.topology.launcher == "none" else selection.topology.launcher,
            "device": engine.device_type,
            "data_ranks": num_readers,
            "mesh": {name: length for name, length in outline.mesh.lengths.items() if length > 1},
        },
        precision=data_types(built, engine.precision, outline, num_data_ranks),
        parameters=parameter_counts(built, outline.shards),
        memory=memory | _peak(planner.run, task),
        data=batch_counts(settings, task, sources, num_readers, notes, is_set_up=is_set_up),
        callbacks=[type(each).__name__ for each in callbacks],
        loggers=[type(each).__name__ for each in settings.loggers],
        notes=notes,
    )


def _strategy_facts(settings: Settings, outline: StrategyOutline | None) -> dict[str, Any]:
    strategy = settings.selection.strategy
    units = None if outline is None else outline.units
    return {
        "name": type(strategy).__name__,
        "options": as_data(strategy.changed_options),
        "units": None if units is None else len(units),
        "unit_classes": None if units is None else sorted({type(unit).__name__ for unit in units}),
    }


def _peak(run: StageRun, task: TaskModule) -> dict[str, int | str | None]:
    """Return the peak memory of this process, if it has trained the task."""
    if not run.loop.trains or run.task is not task:
        return {}
    device = run.engine.device
    peak = peak_memory(device)
    of = "all host memory of this process since its start"
    if device.type != "cpu":
        of = f"tensors on {device} in this process"
    return {} if peak is None else {"peak_bytes": peak, "peak_of": of}
