"""The state of one stage: fit, validate, test or predict."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.callbacks.callback import Callback
from trainwright.callbacks.hook_table import HookTable
from trainwright.callbacks.roles import ProgressDisplay, Saver
from trainwright.checkpoint.run_folder import RunFolder
from trainwright.core.errors import ConfigurationError, TaskError, TrainwrightWarning
from trainwright.core.metric_value import MetricValue, as_values
from trainwright.core.process import try_output
from trainwright.core.run import Run, SaveRequest, Stage
from trainwright.core.state import StepResult, TrainState
from trainwright.core.task import TaskModule
from trainwright.core.tree import map_tensors
from trainwright.loggers.evaluation_rows import Rows
from trainwright.loggers.logger_group import LoggerGroup
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.loggers.metric_values import Exchange, Flushed
from trainwright.processes.rank_position import Position
from trainwright.profilers.profiler import PassThroughProfiler, Profiler
from trainwright.strategies.engine import Engine
from trainwright.strategies.steps.gradients import GradientClip, parameters_of
from trainwright.strategies.steps.step import ManualStep
from trainwright.trainer.checkpoints.auto_resume import Attempt
from trainwright.trainer.checkpoints.save_queue import SaveQueue
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.data import EvaluationKind, Sources, StageData
from trainwright.trainer.fit_warnings import FitWarnings
from trainwright.trainer.loop_state import LoopState, progress_facts
from trainwright.trainer.optimization import ManualOptimizer, Schedules
from trainwright.trainer.recovery.preemption import Preemption
from trainwright.trainer.run_state import History
from trainwright.trainer.schedule import Stop

CHECKPOINTS = "checkpoints"  # name of the folder of checkpoints


@dataclass(slots=True)
class ShownMetrics:
    """The latest value of every metric.

    Attributes:
        callback, logged, progress_bar: the values of `callback_metrics`, `logged_metrics` and `progress_bar_metrics`.
    """

    callback: dict[str, MetricValue] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)
    progress_bar: dict[str, float] = field(default_factory=dict)

    def show(self, flushed: Flushed) -> None:
        """Show metrics to callbacks and the progress bar."""
        self.callback.update(flushed.callback)
        self.logged.update(flushed.logged)
        self.progress_bar.update(flushed.prog_bar)

    def load(self, metrics: Mapping[str, float]) -> None:
        """Restore the values that callbacks and schedules saw when a checkpoint was written."""
        self.callback = as_values(metrics)


@dataclass(slots=True)
class StageStatus:
    """The progress of a stage from its setup to its end.

    Attributes:
        stage: the stage that is running, or None.
        preemption: received signals.
        is_trial: only trial steps run, without callbacks, loggers and saves.
        is_set_up: calls of `prepare_data` and `setup` have begun, so `teardown` must be called at the end.
        interrupted: Ctrl-C ended the stage.
    """

    stage: Stage | None
    preemption: Preemption
    is_trial: bool
    is_set_up: bool = False
    interrupted: bool = False


@dataclass(slots=True)
class Components:
    """The objects whose methods a stage calls at events.

    Attributes:
        task: the user's task; None before there is one.
        callbacks: callbacks of this stage, including the task's own.
        profiler: records actions of the stage.
        hooks: functions to call at each event.
        is_profiled: the profiler has been set up and not torn down.
    """

    task: TaskModule | None
    callbacks: list[Callback]
    profiler: Profiler
    hooks: HookTable = field(default_factory=HookTable)
    is_profiled: bool = False


@dataclass(slots=True)
class Logs:
    """Logged values and their receivers.

    Attributes:
        fit_warnings: warnings that a fit gives once.
        group: the group of loggers; None before they are set up.
        metrics: receives the values that tasks and callbacks log.
        shown: the latest values read from `metrics`.
        exchange: gathers small host objects over ranks; None for one process.
    """

    fit_warnings: FitWarnings
    group: LoggerGroup | None = None
    metrics: MetricBuffer = field(default_factory=MetricBuffer)
    shown: ShownMetrics = field(default_factory=ShownMetrics)
    exchange: Exchange | None = None


@dataclass(slots=True)
class EvaluationState:
    """Progress of an evaluation.

    Attributes:
        kind: `"validate"`, `"test"` or `"predict"` while an evaluation runs, else None.
        sanity_checking: the validation before training is running.
        batches_done: evaluation batches completed by this rank.
        num_batches: batches of each loader of the current evaluation, on this rank.
        own_objects: metric objects of the task that had no update when the running validation of a fit began. What they
            hold belongs to this validation, which a resume repeats from its start.
    """

    kind: EvaluationKind | None = None
    sanity_checking: bool = False
    batches_done: int = 0
    own_objects: list[Any] = field(default_factory=list)
    num_batches: list[int | float] = field(default_factory=list)


@dataclass(slots=True)
class ResumeState:
    """Origin of the state that a stage continues.

    Attributes:
        origin: the checkpoint that this fit was resumed from, or None.
        ckpt_path: the checkpoint that was loaded, or None.
        attempt: the launcher's attempt that this fit belongs to.
    """

    origin: Path | None = None
    ckpt_path: str | None = None
    attempt: Attempt = field(default_factory=Attempt)


class StageRun:
    """The state of one stage. Implements `core.run.Run` for tasks, callbacks and loggers.

    Args:
        trainer: the Trainer, which hooks receive. It forwards the members of `Run` to this object.
        settings: the Trainer's settings.
        history: the progress of training, which the stage continues.
        stage: the stage. Default: None, for a run that executes nothing and only provides the Trainer's attributes.
        task: the user's task. Default: None.
        sources: data sources. Default: none.
        engine: prepared engine of another stage, for a trial. Default: None, which creates one.
        is_trial: run trial steps only, without callbacks, loggers and saves.

    Attributes:
        engine: computes steps, steps the optimizers and communicates with other ranks.
        data: the data of the stage.
        loop: the state of the training loop.
        saves: requested checkpoints and those being written.
        default_folder: folder of checkpoints that have no folder of their own.
        status, components, logs, evaluation, resume: see their classes.
    """

    def __init__(
        self,
        trainer: Run,
        settings: Settings,
        history: History,
        stage: Stage | None = None,
        task: TaskModule | None = None,
        sources: Sources | None = None,
        engine: Engine | None = None,
        *,
        is_trial: bool = False,
    ) -> None:
        self.trainer, self.settings, self.history = trainer, settings, history
        self.engine = settings.selection.engine() if engine is None else engine
        self.status = StageStatus(stage, Preemption(settings.preemption_grace_s), is_trial)
        callbacks, profiler = ([], PassThroughProfiler()) if is_trial else (settings.callbacks, settings.profiler)
        self.components = Components(task, callbacks, profiler)
        self.logs = Logs(FitWarnings(self.engine))
        self.data = StageData(Sources({}) if sources is None else sources, task, self.engine, settings, history)
        self.loop = LoopState(Schedules([], task))
        self.evaluation = EvaluationState()
        self.saves = SaveQueue(self.engine, settings.arguments, muted=is_trial)
        self.resume = ResumeState()
        self.default_folder = settings.root / CHECKPOINTS

    @property
    def state(self) -> TrainState:
        """Training progress."""
        return self.history.state

    # Task and progress

    @property
    def task(self) -> TaskModule:
        """The user's task.

        Raises:
            TaskError: no stage has been started yet.
        """
        if self.components.task is None:
            raise TaskError("this Trainer has no task yet. Pass one to trainer.fit(task, …) or trainer.test(task, …).")
        return self.components.task

    @property
    def last_step(self) -> StepResult | None:
        """The result of the last optimizer step; None before the first."""
        return None if self.loop.last_result is None else StepResult(*self.loop.last_result)

    def position(self) -> Position:
        """Return this rank's progress. Called from another thread, also while the main thread is blocked."""
        state, now = self.state, self.evaluation
        return Position(state.step, state.batches, now.batches_done, now.kind or self.status.stage or "ending")

    def progress(self) -> dict[str, Any]:
        """Return the training progress for a checkpoint, including whether a validation is still due."""
        owed = self.state.validation_owed or (self.loop.owes_validation(self.state) and self.data.has_validation)
        return {**self.state.to_dict(), "validation_owed": owed}

    def fire(self, event: str, *args: object) -> None:
        """Call all hooks of an event. Events within a step are fired by the loop instead."""
        for hook in getattr(self.components.hooks, event):
            hook(self.trainer, self.components.task, *args)

    # Numbers of batches and steps

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of one training epoch on one rank; infinite if the loader has no length."""
        found = self.data.train().num_batches
        return math.inf if found is None else found

    def num_batches(self, kind: str) -> list[int | float]:
        """Return the batches of each loader of an evaluation on one rank."""
        data = self.data.evaluations.get(kind)
        return [] if data is None else data.num_batches

    def batch_indices(self, dataloader_idx: int) -> Iterator[list[int]] | None:
        """Return the data set indices of this rank's batches in the current evaluation; see `Run`."""
        data = self.data.evaluations.get(self.evaluation.kind or "")
        return None if data is None else data.loaders[dataloader_idx].indices()

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Total number of optimizer steps of `fit`; infinite without a limit.

        Learning-rate schedules in `configure_optimizers` may need it. Creates the training loader if necessary.
        """
        limits = self.settings.limits
        if limits.max_epochs is None:
            return math.inf if limits.max_steps == -1 else limits.max_steps
        per_epoch = math.ceil(self.num_training_batches / self.settings.accumulate_grad_batches)
        total = per_epoch * limits.max_epochs
        return total if limits.max_steps == -1 else min(total, limits.max_steps)

    # Logged values

    @property
    def callback_metrics(self) -> Mapping[str, MetricValue]:
        """The latest value of every logged metric; see `Run.callback_metrics`."""
        self._show_new()
        return self.logs.shown.callback

    @property
    def logged_metrics(self) -> Mapping[str, MetricValue]:
        """The latest value of every metric that goes to the loggers."""
        self._show_new()
        return as_values(self.logs.shown.logged)

    @property
    def progress_bar_metrics(self) -> Mapping[str, float]:
        """The latest value of every metric logged with `prog_bar=True`; see `Run.progress_bar_metrics`."""
        # Within a step, the progress bar would wait for the device at each of its updates.
        if not self.logs.metrics.in_step:
            self._show_new()
        return self.logs.shown.progress_bar

    def _show_new(self) -> None:
        # After an error the device may be unusable.
        if not self.evaluation.sanity_checking and sys.exc_info()[0] is None:
            self.logs.shown.show(self.logs.metrics.peek_new())

    def log_metric(self, name: str, value: object, options: Mapping[str, Any]) -> None:
        """Log a value of a callback; see `TaskModule.log` for the options."""
        self.logs.metrics.log(name, value, **options)

    def log_now(self, metrics: Mapping[str, float], epoch: int | None = None) -> None:
        """Send numbers to the loggers at the index of the last completed step. Only the main rank logs them.

        Args:
            metrics: numbers by name. A finite number under `"step"` is the x-value of the others.
            epoch: 0-based epoch to log with them. Default: None, the current epoch.
        """
        alone = self.status.stage in ("validate", "test")  # after the last step of the previous fit
        step = max(self.state.step - (not alone), 0)
        if math.isfinite(metrics.get("step", math.nan)):
            metrics = dict(metrics)
            step = int(metrics.pop("step"))
        self.logs.shown.logged.update(metrics)
        if self.logs.group is not None and metrics:
            epoch = self.state.epoch if epoch is None else epoch
            self.logs.group.log_metrics({**metrics, "epoch": epoch}, step)

    def log_evaluation_steps(self, rows: Rows, kind: str) -> None:
        """Send numbers of evaluation steps to the loggers, by the index of the step. Only the main rank logs them."""
        for step, row in rows.items():
            self.logs.shown.logged.update(row)
            if self.logs.group is not None:
                self.logs.group.log_evaluation_step({**row, "epoch": self.state.epoch}, step, kind)

    def show_now(self, metrics: Mapping[str, float]) -> None:
        """Add numbers to `callback_metrics`."""
        self.logs.shown.callback.update(as_values(metrics))

    def take_metrics(self, flushed: Flushed, kind: str, epoch: int | None = None) -> None:
        """Pass metrics that were read from the device to callbacks and loggers. Sanity checks and trials discard them.

        Args:
            flushed: the metrics.
            kind: `"train"`, or the kind of evaluation that logged them.
            epoch: 0-based epoch to log with them. Default: None, the current epoch.
        """
        if self.evaluation.sanity_checking or self.status.is_trial:
            return
        if kind == "train" and self.settings.arguments.on_nonfinite is None:
            manual = not self.task.automatic_optimization
            self.logs.fit_warnings.bad_loss(flushed.callback, self.state.step, manual=manual)
        self.logs.shown.show(flushed)
        if flushed.logged and kind != "predict":
            self.log_now(flushed.logged, epoch)

    def flush_step(self, epoch: int | None = None) -> None:
        """Read the metrics of training steps from the device and pass them to callbacks and loggers. Collective."""
        flushed = self.logs.metrics.flush_step(self.logs.exchange, self.last_step if self.settings.loggers else None)
        self.take_metrics(flushed, "train", epoch)
        if self.logs.group is not None and self.logs.group.record is not None:
            self.note("progress", **flushed.last_step, **progress_facts(self.state, self.engine))

    def note(self, event: str, **facts: object) -> None:
        """Add an event to the run's record, if there is one. Not collective."""
        if self.logs.group is not None and self.logs.group.record is not None:
            self.logs.group.record.add(event, self.state.step, facts)

    # Processes

    @property
    def is_main(self) -> bool:
        """True on the main process."""
        return self.engine.is_main

    def broadcast(self, value: object, src: int = 0) -> Any:
        """Return the `value` of rank `src` on every rank. For small picklable objects on the host. Collective."""
        return self.engine.processes.broadcast_object(value, src)

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        self.engine.processes.barrier()

    def all_gather(self, data: object, sync_grads: bool = False) -> Any:
        """Gather tensors (in any containers) of all data-parallel ranks along a new first dimension. Collective."""
        self.engine.processes.meet("all_gather()")
        return map_tensors(lambda tensor: self.engine.data_ranks.all_gather(tensor, sync_grads), data)

    def gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of a task's tensor or of one sharded like it; see `Run.gather_tensor`."""
        return self.engine.state.gather_tensor(tensor)

    def cut_like(self, value: object, like: torch.Tensor) -> Any:
        """Return this rank's shard of a full tensor, sharded like the task's tensor `like`. Not collective."""
        return self.engine.state.shard_like(value, like)

    # Callbacks by role and their requests

    @property
    def savers(self) -> list[Saver]:
        """Every ModelCheckpoint."""
        return [callback for callback in self.components.callbacks if isinstance(callback, Saver)]

    @property
    def saver(self) -> Saver | None:
        """The first ModelCheckpoint, or None."""
        return next(iter(self.savers), None)

    @property
    def checkpoint_dir(self) -> Path:
        """Folder for checkpoints that are saved without a folder of their own."""
        saver = self.saver
        named = None if saver is None else saver.local_dirpath or saver.dirpath
        return Path(named) if named else self.default_folder

    @property
    def folder(self) -> RunFolder:
        """The folder of this run's checkpoints."""
        return RunFolder(self.checkpoint_dir, run=self.history.run_id)

    def wrote_into(self, folder: Path) -> bool:
        """Return whether the index in a folder lists existing checkpoints of this run. Not collective."""
        return bool(RunFolder(folder, run=self.history.run_id).index.entries())

    def at_step_end(self, action: Callable[[], None]) -> None:
        """Call `action` once at the end of the current step; see `Run.at_step_end`."""
        self.saves.add_action(action)
        self.loop.look()

    def request_save(self, request: SaveRequest) -> None:
        """Request a checkpoint at the end of the current step. Every rank must make the same request."""
        if request.folder is None and request.remote is None:  # the run's own folder may mirror a remote one
            request.remote = None if self.saver is None else self.saver.remote
        self.saves.add_save(request)
        self.loop.look()

    def request_stop(self, reason: str, *, closes_epoch: bool = True) -> None:
        """End the run after the current step; see `Run.request_stop`."""
        self.loop.request_stop(reason, Stop.AND_CLOSE_EPOCH if closes_epoch else Stop.WITHIN_EPOCH)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the main process, above the progress bar. `options` are those of Python's `print`."""
        if not self.is_main:
            return
        display = next((each for each in self.components.callbacks if isinstance(each, ProgressDisplay)), None)
        show: Callable[..., None] = print if display is None else display.print
        if "file" in options:
            show(*values, **options)
        else:
            try_output(show, *values, **options)

    def warn(self, message: str) -> None:
        """Issue a warning on the main rank."""
        if self.is_main:
            warnings.warn(message, TrainwrightWarning, stacklevel=2)

    # Manual optimization

    def task_optimizers(self) -> Sequence[Any]:
        """Return the optimizers for the task, wrapped for manual optimization."""
        optimizers: list[Optimizer] = self.engine.optimizers
        if self.task.automatic_optimization:
            return optimizers
        return [ManualOptimizer(optimizer, self.engine) for optimizer in optimizers]

    def _manual_step(self) -> ManualStep:
        step = self.engine.step
        assert isinstance(step, ManualStep)  # the callers check that the task uses manual optimization
        return step

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward for a task with manual optimization. Collective with several processes."""
        if self.task.automatic_optimization:
            raise TaskError(
                f"{type(self.task).__name__} calls manual_backward, but automatic_optimization is True. Set "
                "self.automatic_optimization = False in __init__, or return the loss instead."
            )
        self._manual_step().backward(loss, *args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Disable gradient synchronization of `manual_backward` within the context."""
        if self.task.automatic_optimization:
            raise TaskError(
                f"{type(self.task).__name__} calls no_sync, but automatic_optimization is True. Gradients are already "
                "synchronized only in the last micro-batch of a step. Use Trainer(accumulate_grad_batches=...)."
            )
        return self._manual_step().no_sync()

    def clip_gradients(self, optimizer: Optimizer, max_value: float | None, algorithm: str | None) -> None:
        """Clip the gradients of one optimizer's parameters; see `TaskModule.clip_gradients`."""
        arguments = self.settings.arguments
        clip = GradientClip.parse(
            _only_value("gradient_clip_val", max_value, arguments.gradient_clip_val),
            _only_value("gradient_clip_algorithm", algorithm, arguments.gradient_clip_algorithm),
        )
        if clip is None:
            return
        step = self.engine.step
        if isinstance(step, ManualStep):
            step.clip_gradients(optimizer.optimizer if isinstance(optimizer, ManualOptimizer) else optimizer, clip)
        else:  # gradients of an automatic step are divided by the loss scale before a hook can clip them
            self.engine.gradients.clip(parameters_of([optimizer]), clip)


def _only_value(name: str, given: Any, of_trainer: Any) -> Any:
    """Return an argument of `clip_gradients`, or the Trainer's if it is None. They may not contradict each other."""
    if given is None:
        return of_trainer
    if of_trainer is not None and given != of_trainer:
        raise ConfigurationError(
            f"clip_gradients received {name}={given!r}, but the Trainer has {name}={of_trainer!r}. Remove one of them."
        )
    return given
