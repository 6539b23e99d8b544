"""Detect jumps of the training loss, and warn, stop, or roll back to an earlier checkpoint."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainwright.callbacks.callback import Callback
from trainwright.callbacks.monitored import from_main_rank
from trainwright.core.errors import ConfigurationError, TrainwrightWarning, nearest
from trainwright.core.run import Run, Stage
from trainwright.core.state import StepResult
from trainwright.core.task import TaskModule

Action = Literal["warn", "stop", "rollback"]
_ACTIONS = ("warn", "stop", "rollback")
_TO_SIGMA = 1.4826  # of a normal distribution, the standard deviation over the median absolute deviation
_FLOOR = 0.01  # of the median: a lower bound for losses with very little noise


@dataclass(frozen=True, slots=True)
class _Spikes:
    """Consecutive spikes that reached `patience`."""

    first_step: int  # completed steps, with the step of the first spike
    last_loss: float
    bound: float  # the largest loss that would not have been a spike at the last one


class LossSpikeDetector(Callback):
    """Callback that detects steps whose training loss is far above the previous ones.

    A step's loss is a spike when

        loss > median + threshold × max(1.4826 × MAD, 0.01 × |median|)

    or when it is NaN or infinite. Median and MAD (median absolute deviation) are those of the previous `window` finite
    losses, so that single outliers have little effect. NaN and infinity are detected from the first loss. Detection of
    large losses starts after half a window of losses.

    The loss is that of the full step, over micro-batches and ranks. Losses stay on the device. After every
    `log_every_n_steps` steps, and at the end of an epoch, all new losses are read at once, and spikes are detected.
    Rank 0 decides.

    Args:
        window: number of losses for median and MAD; at least 4. Default: 100.
        threshold: how many (robust) standard deviations above the median are a spike. Default: 8.0.
        patience: act after this many consecutive spikes, so that a single bad batch can be tolerated. More spikes in
            the same row cause no other action. Default: 1.
        action: `"warn"`, `"stop"` or `"rollback"`. `"stop"` requests the end of training. `"rollback"` returns to the
            newest checkpoint from before these spikes and skips all data consumed since then (see
            `Run.request_rollback` and `trainer.skipped_batches`). Configure ModelCheckpoint to keep several checkpoints
            for it. Default: `"warn"`.

    Attributes:
        num_spikes: number of actions. A rollback does not reset it.
        last_spike: 0-based index of the first step that caused the last action; None before the first action.

    Raises:
        ConfigurationError: `window` is below 4, `patience` is below 1, or the action is unknown. In a run: the task
            uses manual optimization.
    """

    reads_only = True

    def __init__(self, window: int = 100, threshold: float = 8.0, patience: int = 1, action: Action = "warn") -> None:
        # A smaller window gives no usable deviation, and would report ordinary steps as spikes.
        if window < 4:
            raise ConfigurationError(f"LossSpikeDetector(window={window!r}): write a whole number of at least 4.")
        # EarlyStopping accepts 0. Here the number of consecutive spikes would never equal it.
        if patience < 1:
            raise ConfigurationError(f"LossSpikeDetector(patience={patience!r}): write a whole number of at least 1.")
        if action not in _ACTIONS:
            raise ConfigurationError(
                f"LossSpikeDetector(action={action!r}): unknown.{nearest(str(action), _ACTIONS)} Write 'warn', 'stop' "
                "or 'rollback'."
            )
        self.window = window
        self.threshold = float(threshold)
        self.patience = patience
        self.action = action
        self.num_spikes = 0
        self.last_spike: int | None = None
        self._losses: deque[float] = deque(maxlen=window)  # the latest finite losses, including spikes
        self._in_a_row = 0  # consecutive spikes up to the last loss that was read
        self._first_of_row = 0  # completed steps, with the step of the first of these spikes
        # Steps that have not been read: the number of completed steps, and the loss on the device.
        self._unread: list[tuple[int, torch.Tensor]] = []

    @property
    def state_key(self) -> str:
        return (
            f"LossSpikeDetector(window={self.window}, threshold={self.threshold}, patience={self.patience}, "
            f"action={self.action!r})"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the losses that have been read. Losses that are still on the device are not included."""
        return {
            "losses": list(self._losses),
            "in_a_row": self._in_a_row,
            "first_of_row": self._first_of_row,
            "num_spikes": self.num_spikes,
            "last_spike": self.last_spike,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._unread = []
        self._losses = deque(state_dict["losses"], maxlen=self.window)
        self._in_a_row = state_dict["in_a_row"]
        self._first_of_row = state_dict["first_of_row"]
        if state_dict["num_spikes"] >= self.num_spikes:  # else this run has rolled back
            self.num_spikes = state_dict["num_spikes"]
            self.last_spike = state_dict["last_spike"]

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        self._unread = []
        # A new run: the callback may have been used in an earlier one, whose losses say nothing about this one. In a
        # resumed run `load_state_dict` sets these attributes after `setup`.
        if stage == "fit" and trainer.state.step == 0:
            self._losses.clear()
            self._in_a_row = 0
            self.num_spikes = 0
            self.last_spike = None
        if stage == "fit" and not task.automatic_optimization:
            raise ConfigurationError(
                f"LossSpikeDetector monitors the losses that training_step returns, and {type(task).__name__} uses "
                "manual optimization (automatic_optimization is False). Remove it, and check the loss in "
                "training_step."
            )

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        if result.loss is None:  # a skipped group
            return
        step = trainer.state.step
        self._unread.append((step, result.loss))
        if step % trainer.log_every_n_steps == 0:
            self._check(trainer)

    def on_train_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        self._check(trainer)  # before a checkpoint of the epoch's end is written

    def _check(self, trainer: Run) -> None:
        """Read the losses that are still on the device and act on spikes. Collective; waits for the device."""
        unread = self._unread
        self._unread = []
        if not unread:
            return
        losses = torch.stack([loss.float() for _, loss in unread])
        if trainer.world_size > 1:
            losses = trainer.all_gather(losses).mean(0)  # ranks weight their losses for this mean
        spikes = self._find_spikes([step for step, _ in unread], losses.tolist())
        spikes = from_main_rank(trainer, spikes)
        if spikes is not None:
            self._act(trainer, spikes)

    def _find_spikes(self, steps: list[int], losses: list[float]) -> _Spikes | None:
        """Add losses and return the first `patience` consecutive spikes, if any."""
        spikes = None
        for step, loss in zip(steps, losses, strict=True):
            bound = self._bound()  # of the losses before this one
            is_finite = math.isfinite(loss)
            if is_finite:
                self._losses.append(loss)
            if is_finite and loss <= bound:
                self._in_a_row = 0
                continue
            self._in_a_row += 1
            if self._in_a_row == 1:
                self._first_of_row = step
            if self._in_a_row == self.patience and spikes is None:
                spikes = _Spikes(first_step=self._first_of_row, last_loss=loss, bound=bound)
        return spikes

    def _bound(self) -> float:
        """Return the largest loss that is not a spike."""
        if len(self._losses) < self.window // 2:
            return math.inf
        median = statistics.median(self._losses)
        mad = statistics.median(abs(loss - median) for loss in self._losses)
        return median + self.threshold * max(_TO_SIGMA * mad, _FLOOR * abs(median))

    def _act(self, trainer: Run, spikes: _Spikes) -> None:
        # `first_step` counts completed steps, so the 0-based index of that step is one less.
        index = spikes.first_step - 1
        self.num_spikes += 1
        self.last_spike = index
        later = ""
        if self.patience > 1:
            later = f" and was still high {self.patience - 1} step(s) later"
        message = f"LossSpikeDetector: the training loss jumped at step {index}{later}: {spikes.last_loss:.5g}"
        if math.isfinite(spikes.bound):
            message += f", above {spikes.bound:.5g}"
        if self.action == "rollback":
            trainer.request_rollback(message, before_step=index)
            return
        if trainer.is_global_zero:
            warnings.warn(f"{message}.", TrainwrightWarning, stacklevel=2)
        if self.action == "stop":
            trainer.request_stop(message)
