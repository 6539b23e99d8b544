"""What a callback, a task or a logger may see of a run, and ask of it: the `Run` protocol.

`Trainer` implements it. Whoever is written against `Run` works under any trainer and can be tested without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.optim import Optimizer

from trainwright.core.state import SkippedData, StepResult, TrainState

Stage = Literal["fit", "validate", "test", "predict"]


@dataclass(slots=True)
class SchedulerConfig:
    """One learning-rate schedule and when it steps.

    Attributes:
        scheduler: the torch scheduler (anything with `step`, `state_dict` and `load_state_dict`).
        interval: `"step"` (completed optimizer steps) or `"epoch"`.
        frequency: it steps after every so many intervals.
        monitor: name of the logged metric that `ReduceLROnPlateau` is given; None for the others.
        strict: a monitored metric that was not logged is an error (True) or a warning (False).
        name: what LearningRateMonitor calls it.
        paused: a callback has put it to rest: it does not step, and keeps its state.
    """

    scheduler: Any
    interval: Literal["step", "epoch"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    paused: bool = False


@dataclass(slots=True)
class SaveRequest:
    """A checkpoint that a callback asks for; written at the next step boundary, or after the epoch's end hooks.

    Attributes:
        name: folder name of the checkpoint, relative to `folder`.
        folder: where; the run's checkpoint folder when None.
        weights_only: leave the optimizer, progress and generators out.
        metrics: the values that retention and `best` go by.
        remove: folder names of earlier checkpoints of this run, deleted once this one stands.
        remote: URL of a folder to which the checkpoint is uploaded once it stands; what `remove` names is deleted
            there too. That of the run's ModelCheckpoint, if it has one, when `folder` is None.
        link: name of a relative symbolic link in the same folder that is put to this checkpoint once it stands.
        fresh: the name was free when it was chosen. What lies there once the checkpoint is complete was written by
            another run, and stays: the save is an error.

    Unless it is `fresh`, a `name` that exists already is replaced once the new checkpoint is complete.
    """

    name: str
    folder: Path | None = None
    weights_only: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    remove: list[str] = field(default_factory=list)
    link: str | None = None
    remote: str | None = None
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """How steps that were tried out ended, on all ranks together."""

    fits: bool  # memory was enough on every rank
    batch_size: int | None  # samples that this rank's loader puts into a batch; None when it does not tell
    reason: str  # what the first rank that ran out of memory said; empty when `fits`


class Rehearsal(Protocol):
    """Steps that are tried out within a run and leave no trace in it; see `Run.rehearse`."""

    def capacity(self) -> int | None:
        """Return the largest batch that the data can fill on every rank; None when its length is unknown."""

    def at_end(self, action: Callable[[], None]) -> None:
        """Call `action` once everything is put back in the end, before loaders are made anew; not after an error."""

    def try_out(self, num_steps: int) -> Trial:
        """Run some steps of the present stage with loaders made anew, and put everything back.

        In `fit` these are optimizer steps and then as many validation batches, otherwise batches. Collective: every
        rank calls it, and all hear the same answer; nothing is communicated while steps run.

        Raises:
            ConfigurationError: the loader cannot be made.
            TrainwrightError: another rank failed otherwise than by its memory. What failed on this rank is raised here.
        """

    def train(self, num_steps: int, *, before_step: Callable[[int], None], after_step: Callable[[float], bool]) -> int:
        """Train some steps, over as many epochs as it takes, and put everything back.

        Args:
            num_steps: at most so many.
            before_step: called before each with its 0-based index.
            after_step: called after each with its loss, the mean over everything that all ranks consumed; True ends
                it. Reading the loss waits for the device.

        Returns:
            How many steps ran. Collective.
        """


class Run(Protocol):
    """A run as seen from a callback, a task or a logger."""

    # Where it stands
    state: TrainState
    stage: Stage | None
    sanity_checking: bool
    should_stop: bool
    interrupted: bool
    epoch_closes: bool  # in `on_train_epoch_end`: False when a bound was reached within an epoch that can be resumed
    skipped_batches: list[SkippedData]  # training data that was consumed and changed no weight

    # What it is made of
    callbacks: list[Any]
    loggers: list[Any]
    optimizers: list[Optimizer]
    lr_scheduler_configs: list[SchedulerConfig]
    datamodule: Any
    default_root_dir: Path
    accumulate_grad_batches: int  # a callback may change it before an epoch's first group
    count_tokens: bool  # set it in a callback's `setup` to have `state.tokens` counted
    log_every_n_steps: int
    max_epochs: int | None
    max_steps: int
    fast_dev_run: bool | int
    barebones: bool

    @property
    def task(self) -> torch.nn.Module:
        """The user's task."""

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints go when a request names no folder; the same on every rank during a stage."""

    @property
    def last_step(self) -> StepResult | None:
        """What the last optimizer step gave; None before the first."""

    @property
    def current_epoch(self) -> int:
        """`state.epoch`."""

    @property
    def global_step(self) -> int:
        """`state.step`: completed optimizer steps."""

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of one training epoch on one rank; infinite when the loader has no length."""

    @property
    def train_batch_size(self) -> int | None:
        """Samples that this rank's loader puts into a micro-batch; None when it does not tell. Loads the data."""

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader on one rank."""

    @property
    def num_eval_batches(self) -> list[int | float]:
        """Batches of each loader of the evaluation that is running (validation, test or prediction)."""

    def batch_indices(self, dataloader_idx: int) -> Iterator[list[int]] | None:
        """Return the places in the data set of this rank's batches, of the evaluation that runs, from its start on.

        Computed, not fetched; None where only the user's own sampler or data set knows them.
        """

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps that `fit` will do in all; infinite when nothing bounds them."""

    @property
    def has_validation(self) -> bool:
        """Whether `fit` validates at all (a validation_step, a loader and a limit above 0)."""

    # Numbers
    @property
    def callback_metrics(self) -> Mapping[str, float]:
        """The latest value of every logged metric; reading it fetches what was logged since the last flush.

        That waits for the device, once for whoever looks, and never communicates: between two flushes a rank reads its
        own values. In `on_*_epoch_end` the epoch's aggregates are there too.
        """

    @property
    def logged_metrics(self) -> Mapping[str, float]:
        """The latest value of every metric that went to the loggers."""

    @property
    def progress_bar_metrics(self) -> Mapping[str, float]:
        """The latest value of every metric logged with `prog_bar=True`."""

    def log_metric(self, name: str, value: object, options: Mapping[str, Any]) -> None:
        """Take a value that a task or callback logs; see `TaskModule.log` for the options. Never communicates."""

    def log_now(self, metrics: Mapping[str, float]) -> None:
        """Send host-side numbers to the loggers at the present step, on the main rank; for callbacks' own figures."""

    def show_now(self, metrics: Mapping[str, float]) -> None:
        """Put host-side numbers into `callback_metrics`; for callbacks' own figures. Every rank should do it alike."""

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
        """Whether this is the main process, which alone writes files and prints."""

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""

    def broadcast(self, value: object, src: int = 0) -> Any:
        """Return `value` of rank `src` on every rank. Collective; small picklable objects, on the host."""

    def barrier(self) -> None:
        """Wait for every rank. Collective."""

    # Wishes
    def at_safe_point(self, action: Callable[[], None]) -> None:
        """Call `action` once, at the end of the present step, when every number of this step is known.

        The safe point of a step is after its validation; at an epoch's end it is after `on_train_epoch_end`. By then
        `callback_metrics` is up to date: waiting actions make the Trainer flush first. Actions run in the order of
        their asking and before the checkpoints that were asked for are written, so that they may still ask for one,
        or for a stop. Asked for in `on_train_end`, they run, and what they ask for is written, right after it. Every
        rank must ask alike.
        """

    def request_save(self, request: SaveRequest) -> None:
        """Ask for a checkpoint at the next safe point. Every rank must ask alike; rank 0's request is written."""

    def remote_names(self, url: str) -> list[str]:
        """Return the names of what lies below a remote folder, on every rank. Collective; rank 0 asks the network.

        Raises:
            CheckpointError: the service cannot be reached or refuses, on every rank.
        """

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Mapping[str, Any] | None = None
    ) -> Path:
        """Write a checkpoint now. Collective; call it from a hook at a step boundary, not inside a training step."""

    def emergency_save(self, request: SaveRequest) -> None:
        """Write a checkpoint from `on_exception`, as well as one process can.

        No communication: only the main rank writes, only when its own state is whole (no shards elsewhere) and no
        optimizer was stepping; otherwise it says why not. An error while writing is reported, not raised, so that it
        does not hide the exception that ended the run.
        """

    def request_stop(self, reason: str, *, closes_epoch: bool = True) -> None:
        """End the run after the present step (respecting min_epochs and min_steps). Every rank must ask alike.

        Args:
            reason: said where the stop has to wait.
            closes_epoch: an epoch that this cuts short is validated and counts as finished, as at `should_stop`. False:
                it stays open, as at a bound, and a resume goes on in its middle.
        """

    def request_rollback(self, reason: str, *, before_step: int) -> None:
        """Go back, at the end of the present step, to this run's newest checkpoint of `before_step` steps or fewer.

        The run continues from it as after a resume, in this process, and leaves out what it has consumed since: see
        `skipped_batches`. Callbacks live through it as through a resume: `setup`, `load_state_dict`, `on_fit_start` and
        `on_train_start` are called. What has been asked for and not been done yet is dropped. Without such a checkpoint
        training goes on, with a warning. Every rank must ask alike.

        Raises:
            RollbackError: at that point, when the run has gone back `max_rollbacks` times already.
        """

    def print(self, *values: object, **options: object) -> None:
        """Print on the main process only, without breaking the progress bar; `options` are those of Python's print."""

    def pass_training_data(self) -> None:
        """Run `training_step` on one epoch of this rank's training data, without gradients and without logging.

        Modules keep the mode they are in; generators are afterwards as they were. For use in `on_train_end`, for what
        a forward pass alone measures. Every rank should call it; it communicates only where the task itself does.
        """

    def rehearse(self, *, alone: bool, remakes_loaders: bool = False) -> AbstractContextManager[Rehearsal]:
        """Try steps out: whatever they change is as before afterwards, and nothing is logged, saved or heard of.

        Weights, buffers, optimizers, schedules, generators, `state`, metrics and the task's attributes are kept in host
        memory meanwhile (see `trainwright.trainer.search.rewind` for how far that goes); callbacks hear of nothing,
        loggers are mute, and requests for checkpoints are dropped. The task's own hooks run. Collective.

        Args:
            alone: each rank runs its steps without the others, so that one that fails leaves none of them waiting.
            remakes_loaders: the data's loaders are made anew, then and for what follows, because something that they
                are made from has changed.

        Raises:
            ConfigurationError: the strategy cannot run steps alone; or loaders that are to be made anew were handed to
                the Trainer ready-made.
        """

    # Optimization, for tasks that do it by hand
    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward with the strategy's precision and gradient averaging."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep the gradients of `manual_backward` on this rank for the length of a `with` block."""

    def clip_gradients(self, optimizer: Optimizer, max_value: float | None, algorithm: str | None) -> None:
        """Clip the gradients of one optimizer's parameters."""

    def task_optimizers(self) -> Sequence[Any]:
        """The optimizers as a task that steps them itself should use them."""

    def whole_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return one of the task's tensors, or one cut alike, whole; as it is where nothing is cut.

        Otherwise collective: a copy on the host, whose values the main process alone gets.
        """

    def cut_like(self, value: object, like: torch.Tensor) -> Any:
        """Return this process's piece of a whole tensor, cut as the task's tensor `like` is. Not collective."""

    def all_gather(self, data: object, sync_grads: bool = False) -> Any:
        """Gather tensors of all ranks along a new first dimension. Collective."""
