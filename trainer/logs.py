"""The logged values of a stage and their receivers: loggers, callbacks and the progress bar."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.core.hyperparameters import differ, kept_and_left_out
from trainwright.core.metric_value import MetricValue, as_values
from trainwright.core.run import Stage
from trainwright.core.task import TaskModule
from trainwright.data.datamodule import DataModule
from trainwright.loggers.evaluation_rows import Rows
from trainwright.loggers.logger import RunInfo, Status
from trainwright.loggers.logger_group import LoggerGroup
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.loggers.metric_values import Exchange, Flushed
from trainwright.strategies.engine import Engine
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.evaluation_state import EvaluationState
from trainwright.trainer.fit_warnings import FitWarnings
from trainwright.trainer.hooks import StageHooks
from trainwright.trainer.loop_state import LoopState, progress_facts
from trainwright.trainer.run_state import RunProgress


@dataclass(slots=True)
class ShownMetrics:
    """The latest value of every metric, read from the device.

    Attributes:
        callback, logged, progress_bar: the values of `callback_metrics`, `logged_metrics` and `progress_bar_metrics`.
    """

    callback: dict[str, MetricValue] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)
    progress_bar: dict[str, float] = field(default_factory=dict)

    def show(self, flushed: Flushed) -> None:
        """Replace the values of the metrics in `flushed`. Other metrics keep their latest values."""
        self.callback.update(flushed.callback)
        self.logged.update(flushed.logged)
        self.progress_bar.update(flushed.prog_bar)

    def load(self, metrics: Mapping[str, float]) -> None:
        """Restore `callback_metrics` from a checkpoint. Callbacks and schedules read them."""
        self.callback = as_values(metrics)


class Logs:
    """Logged values of a stage and their receivers.

    Args:
        settings: provides the loggers and the check of losses.
        engine: provides devices and ranks.
        hooks: the task and the callbacks.
        progress: provides the training progress.
        loop: provides the result of the last step.
        evaluation: the running evaluation. A sanity check logs nothing.
        stage: the stage, or None.
        is_trial: discard all values, for trial steps.

    Attributes:
        metrics: receives the values that tasks and callbacks log, and holds them on the device until a flush.
        shown: the latest values read from `metrics`.
        group: the group of loggers; None before `make_group`.
        exchange: gathers small host objects over data ranks; None for one process. `StageRun.join` sets it.
        warnings: warnings that a fit issues once.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        hooks: StageHooks,
        progress: RunProgress,
        loop: LoopState,
        evaluation: EvaluationState,
        stage: Stage | None,
        *,
        is_trial: bool,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._hooks = hooks
        self._progress = progress
        self._loop = loop
        self._evaluation = evaluation
        self._stage = stage
        self._is_trial = is_trial
        self.metrics = MetricBuffer()
        self.shown = ShownMetrics()
        self.group: LoggerGroup | None = None
        self.exchange: Exchange | None = None
        self.warnings = FitWarnings(engine)

    # Loggers

    def make_group(self) -> None:
        """Create the group of loggers. On other ranks than the main rank, and in trials, they are muted."""
        is_main = self._engine.is_main and not self._is_trial
        self.group = LoggerGroup(self._settings.loggers, is_main=is_main)

    def start(self, facts: Callable[[Path], dict[str, Any]]) -> None:
        """Start the loggers, except in the stage `"predict"`, and record the start of the stage.

        Call it after the checkpoint of a resumed run is loaded, because loggers continue the checkpoint's run.

        Args:
            facts: returns the facts of the run for its record, whose folder it receives.
        """
        if self._stage == "predict" or self.group is None:  # a prediction logs nothing
            return
        self.group.start(RunInfo(self._settings.root))
        if self.group.record is not None:
            self.record_event(self._stage or "fit", **facts(self.group.record.folder))

    def finish(self, status: Status) -> None:
        """Record the end of the stage and finish the loggers, if `make_group` was called."""
        if self.group is None:
            return
        try:
            self.record_event("end", stage=self._stage or "fit", status=status)
        finally:
            self.group.finish(status)

    def describe_task(self, datamodule: DataModule | None) -> None:
        """Log the task's graph and, if enabled, the hyper-parameters of the task and the data module.

        Call it after `on_fit_start`, where callbacks such as BatchSizeFinder may set hyper-parameters.

        Raises:
            ConfigurationError: the task and the data module have different values under one name.
        """
        if self.group is None or not self.group.loggers:
            return
        task = self._hooks.task
        if self._settings.arguments.enable_autolog_hparams:
            hyperparameters = _hyperparameters(task, datamodule)
            if hyperparameters:
                self.group.log_hyperparams(hyperparameters)
        self.group.log_graph(task, task.example_input_array)

    def record_event(self, event: str, **facts: object) -> None:
        """Add an event to the run's record, if there is one: on the main rank, with a logger. Not collective."""
        if self.group is not None and self.group.record is not None:
            self.group.record.add(event, self._progress.state.step, facts)

    # Values

    @property
    def callback_metrics(self) -> Mapping[str, MetricValue]:
        """The latest value of every logged metric; see `Run.callback_metrics`. Waits for the device if it is new."""
        self._show_new()
        return self.shown.callback

    @property
    def logged_metrics(self) -> Mapping[str, MetricValue]:
        """The latest value of every metric that goes to the loggers. Waits for the device if it is new."""
        self._show_new()
        return as_values(self.shown.logged)

    @property
    def progress_bar_metrics(self) -> Mapping[str, float]:
        """The latest value of every metric logged with `prog_bar=True`; see `Run.progress_bar_metrics`."""
        # Within a step, the progress bar would wait for the device at each of its updates.
        if not self.metrics.in_step:
            self._show_new()
        return self.shown.progress_bar

    def _show_new(self) -> None:
        """Show the values that were logged since the last call.

        Does nothing in a sanity check, or while an exception is handled, also in an `except` block of a hook: after an
        error the device may be unusable.
        """
        handles_error = sys.exc_info()[0] is not None
        if not self._evaluation.sanity_checking and not handles_error:
            self.shown.show(self.metrics.peek_new())

    def show_pending(self) -> None:
        """Show the values that were logged since the last flush, which the next flush returns again. Waits for the
        device.
        """
        self.shown.show(self.metrics.peek())

    def log_metric(self, name: str, value: object, options: Mapping[str, Any]) -> None:
        """Log a value of a callback; see `TaskModule.log` for the options."""
        self.metrics.log(name, value, **options)

    def log_now(self, metrics: Mapping[str, float], epoch: int | None = None) -> None:
        """Send numbers to the loggers at the index of the last completed step. Only the main rank logs them.

        Within a fit this index is 0-based. `validate` and `test` log at the number of completed steps, which is after
        all values of the fit.

        Args:
            metrics: numbers by name. A finite number under `"step"` is the x-value of the others.
            epoch: 0-based epoch to log with them. Default: None, the current epoch.
        """
        state = self._progress.state
        follows_fit = self._stage in ("validate", "test")
        step = state.step if follows_fit else max(state.step - 1, 0)
        has_x_value = math.isfinite(metrics.get("step", math.nan))
        if has_x_value:
            metrics = dict(metrics)
            step = int(metrics.pop("step"))
        self.shown.logged.update(metrics)
        if self.group is not None and metrics:
            epoch = state.epoch if epoch is None else epoch
            self.group.log_metrics({**metrics, "epoch": epoch}, step)

    def log_evaluation_steps(self, rows: Rows, kind: str) -> None:
        """Send numbers of evaluation steps to the loggers. Only the main rank logs them.

        Args:
            rows: numbers by name, by the index of the evaluation step.
            kind: the kind of evaluation.
        """
        for step, row in rows.items():
            self.shown.logged.update(row)
            if self.group is not None:
                self.group.log_evaluation_step({**row, "epoch": self._progress.state.epoch}, step, kind)

    def show_now(self, metrics: Mapping[str, float]) -> None:
        """Add numbers to `callback_metrics`."""
        self.shown.callback.update(as_values(metrics))

    def take(self, flushed: Flushed, kind: str, epoch: int | None = None) -> None:
        """Pass metrics that were read from the device to callbacks and loggers. Sanity checks and trials discard them.

        Args:
            flushed: the metrics.
            kind: `"train"`, or the kind of evaluation that logged them.
            epoch: 0-based epoch to log with them. Default: None, the current epoch.
        """
        if self._evaluation.sanity_checking or self._is_trial:
            return
        if kind == "train" and self._settings.arguments.on_nonfinite is None:  # otherwise `non_finite` handles it
            manual = not self._hooks.task.automatic_optimization
            self.warnings.bad_loss(flushed.callback, self._progress.state.step, manual=manual)
        self.shown.show(flushed)
        if flushed.logged and kind != "predict":
            self.log_now(flushed.logged, epoch)

    def flush_step(self, epoch: int | None = None) -> None:
        """Read the metrics of training steps from the device and pass them to callbacks and loggers. Collective."""
        last_step = self._loop.last_step if self._settings.loggers else None
        flushed = self.metrics.flush_step(self.exchange, last_step)
        self.take(flushed, "train", epoch)
        if self.group is not None and self.group.record is not None:
            self.record_event("progress", **flushed.last_step, **progress_facts(self._progress.state, self._engine))


def _hyperparameters(task: TaskModule, datamodule: DataModule | None) -> dict[str, Any]:
    """Return the hyper-parameters to log of the task and the data module.

    Raises:
        ConfigurationError: they have different values under one name, of which loggers could hold only one.
    """
    merged: dict[str, Any] = {}
    for owner in (datamodule, task):
        if owner is None or not owner._hparams_log:
            continue
        hyperparameters, _ = kept_and_left_out(owner.hparams)
        for name, value in hyperparameters.items():
            # A name in `merged` is the data module's, because names of one owner are unique.
            if name in merged and differ(merged[name], value):
                raise ConfigurationError(
                    f"{type(task).__name__} and {type(datamodule).__name__} both have the hyper-parameter "
                    f"{name}: {value!r} and {merged[name]!r}. Rename one, or pass logger=False to save_hyperparameters "
                    "of one of them."
                )
            merged[name] = copy.deepcopy(value)
    return merged
