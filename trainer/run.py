"""StageRun: everything that one stage (fit, validate, test, predict) holds; made for it, dropped after it."""

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
from trainwright.core.errors import TaskError, TrainwrightWarning
from trainwright.core.metric_value import as_values
from trainwright.core.process import try_output
from trainwright.core.run import Run, SaveRequest, SchedulerConfig, Stage
from trainwright.core.state import StepResult
from trainwright.core.task import TaskModule
from trainwright.core.tree import map_tensors
from trainwright.data import DataModule
from trainwright.loggers.logger_group import LoggerGroup
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.loggers.metric_values import Exchange, Flushed
from trainwright.processes.standing import Position
from trainwright.profilers.profiler import PassThroughProfiler, Profiler
from trainwright.strategies.engine import Engine
from trainwright.strategies.steps.gradients import GradientClip
from trainwright.strategies.steps.step import ManualStep
from trainwright.trainer.checkpoints.job import Attempt
from trainwright.trainer.checkpoints.save_queue import SaveQueue
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.data import EvaluationKind, Sources, StageData
from trainwright.trainer.history import History
from trainwright.trainer.loop_state import LoopState
from trainwright.trainer.notices import Notices
from trainwright.trainer.optimization import ManualOptimizer, Schedules
from trainwright.trainer.recovery.preemption import Preemption
from trainwright.trainer.schedule import Stop


@dataclass(slots=True)
class ShownMetrics:
    """The latest value of every metric.

    Attributes:
        callback, logged, progress_bar: what `callback_metrics`, `logged_metrics` and `progress_bar_metrics` show.
    """

    callback: dict[str, float] = field(default_factory=dict)
    logged: dict[str, Any] = field(default_factory=dict)
    progress_bar: dict[str, float] = field(default_factory=dict)

    def show(self, flushed: Flushed) -> None:
        """Show metrics to callbacks and the progress bar."""
        self.callback.update(flushed.callback)
        self.progress_bar.update(flushed.prog_bar)

    def load(self, metrics: Mapping[str, float]) -> None:
        """Show callbacks and schedules what they saw when a checkpoint was written."""
        self.callback = as_values(metrics)


class StageRun:
    """One stage, and its answers to what tasks, callbacks and loggers ask of it (see `core.run.Run`).

    Args:
        trainer: handed to hooks; its members that `Run` names are this object's.
        settings: what the Trainer was told.
        history: the run so far; the stage goes on with it.
        stage: which one; None: none runs, there is only something to ask.
        task: the user's task; None before there is one.
        sources: where loaders come from.
        engine: Already prepared, for a trial within another stage. Default: None, which creates one.
        is_trial: steps are tried out only: there are no callbacks, loggers are mute, nothing is saved.

    Attributes:
        arguments: the Trainer's, as part of `settings`.
        state: where training stands, as part of `history`.
        datamodule: the data module of this stage, or None.
        engine: computes steps and holds the processes.
        callbacks: this stage's callbacks, the task's own included.
        hooks: who listens to which event.
        profiler: records actions of the stage.
        is_profiled: the profiler has been set up and not torn down.
        loggers, logging: the loggers; the loggers as one, None before they are set up.
        metrics: takes what tasks and callbacks log.
        shown: the numbers that were read from it.
        exchange: gathers small host objects over ranks; None for one process.
        optimizers, lr_scheduler_configs: what `configure_optimizers` returned.
        schedules: steps the learning-rate schedules.
        data: what the stage reads.
        loop: where the loop stands.
        saves: checkpoints that were asked for, and those that are being written.
        notices: what a fit says once.
        is_set_up: the task has been told of the stage, so that it must be told of its end.
        trains: it is a `fit` that has begun, so that there are optimizers and progress to save.
        resumed: this fit continues a checkpoint.
        origin: the checkpoint that this fit was resumed from.
        ckpt_path: the checkpoint that was loaded; None: none.
        attempt: which attempt of a launcher at its job this fit belongs to.
        interrupted: Ctrl-C ended it.
        preemption: signals that have come.
        count_tokens: something wants `state.tokens` counted.
        sanity_checking: the validation that runs is the one before training.
        evaluating: `"validate"`, `"test"` or `"predict"` while one runs, else None.
        eval_batches_done: evaluation batches completed by this rank.
        num_eval_batches: batches of each loader of the evaluation that is running, on this rank.
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
        sources = Sources({}) if sources is None else sources
        self.trainer, self.settings, self.history, self.stage = trainer, settings, history, stage
        self.arguments, self.state = settings.arguments, history.state
        self._task = task
        self.datamodule: DataModule | None = sources.datamodule
        self.engine = settings.selection.engine() if engine is None else engine
        self.callbacks: list[Callback] = [] if is_trial else settings.callbacks
        self.hooks = HookTable()
        self.profiler: Profiler = PassThroughProfiler() if is_trial else settings.profiler
        self.is_profiled = False
        self.loggers: list[Any] = settings.loggers
        self.logging: LoggerGroup | None = None
        self.metrics = MetricBuffer()
        self.exchange: Exchange | None = None
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.schedules = Schedules([], task)
        self.data = StageData(sources, task, self.engine, settings, history)
        self.shown = ShownMetrics()
        self.loop = LoopState()
        self.saves = SaveQueue(self.engine, settings.arguments, muted=is_trial)
        self.notices = Notices(self.engine)
        self.is_trial = is_trial
        self.is_set_up = self.trains = self.resumed = self.interrupted = False
        self.origin: Path | None = None
        self.ckpt_path: str | None = None
        self.attempt = Attempt()
        self.preemption = Preemption(settings.preemption_grace_s)
        self.count_tokens = False
        self.sanity_checking = False
        self.evaluating: EvaluationKind | None = None
        self.eval_batches_done = 0
        self.num_eval_batches: list[int | float] = []

    # The task and where it stands

    @property
    def task(self) -> TaskModule:
        """The user's task.

        Raises:
            TaskError: no stage has been started yet.
        """
        if self._task is None:
            raise TaskError("this Trainer has no task yet. Pass one: trainer.fit(task, …) or trainer.test(task, …).")
        return self._task

    @property
    def model(self) -> TaskModule | None:
        """The user's task; None before there is one."""
        return self._task

    @property
    def last_step(self) -> StepResult | None:
        """What the last optimizer step gave; None before the first."""
        return None if self.loop.last_result is None else StepResult(*self.loop.last_result)

    def position(self) -> Position:
        """Return how far this rank has come; called from another thread, while this one may stand still."""
        state = self.state
        return Position(state.step, state.batches, self.eval_batches_done, self.evaluating or self.stage or "ending")

    def progress(self) -> dict[str, Any]:
        """Return where training stands, for a checkpoint: with a validation that is due and has not been done."""
        owed = self.state.validation_owed or (self.loop.owes_validation(self.state) and self.data.has_validation)
        return {**self.state.to_dict(), "validation_owed": owed}

    def fire(self, event: str, *args: object) -> None:
        """Call everyone who listens to an event that is not fired in the step."""
        for hook in getattr(self.hooks, event):
            hook(self.trainer, self._task, *args)

    # Numbers of batches and steps

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of one training epoch on one rank; infinite when the loader has no length."""
        found = self.data.train().num_batches
        return math.inf if found is None else found

    @property
    def sanity_steps(self) -> int | float:
        """Validation batches that are tried before training."""
        most = self.settings.num_sanity_val_steps
        return math.inf if most == -1 else most

    def num_batches(self, kind: str) -> list[int | float]:
        """Return the batches of each loader of an evaluation on one rank."""
        data = self.data.evaluations.get(kind)
        return [] if data is None else data.num_batches

    def batch_indices(self, dataloader_idx: int) -> Iterator[list[int]] | None:
        """Return the places in the data set of this rank's batches, in the evaluation that runs; see `Run`."""
        data = self.data.evaluations.get(self.evaluating or "")
        return None if data is None else data.loaders[dataloader_idx].indices()

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps that `fit` will do in all; infinite when nothing bounds them.

        Made for learning-rate schedules in `configure_optimizers`; it loads the training data if need be.
        """
        limits = self.settings.limits
        if limits.max_epochs is None:
            return math.inf if limits.max_steps == -1 else limits.max_steps
        per_epoch = math.ceil(self.num_training_batches / self.settings.accumulate_grad_batches)
        total = per_epoch * limits.max_epochs
        return total if limits.max_steps == -1 else min(total, limits.max_steps)

    # Logged values

    @property
    def callback_metrics(self) -> Mapping[str, float]:
        """The latest value of every logged metric; see `Run.callback_metrics`."""
        if not self.sanity_checking and sys.exc_info()[0] is None:  # whatever failed, the device may have
            self.shown.show(self.metrics.peek_new())
        return self.shown.callback

    def log_metric(self, name: str, value: object, options: Mapping[str, Any]) -> None:
        """Take a value that a callback logs; see `TaskModule.log` for the options."""
        self.metrics.log(name, value, **options)

    def log_now(self, metrics: Mapping[str, float], epoch: int | None = None) -> None:
        """Send host-side numbers to the loggers at the present step and epoch; they do nothing off the main rank."""
        self.shown.logged.update(metrics)
        if self.logging is not None:
            epoch = self.state.epoch if epoch is None else epoch
            alone = self.stage in ("validate", "test")  # after the last step of the fit before it
            self.logging.log_metrics({**metrics, "epoch": epoch}, max(self.state.step - (not alone), 0))

    def show_now(self, metrics: Mapping[str, float]) -> None:
        """Put host-side numbers into `callback_metrics`."""
        self.shown.callback.update(as_values(metrics))

    def take_metrics(self, flushed: Flushed, kind: str, epoch: int | None = None) -> None:
        """Take metrics that were read from the device: show them to callbacks, hand them to the loggers.

        Args:
            flushed: the metrics.
            kind: what logged them: `"train"` or an evaluation.
            epoch: in which; the present one unless told.
        """
        if self.sanity_checking or self.is_trial:
            return
        if kind == "train" and self.arguments.on_nonfinite is None:
            self.notices.bad_loss(flushed.callback, self.state.step, manual=not self.task.automatic_optimization)
        self.shown.show(flushed)
        if flushed.logged and kind != "predict":
            self.log_now(flushed.logged, epoch)

    def flush_step(self, epoch: int | None = None) -> None:
        """Read what training steps have logged from the device, and take it. Collective."""
        self.take_metrics(self.metrics.flush_step(self.exchange), "train", epoch)

    # Processes

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.engine.processes.world_size

    @property
    def global_rank(self) -> int:
        """Rank among all processes."""
        return self.engine.processes.rank

    @property
    def is_main(self) -> bool:
        """Whether this is the main process."""
        return self.engine.is_main

    def broadcast(self, value: object, src: int = 0) -> Any:
        """Return `value` of rank `src` on every rank. Collective; small picklable objects, on the host."""
        return self.engine.processes.broadcast_object(value, src)

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        self.engine.processes.barrier()

    def all_gather(self, data: object, sync_grads: bool = False) -> Any:
        """Gather tensors (in any containers) of all ranks along a new first dimension. Collective."""
        self.engine.processes.meet("all_gather()")
        return map_tensors(lambda tensor: self.engine.data_ranks.all_gather(tensor, sync_grads), data)

    def whole_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return one of the task's tensors, or one cut alike, whole; see `Run.whole_tensor`."""
        return self.engine.state.full_tensor(tensor)

    def cut_like(self, value: object, like: torch.Tensor) -> Any:
        """Return this process's piece of a whole tensor, cut as the task's tensor `like` is. Not collective."""
        return self.engine.state.shard_like(value, like)

    # Callbacks by role, and their wishes

    @property
    def savers(self) -> list[Saver]:
        """Every ModelCheckpoint."""
        return [callback for callback in self.callbacks if isinstance(callback, Saver)]

    @property
    def saver(self) -> Saver | None:
        """The first ModelCheckpoint, or None."""
        return next(iter(self.savers), None)

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints go when a request names no folder."""
        saver = self.saver
        named = None if saver is None else saver.local_dirpath or saver.dirpath
        return Path(named) if named else self.settings.root / "checkpoints"

    @property
    def folder(self) -> RunFolder:
        """The folder of this run's checkpoints."""
        return RunFolder(self.checkpoint_dir, run=self.history.run_id)

    def wrote_into(self, folder: Path) -> bool:
        """Return whether the index in a folder lists checkpoints of this run that are there. Not collective."""
        return bool(RunFolder(folder, run=self.history.run_id).index.entries())

    def at_safe_point(self, action: Callable[[], None]) -> None:
        """Call `action` once, at the end of the present step; see `Run.at_safe_point`."""
        self.saves.add_action(action)
        self.loop.look()

    def request_save(self, request: SaveRequest) -> None:
        """Ask for a checkpoint at the next safe point. Every rank must ask alike."""
        if request.folder is None and request.remote is None:  # the run's own folder may stand for one elsewhere
            request.remote = None if self.saver is None else self.saver.remote
        self.saves.add_save(request)
        self.loop.look()

    def request_stop(self, reason: str, *, closes_epoch: bool = True) -> None:
        """End the run after the present step; see `Run.request_stop`."""
        self.loop.ask_to_stop(reason, Stop.AND_CLOSE_EPOCH if closes_epoch else Stop.WITHIN_EPOCH)

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the main process only, without breaking the progress bar; `options` are those of Python's print."""
        if not self.is_main:
            return
        display = next((callback for callback in self.callbacks if isinstance(callback, ProgressDisplay)), None)
        show: Callable[..., None] = print if display is None else display.print
        if "file" in options:
            show(*values, **options)
        else:
            try_output(show, *values, **options)

    def warn(self, message: str) -> None:
        """Warn, on the main rank."""
        if self.is_main:
            warnings.warn(message, TrainwrightWarning, stacklevel=2)

    # Optimization by hand

    def task_optimizers(self) -> Sequence[Any]:
        """The optimizers as a task should use them: wrapped when it steps them itself."""
        optimizers: list[Optimizer] = self.engine.optimizers
        if self.task.automatic_optimization:
            return optimizers
        return [ManualOptimizer(optimizer, self.engine) for optimizer in optimizers]

    def _by_hand(self) -> ManualStep:
        step = self.engine.step
        assert isinstance(step, ManualStep)  # asked before: the task optimizes by hand
        return step

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward for a task that optimizes by hand. Collective under strategies that join processes."""
        if self.task.automatic_optimization:
            raise TaskError(
                f"{type(self.task).__name__} calls manual_backward, but automatic_optimization is True. Set "
                "self.automatic_optimization = False in __init__, or return the loss instead."
            )
        self._by_hand().backward(loss, *args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep the gradients of `manual_backward` on this rank for the length of a `with` block."""
        if self.task.automatic_optimization:
            raise TaskError(
                f"{type(self.task).__name__} calls no_sync, but automatic_optimization is True: gradients cross ranks "
                "in the last micro-batch of a step only. Say Trainer(accumulate_grad_batches=...)."
            )
        return self._by_hand().no_sync()

    def clip_gradients(self, optimizer: Optimizer, max_value: float | None, algorithm: str | None) -> None:
        """Clip the gradients of one optimizer's parameters by `"norm"` (default) or `"value"`."""
        clip = GradientClip.parse(max_value, algorithm)
        if clip is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.engine.gradients.clip(parameters, clip)
