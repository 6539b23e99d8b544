"""What a run holds and answers when it is asked: what the Trainer's parts and its callbacks see of it."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from trainwright.callbacks.callback import Callback
from trainwright.callbacks.hook_table import HookTable
from trainwright.core.errors import TaskError
from trainwright.core.metric_value import as_values
from trainwright.core.run import Rehearsal, SchedulerConfig, Stage
from trainwright.core.state import Group, SkippedData, StepResult, TrainState
from trainwright.core.task import TaskModule
from trainwright.core.tree import map_tensors
from trainwright.data import DataModule
from trainwright.data.workers import Workers
from trainwright.loggers.logger_group import LoggerGroup
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.loggers.metric_ranks import Exchange, Flushed
from trainwright.strategies.gradients import GradientClip
from trainwright.strategies.processes.standing import Position
from trainwright.strategies.strategy import Strategy
from trainwright.trainer.job import Attempt
from trainwright.trainer.loaders import EvaluationData, Sources, TrainData
from trainwright.trainer.notices import Notices
from trainwright.trainer.optimization import ManualOptimizer, Schedules
from trainwright.trainer.schedule import ValidationSchedule

Policy = Literal["raise", "skip", "rollback"]


class RunFacts(ABC):
    """A run's attributes, properties and small services; `StageRunner` fills them in.

    Attributes:
        state: where training stands; kept between stages.
        stage: the stage that is running, or None.
        verb, status: the last stage that was started; how far it has come: `"initializing"`, `"running"`, `"finished"`
            or `"interrupted"`.
        ckpt_path: the checkpoint that this stage, or the last one, has loaded; None: none.
        callbacks: this stage's callbacks, the task's own included.
        loggers: the loggers.
        logging: the loggers as one.
        strategy: this stage's copy of the configured strategy.
        optimizers, lr_scheduler_configs: what `configure_optimizers` returned.
        schedules: steps the learning-rate schedules.
        datamodule: the data module of this stage, or None.
        hooks: who listens to which event.
        metrics: takes what tasks and callbacks log.
        exchange: gathers small host objects over ranks; None for one process.
        should_stop: set it to True to end `fit` after the present step.
        stop_reason: why `request_stop` was called last in this stage, or None.
        interrupted: Ctrl-C ended the last stage.
        trains: this stage, or the last one, is a `fit`, so that there are optimizers and progress to save.
        resumed: this fit continues a checkpoint.
        epoch_closes: the epoch that ends is over; False when a later `fit` may go on with it.
        sanity_checking: the validation that runs is the one before training.
        last_result: loss and gradient norm of the last optimizer step (see `last_step`).
        quiet_groups: so many groups of micro-batches need no look at what is due; 0 makes the next one look.
        at_step_boundary: no training step is half done.
        stepping: optimizers step just now, or what they did is being counted.
        workers: the loader workers of this stage.
        attempt: which attempt of a launcher at its job this fit belongs to.
        evaluating: `"validate"`, `"test"` or `"predict"` while one runs, else None.
        eval_batches_done: evaluation batches completed in this stage, by this rank.
        num_eval_batches: batches of each loader of the evaluation that is running, on this rank.
        run_id: tells this run's checkpoints from those of others in the same folder; kept across a resume.
        seed: of the order of the data.
        skipped_batches: training data that was consumed and changed no weight, in the order of its coming.
        on_nonfinite: what becomes of a step whose loss or gradient is not finite; None: nothing is looked at.
        count_tokens: something wants `state.tokens` counted.
        rehearsing: this stage only tries steps out: callbacks are left out, loggers stay mute.
    """

    state: TrainState
    stage: Stage | None
    verb: Stage | None
    status: str
    ckpt_path: str | None
    callbacks: list[Callback]
    loggers: list[Any]
    logging: LoggerGroup | None
    strategy: Strategy
    optimizers: list[Optimizer]
    lr_scheduler_configs: list[SchedulerConfig]
    schedules: Schedules
    datamodule: DataModule | None
    hooks: HookTable
    metrics: MetricBuffer
    exchange: Exchange | None
    should_stop: bool
    stop_reason: str | None
    interrupted: bool
    trains: bool
    resumed: bool
    sanity_checking: bool
    last_result: tuple[torch.Tensor | None, torch.Tensor | None] | None
    quiet_groups: int
    at_step_boundary: bool
    stepping: bool
    attempt: Attempt
    eval_batches_done: int
    num_eval_batches: list[int | float]
    evaluating: str | None
    run_id: str
    seed: int | None
    skipped_batches: list[SkippedData]
    on_nonfinite: Policy | None
    notices: Notices
    count_tokens: bool
    rehearsing: bool = False
    default_root_dir: Path
    accumulate_grad_batches: int
    log_every_n_steps: int
    max_epochs: int | None
    max_steps: int
    inference_mode: bool
    fast_dev_run: bool | int
    barebones: bool
    _task: TaskModule | None
    _callback_metrics: dict[str, float]
    _logged_metrics: dict[str, float]
    _progress_bar_metrics: dict[str, float]
    _eval_data: dict[str, EvaluationData]
    _to_restore: list[Callable[[], None]]
    restore_after_fit_start: Callable[[], None] | None  # optimizers whose groups callbacks make in `on_fit_start`
    safe_point: Any
    workers: Workers
    _is_set_up: bool
    clip: GradientClip | None
    _sources: Sources
    _train_data: TrainData | None
    _validation: ValidationSchedule | None
    _group: Group | None  # the one that is being trained on
    _group_end: tuple[int, bool] | None  # of the group that was counted last: its length, and whether it is the last

    @abstractmethod
    def train_data(self) -> TrainData:
        """The prepared training data; made at the first asking."""

    @abstractmethod
    def pass_training_data(self) -> None:
        """Run `training_step` on an epoch of data without gradients and logging; see `Run.pass_training_data`."""

    @abstractmethod
    def evaluation_data(self, kind: str) -> EvaluationData:
        """The prepared data of `"validate"`, `"test"` or `"predict"`; made at the first asking."""

    @property
    @abstractmethod
    def has_validation(self) -> bool:
        """Whether `fit` validates at all."""

    @abstractmethod
    def rehearse(self, *, alone: bool, remakes_loaders: bool = False) -> AbstractContextManager[Rehearsal]:
        """Try steps out and leave no trace; see `Run.rehearse`."""

    @abstractmethod
    def progress(self) -> dict[str, Any]:
        """Return where training stands, JSON-able, for a checkpoint."""

    @abstractmethod
    def data_state(self) -> dict[str, Any]:
        """Return the place in the training data, for a checkpoint; the same on every rank."""

    @abstractmethod
    def loader_state(self) -> dict[str, Any] | None:
        """Return the state of this rank's training loader; None when it keeps none of its own."""

    @abstractmethod
    def rollback_state(self) -> dict[str, Any]:
        """Return what a resumed run must know of what was left out, JSON-able; for a checkpoint."""

    @abstractmethod
    def load_rollback_state(self, saved: dict[str, Any]) -> None:
        """Add what `rollback_state` returned to what is known."""

    @abstractmethod
    def load_data_state(self, saved: dict[str, Any], seed: int | None) -> None:
        """Take back what `data_state` returned; used by the next epoch."""

    def fire(self, event: str, *args: Any) -> None:
        """Call everyone who listens to an event that is not fired in the step."""
        for hook in getattr(self.hooks, event):
            hook(self, self._task, *args)

    def position(self) -> Position:
        """Return how far this rank has come; called from another thread, while this one may stand still."""
        state = self.state
        return Position(state.step, state.batches, self.eval_batches_done, self.evaluating or self.stage or "ending")

    def restore_later(self, restore: Callable[[], None]) -> None:
        """Put something back as the last act before training goes on, in the order of these calls."""
        self._to_restore.append(restore)

    # The task and where it stands

    @property
    def task(self) -> TaskModule:
        """The user's task.

        Raises:
            TaskError: no stage has been started yet.
        """
        if self._task is None:
            raise TaskError("this Trainer has no task yet; it gets one from fit, validate, test or predict.")
        return self._task

    @property
    def last_step(self) -> StepResult | None:
        """What the last optimizer step gave; None before the first."""
        return None if self.last_result is None else StepResult(*self.last_result)

    @property
    def log_dir(self) -> Path | None:
        """The folder of the first logger that has one; known on the main rank once a stage has started."""
        return next((logger.log_dir for logger in self.loggers if logger.log_dir is not None), None)

    @property
    def training(self) -> bool:
        """Whether training steps are running, not an evaluation between them."""
        return self.stage == "fit" and self.evaluating is None

    @property
    def validating(self) -> bool:
        """Whether a validation is running, other than the one before training."""
        return self.evaluating == "validate" and not self.sanity_checking

    @property
    def testing(self) -> bool:
        """Whether a test is running."""
        return self.evaluating == "test"

    @property
    def predicting(self) -> bool:
        """Whether a prediction is running."""
        return self.evaluating == "predict"

    @property
    def current_epoch(self) -> int:
        """`state.epoch`: 0-based index of the present epoch; between fits, the finished ones."""
        return self.state.epoch

    @property
    def global_step(self) -> int:
        """`state.step`: completed optimizer steps."""
        return self.state.step

    # Numbers of batches and steps

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of one training epoch on one rank; infinite when the loader has no length."""
        found = self.train_data().num_batches
        return math.inf if found is None else found

    @property
    def train_batch_size(self) -> int | None:
        """Samples that this rank's loader puts into a micro-batch; None when it does not tell. Loads the data."""
        return self.train_data().loader.batch_size

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader on one rank."""
        return self._num_batches("validate")

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each test loader on one rank."""
        return self._num_batches("test")

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each prediction loader on one rank."""
        return self._num_batches("predict")

    def _num_batches(self, kind: str) -> list[int | float]:
        data = self._eval_data.get(kind)
        return [] if data is None else data.num_batches

    def batch_indices(self, dataloader_idx: int) -> Iterator[list[int]] | None:
        """Return the places in the data set of this rank's batches, in the evaluation that runs; see `Run`."""
        data = self._eval_data.get(self.evaluating or "")
        return None if data is None else data.loaders[dataloader_idx].indices()

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps that `fit` will do in all; infinite when nothing bounds them.

        Made for learning-rate schedules in `configure_optimizers`; it loads the training data if need be.
        """
        if self.max_epochs is None:
            return math.inf if self.max_steps == -1 else self.max_steps
        per_epoch = math.ceil(self.num_training_batches / self.accumulate_grad_batches)
        total = per_epoch * self.max_epochs
        return total if self.max_steps == -1 else min(total, self.max_steps)

    # Logged values

    @property
    def callback_metrics(self) -> Mapping[str, float]:
        """The latest value of every logged metric; see `Run.callback_metrics`."""
        if not self.sanity_checking and sys.exc_info()[0] is None:  # whatever failed, the device may have
            self.show_metrics(self.metrics.peek_new())
        return self._callback_metrics

    @property
    def logged_metrics(self) -> Mapping[str, float]:
        """The latest value of every metric that went to the loggers."""
        return as_values(self._logged_metrics)

    @property
    def progress_bar_metrics(self) -> Mapping[str, float]:
        """The latest value of every metric logged with `prog_bar=True`."""
        return self._progress_bar_metrics

    # Processes

    @property
    def global_rank(self) -> int:
        """Rank among all processes."""
        return self.strategy.processes.rank

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this node."""
        return self.strategy.processes.local_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.strategy.processes.world_size

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.strategy.processes.num_nodes

    @property
    def num_devices(self) -> int:
        """Processes on this node."""
        return self.strategy.num_processes

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the main process."""
        return self.strategy.is_main

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return self.strategy.device

    @property
    def precision(self) -> str:
        """The precision's name, such as `"bf16-mixed"`."""
        return self.strategy.precision.name

    def log_metric(self, name: str, value: Any, options: Mapping[str, Any]) -> None:
        """Take a value that a callback logs; see `TaskModule.log` for the options."""
        self.metrics.log(name, value, **options)

    def log_now(self, metrics: Mapping[str, float]) -> None:
        """Send host-side numbers to the loggers at the present step; they do nothing off the main rank."""
        self._logged_metrics.update(metrics)
        if self.logging is not None:
            self.logging.log_metrics({**metrics, "epoch": self.state.epoch}, max(self.state.step - 1, 0))

    def show_now(self, metrics: Mapping[str, float]) -> None:
        """Put host-side numbers into `callback_metrics`."""
        self._callback_metrics.update(as_values(metrics))

    def show_metrics(self, flushed: Flushed) -> None:
        """Show metrics to callbacks and the progress bar."""
        self._callback_metrics.update(flushed.callback)
        self._progress_bar_metrics.update(flushed.prog_bar)

    def load_metrics(self, metrics: Mapping[str, float]) -> None:
        """Show callbacks and schedules what they saw when a checkpoint was written."""
        self._callback_metrics = as_values(metrics)

    def take_metrics(self, flushed: Flushed, kind: str) -> None:
        """Take metrics that were read from the device: show them to callbacks, hand them to the loggers."""
        if self.sanity_checking:
            return
        if kind == "train" and self.on_nonfinite is None:
            self.notices.bad_loss(flushed.callback, self.state.step, manual=not self.task.automatic_optimization)
        self.show_metrics(flushed)
        if flushed.logged and kind != "predict":
            self.log_now(flushed.logged)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return `value` of rank `src` on every rank. Collective; small picklable objects, on the host."""
        return self.strategy.processes.broadcast_object(value, src)

    def barrier(self) -> None:
        """Wait for every rank. Collective."""
        self.strategy.processes.barrier()

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Gather tensors (in any containers) of all ranks along a new first dimension. Collective."""
        return map_tensors(lambda tensor: self.strategy.all_gather(tensor, sync_grads), data)

    def whole_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return one of the task's tensors, or one cut alike, whole; see `Run.whole_tensor`."""
        return self.strategy.whole_tensor(tensor)

    def cut_like(self, value: Any, like: torch.Tensor) -> Any:
        """Return this process's piece of a whole tensor, cut as the task's tensor `like` is. Not collective."""
        return self.strategy.cut_like(value, like)

    # Callbacks by role

    @property
    def checkpoint_callback(self) -> Any | None:
        """The first ModelCheckpoint, or None."""
        return self._first("best_model_path")

    @property
    def early_stopping_callback(self) -> Any | None:
        """The first EarlyStopping, or None."""
        return self._first("stopped_epoch")

    @property
    def progress_bar_callback(self) -> Any | None:
        """The progress bar, or None."""
        return self._first("is_progress_bar")

    def _first(self, attribute: str) -> Any | None:
        return next((callback for callback in self.callbacks if hasattr(callback, attribute)), None)

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints go when a request names no folder."""
        saver = self.checkpoint_callback
        named = getattr(saver, "local_dirpath", None) or getattr(saver, "dirpath", None)
        return Path(named) if named else self.default_root_dir / "checkpoints"

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the main process only, without breaking the progress bar; `options` are those of Python's print."""
        if not self.is_global_zero:
            return
        bar = self.progress_bar_callback
        if bar is not None:
            bar.print(*values, **options)
        else:
            print(*values, **options)  # noqa: T201  # this is what the method is for

    # Optimization by hand

    def task_optimizers(self) -> Sequence[Any]:
        """The optimizers as a task should use them: wrapped when it steps them itself."""
        optimizers: list[Optimizer] = self.strategy.optimizers
        if self.task.automatic_optimization:
            return optimizers
        return [ManualOptimizer(optimizer, self.strategy) for optimizer in optimizers]

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward for a task that optimizes by hand. Collective under strategies that join processes."""
        if self.task.automatic_optimization:
            raise TaskError(
                f"{type(self.task).__name__} calls manual_backward, but automatic_optimization is True. Set "
                "self.automatic_optimization = False in __init__, or return the loss instead."
            )
        self.strategy.manual_backward(loss, *args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep the gradients of `manual_backward` on this rank for the length of a `with` block."""
        if self.task.automatic_optimization:
            raise TaskError(
                f"{type(self.task).__name__} calls no_sync, but automatic_optimization is True: gradients cross ranks "
                "in the last micro-batch of a step only. Say Trainer(accumulate_grad_batches=...)."
            )
        return self.strategy.no_sync()

    def clip_gradients(self, optimizer: Any, max_value: float | None, algorithm: str | None) -> None:
        """Clip the gradients of one optimizer's parameters by `"norm"` (default) or `"value"`."""
        clip = GradientClip.parse(max_value, algorithm)
        if clip is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.strategy.clip_parameters(parameters, clip)
