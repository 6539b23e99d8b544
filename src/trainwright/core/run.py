"""The `Run` protocol: the interface of a run for callbacks, tasks and loggers.

Code that only uses `Run` works with any trainer, and can be tested without a trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.optim import Optimizer

from trainwright.core.metric_value import MetricValue
from trainwright.core.state import SkippedData, StepResult, TrainState

Stage = Literal["fit", "validate", "test", "predict"]


@dataclass(slots=True)
class SchedulerConfig:
    """Learning-rate schedule with its interval.

    Attributes:
        scheduler: the torch scheduler (anything with `step`, `state_dict` and `load_state_dict`).
        interval: `"step"` (completed optimizer steps) or `"epoch"`.
        frequency: number of intervals between two steps of the scheduler.
        monitor: name of the logged metric for `ReduceLROnPlateau`. None for other schedulers.
        strict: True raises an error if the metric `monitor` was not logged. False warns.
        name: name of the schedule in LearningRateMonitor. None uses the optimizer's class.
        reduce_on_plateau: the scheduler's `step` receives the metric `monitor`.
        paused: True while a callback pauses the schedule. The schedule then does not step.
    """

    scheduler: Any
    interval: Literal["step", "epoch"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool = False
    paused: bool = False


@dataclass(slots=True)
class SaveRequest:
    """Request for a checkpoint, which is written at the end of the step, or of the epoch if this is its last step.

    Attributes:
        name: folder name of the checkpoint, relative to `folder`.
        folder: parent folder. None is the run's checkpoint folder.
        weights_only: omit optimizers, progress and generators.
        metrics: the values by which checkpoints are ranked.
        remove: folder names of this run's earlier checkpoints that are deleted once the new checkpoint is complete.
        remote: URL of a folder to which the complete checkpoint is uploaded. Checkpoints in `remove` are deleted there,
            too. If `remote` and `folder` are None, the remote folder of the run's ModelCheckpoint is used, if any.
        link: name of a relative symbolic link in the same folder to create or update after the checkpoint is published.
        must_be_new: True raises an error if another run writes a checkpoint of this name first. False replaces an
            existing checkpoint of this name.
    """

    name: str
    folder: Path | None = None
    weights_only: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    remove: list[str] = field(default_factory=list)
    link: str | None = None
    remote: str | None = None
    must_be_new: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of `TrialSteps.try_out`, combined over all ranks."""

    fits: bool  # True if no rank ran out of memory
    batch_size: int | None  # batch size of this rank's loader; None if unknown, or if creating the loader failed
    reason: str  # the out-of-memory error of the lowest failing rank, as text; empty if `fits`


class TrialSteps(Protocol):
    """Trial steps within a run that do not change it; see `Run.trial_steps`."""

    def capacity(self) -> int | None:
        """Return the largest batch size that the data can fill on every rank. None if the data's length is unknown."""

    def at_end(self, action: Callable[[], None]) -> None:
        """Call `action` after all state is restored and before loaders are recreated. An error skips the call."""

    def try_out(self, num_steps: int) -> Trial:
        """Run some steps of the current stage with new loaders, then restore all state.

        In `fit`, runs `num_steps` optimizer steps, then as many validation batches. In other stages, runs as many
        batches. Collective: the result is the same on every rank. Ranks do not communicate while steps run.

        Raises:
            ConfigurationError: a loader cannot be created.
            TrainwrightError: another rank failed with an error other than out of memory. An error on this rank is
                raised unchanged.
        """

    def train(self, num_steps: int, *, before_step: Callable[[int], None], after_step: Callable[[float], bool]) -> int:
        """Train some steps, over as many epochs as needed, then restore all state. Collective.

        Args:
            num_steps: maximal number of steps.
            before_step: called before each step with its 0-based index.
            after_step: called after each step with the mean loss over all data of all ranks. True ends the training.
                Reading the loss waits for the device.

        Returns:
            The number of completed steps.
        """


class Run(Protocol):
    """Interface of a run for callbacks, tasks and loggers."""

    # Progress
    state: TrainState
    stage: Stage | None  # None if no stage is running
    sanity_checking: bool
    should_stop: bool  # set it to True to end `fit` after the current step; see also `request_stop`
    interrupted: bool  # Ctrl-C ended the last stage
    training: bool  # training steps run; False during evaluations
    validating: bool  # False during the sanity check
    testing: bool
    predicting: bool
    is_last_batch: bool  # the current or last training micro-batch is the last of its epoch
    received_sigterm: bool  # by this process, during the current fit
    epoch_closes: bool  # in `on_train_epoch_end`: False when a bound was reached within an epoch that can be resumed
    skipped_batches: list[SkippedData]  # training data that was consumed and changed no weight

    # Parts
    callbacks: list[Any]
    loggers: list[Any]
    optimizers: list[Optimizer]
    lr_scheduler_configs: list[SchedulerConfig]
    datamodule: Any  # None without a data module
    train_dataloader: Any
    val_dataloaders: Any
    test_dataloaders: Any
    predict_dataloaders: Any
    # The first callback of its kind, or None
    checkpoint_callback: Any
    early_stopping_callback: Any
    progress_bar_callback: Any
    profiler: Any
    strategy: Any  # the engine
    log_dir: str | None  # folder of the first logger that has one; `default_root_dir` without a logger
    ckpt_path: str | None  # the checkpoint that the current or last stage has loaded
    default_root_dir: str
    accumulate_grad_batches: int  # a callback may change it before an epoch's first group
    count_tokens: bool  # set it in a callback's `setup` to have `state.tokens` counted
    log_every_n_steps: int
    max_epochs: int  # -1: no limit
    max_steps: int  # -1: no limit
    min_epochs: int | None
    min_steps: int | None
    precision: str
    num_nodes: int
    node_rank: int
    num_devices: int  # processes on this node
    fast_dev_run: bool | int
    barebones: bool

    @property
    def task(self) -> torch.nn.Module:
        """The user's task."""

    @property
    def fit_loop(self) -> Any:
        """The limits and the progress of a fit under the names of Lightning's loops."""

    @property
    def checkpoint_dir(self) -> Path:
        """Folder for checkpoints whose save request has no folder. The same on every rank during a stage."""

    @property
    def last_step(self) -> StepResult | None:
        """Result of the last optimizer step. None before the first."""

    @property
    def current_epoch(self) -> int:
        """`state.epoch`."""

    @property
    def global_step(self) -> int:
        """`state.step`: completed optimizer steps."""

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of one training epoch on one rank; infinite if unknown."""

    @property
    def train_batch_size(self) -> int | None:
        """Samples in a micro-batch of this rank's loader; None if unknown. Creates the loader if it is missing."""

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader on one rank."""

    @property
    def num_eval_batches(self) -> list[int | float]:
        """Batches of each loader of the current evaluation (validation, test or prediction)."""

    def batch_indices(self, dataloader_idx: int) -> Iterator[list[int]] | None:
        """Yield the data set indices of each of this rank's batches in the current evaluation, without fetching data.

        None if the user's own sampler or data set determines the indices.
        """

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Total number of optimizer steps of `fit`; infinite without a bound."""

    @property
    def has_validation(self) -> bool:
        """True if `fit` validates: there are a validation_step and a loader, and the limit is above 0."""

    # Numbers
    @property
    def callback_metrics(self) -> Mapping[str, MetricValue]:
        """The latest value of every logged metric.

        Reading this property fetches values that were logged since the last flush, which waits for the device. Never
        communicates: between two flushes, each rank reads its own values. In `on_*_epoch_end`, the aggregates of the
        epoch are included.
        """

    @property
    def logged_metrics(self) -> Mapping[str, MetricValue]:
        """The latest value of every metric sent to the loggers."""

    @property
    def progress_bar_metrics(self) -> Mapping[str, float]:
        """The latest value of every metric logged with `prog_bar=True`.

        Within a step these are the values of the last flush. In `on_*_epoch_end`, the aggregates of the epoch are
        included.
        """

    def log_metric(self, name: str, value: object, options: Mapping[str, Any]) -> None:
        """Log a value of a task or callback; see `TaskModule.log` for the options. Never communicates."""

    def log_now(self, metrics: Mapping[str, float]) -> None:
        """Send host-side numbers of a callback to the loggers, on the main rank.

        Within a fit, they are logged at the 0-based index of the last completed step. A number under the name `"step"`
        replaces this index.
        """

    def show_now(self, metrics: Mapping[str, float]) -> None:
        """Add host-side numbers of a callback to `callback_metrics`. Every rank should pass the same numbers."""

    # Processes
    @property
    def global_rank(self) -> int:
        """Rank among all processes."""

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this node."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    @property
    def is_global_zero(self) -> bool:
        """True on the main process, the only one that writes files and prints."""

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""

    def broadcast(self, value: object, src: int = 0) -> Any:
        """Return the `value` of rank `src` on every rank. Collective. For small picklable objects on the host."""

    def barrier(self) -> None:
        """Wait for every rank. Collective."""

    # Requests
    def at_step_end(self, action: Callable[[], None]) -> None:
        """Call `action` once at the end of the current step, when all metrics of the step are known.

        This is after the step's validation, and at an epoch's end after `on_train_epoch_end`. `callback_metrics` is
        then up to date, because pending actions make the Trainer flush first. Actions run in the order of their
        requests. They run before requested checkpoints are written, so they may request a checkpoint or a stop. Actions
        and checkpoints requested in `on_train_end` are executed right after it. Every rank must make the same request.
        """

    def request_save(self, request: SaveRequest) -> None:
        """Request a checkpoint at the end of the current step. Every rank must make the same request."""

    def wrote_into(self, folder: Path) -> bool:
        """Return whether `folder` and its checkpoint index contain a checkpoint of this run. Not collective."""

    def remote_names(self, url: str) -> list[str]:
        """Return the names of the folders directly below a URL on every rank. Only rank 0 requests them. Collective.

        Raises:
            CheckpointError: the service cannot be reached or denies access. Raised on every rank.
        """

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Mapping[str, Any] | None = None
    ) -> Path:
        """Write a checkpoint now, and return its local folder. Collective.

        Call this method from a hook between two training steps, not within a step.
        """

    def emergency_save(self, request: SaveRequest) -> None:
        """Write a checkpoint from `on_exception`, on the main rank and without communication.

        The checkpoint is written only if the state is not sharded and no optimizer was stepping. Otherwise the reason
        is reported. An error while writing is reported, not raised, so that it does not hide the exception that ended
        the run.
        """

    def request_stop(self, reason: str, *, closes_epoch: bool = True) -> None:
        """End the run after the current step, but not before min_epochs and min_steps are reached. Every rank must make
        the same request.

        Args:
            reason: reported if the stop is delayed by min_epochs or min_steps.
            closes_epoch: validate the interrupted epoch and count it as finished, as with `should_stop`. With False, a
                resume continues the epoch, as after a limit such as `max_steps`. Default: True.
        """

    def request_rollback(self, reason: str, *, before_step: int) -> None:
        """Roll back, at the end of the current step, to this run's newest checkpoint with at most `before_step` steps.

        The run continues from the checkpoint in this process and skips the data consumed since then (see
        `skipped_batches`). Callbacks receive the calls of a resume: `setup`, `load_state_dict`, `on_fit_start` and
        `on_train_start`. Pending requests are discarded. Without such a checkpoint training continues, with a warning.
        Every rank must make the same request.

        Raises:
            RollbackError: the run has already rolled back `max_rollbacks` times. Raised at the end of the step.
        """

    def print(self, *values: object, **options: object) -> None:
        """Print on the main process, without breaking the progress bar. `options` are those of Python's print."""

    def pass_training_data(self) -> None:
        """Run `training_step` on one epoch of this rank's training data, without gradients and without logging.

        Modes of modules are not changed. Generators are restored. Call it in `on_train_end`, on every rank, to collect
        statistics of a forward pass. Ranks communicate only if the task's code does.
        """

    def trial_steps(self, *, alone: bool, remakes_loaders: bool = False) -> AbstractContextManager[TrialSteps]:
        """Run trial steps and undo all their changes afterwards. Collective.

        Weights, buffers, optimizers, schedules, generators, `state`, metrics and the task's attributes are copied to
        host memory and restored (see `trainwright.trainer.search.state_snapshot` for the limits). Callbacks are not
        called, loggers are disabled, and requests for checkpoints are discarded. The task's own hooks run.

        Args:
            alone: True runs the steps of each rank without communication, so that a failing rank does not block others.
            remakes_loaders: create new loaders for each trial and after the trials, because loader arguments change.
                Default: False.

        Raises:
            ConfigurationError: a training step is running, the strategy cannot run steps on a single rank, or
                `remakes_loaders` is set but loaders were passed to the Trainer.
        """

    # Manual optimization
    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward with the strategy's precision and gradient averaging. Collective."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Disable gradient synchronization of `manual_backward` within the context."""

    def clip_gradients(self, optimizer: Optimizer, max_value: float | None, algorithm: str | None) -> None:
        """Clip the gradients of one optimizer's parameters; see `TaskModule.clip_gradients`."""

    def task_optimizers(self) -> Sequence[Any]:
        """Return the optimizers that `TaskModule.optimizers` returns in manual optimization."""

    def gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of a task's parameter or buffer, or of a tensor that is sharded like one of these.

        An unsharded tensor is returned unchanged. For a sharded tensor the call is collective, and returns a copy on
        the host that has values on the main process only.
        """

    def cut_like(self, value: object, like: torch.Tensor) -> Any:
        """Return this process's shard of a full tensor, sharded like the tensor `like` of the task. Not collective."""

    def all_gather(self, data: object, sync_grads: bool = False) -> Any:
        """Gather tensors of all data-parallel ranks along a new first dimension. Collective."""


class SequenceSplit(Protocol):
    """Function that splits tensors with full sequences over ranks; see `TaskModule.split_sequences`."""

    def __call__(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's part of a tensor along a dimension. Not collective.

        Raises:
            ConfigurationError: the length of the dimension cannot be split over the ranks.
        """

    def positions(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """Return this rank's positions in a full sequence, ascending (int64). Not collective."""

    def batch(self, batch: object) -> object:
        """Return this rank's part of a batch of transformers' models. Not collective.

        Raises:
            ConfigurationError: the batch is not a dict with the tensor `input_ids` or `inputs_embeds`.
        """
