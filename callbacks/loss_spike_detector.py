"""Notice when the training loss jumps, and warn, stop, or go back to a checkpoint from before."""

from __future__ import annotations

import math
import statistics
import warnings
from collections import deque
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
_FLOOR = 0.01  # of the median: losses that hardly scatter are not measured by their noise alone


class LossSpikeDetector(Callback):
    """Watch the training loss of every step for values far above the last ones.

    A step's loss is a spike when

        loss > median + threshold × max(1.4826 × MAD, 0.01 × |median|)

    or when it is NaN or infinite. Median and MAD (the median absolute deviation from it) are taken over the `window`
    finite losses before it, so that single outliers move neither. It judges once half a window of losses is known.

    The loss is that of the whole step, over micro-batches and ranks. It stays on the device and is read after every
    `log_every_n_steps`-th step, all values at once: a spike is noticed at the next such step. Rank 0 decides.

    Args:
        window: over how many losses to take median and MAD; at least 4.
        threshold: how many (robust) standard deviations above the median are a spike.
        patience: act after so many spikes in a row, so that a single bad batch can be passed over.
        action: `"warn"`; `"stop"`: ask for the end of training; `"rollback"`: go back to the newest checkpoint from
            before the first of these spikes, and leave out all data that was consumed since it (see
            `Run.request_rollback`, and `trainer.skipped_batches` for what was left out). The checkpoint must still be
            there: have ModelCheckpoint keep several.

    Attributes:
        num_spikes: how often it has acted; a rollback does not take that back.
        last_spike: 0-based index of the first step of the last one; None before.

    Raises:
        ConfigurationError: a value out of its range, an unknown action; in a run, a task that optimizes by hand.
    """

    reads_only = True

    def __init__(self, window: int = 100, threshold: float = 8.0, patience: int = 1, action: Action = "warn") -> None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 4:
            raise ConfigurationError(f"LossSpikeDetector(window={window!r}): write a whole number of at least 4.")
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold > 0:
            raise ConfigurationError(f"LossSpikeDetector(threshold={threshold!r}): write a number above 0.")
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
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
        self._losses: deque[float] = deque(maxlen=window)
        self._in_a_row = 0
        self._first_of_row = 0
        # Steps that have not been read: the number of completed steps, and the loss on the device.
        self._unread: list[tuple[int, torch.Tensor]] = []

    @property
    def state_key(self) -> str:
        return (
            f"LossSpikeDetector(window={self.window}, threshold={self.threshold}, patience={self.patience}, "
            f"action={self.action!r})"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what has been read; the few losses that still wait on the device are not in it."""
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
        if state_dict["num_spikes"] >= self.num_spikes:  # else it is this run that has gone back
            self.num_spikes, self.last_spike = state_dict["num_spikes"], state_dict["last_spike"]

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        self._unread = []
        if stage == "fit" and not task.automatic_optimization:
            raise ConfigurationError(
                f"LossSpikeDetector sees the losses that training_step returns, and {type(task).__name__} optimizes by "
                "hand (automatic_optimization is False). Drop it, and watch the loss in training_step."
            )

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        if result.loss is None:  # a skipped group, or a task that optimizes by hand
            return
        step = trainer.state.step
        self._unread.append((step, result.loss))
        if step % trainer.log_every_n_steps == 0:
            self._look(trainer)

    def on_train_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        self._look(trainer)  # before a checkpoint of the epoch's end is written

    def _look(self, run: Run) -> None:
        """Read the losses that wait and act on them. Collective; waits for the device."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        losses = torch.stack([loss.float() for _, loss in unread])
        if run.world_size > 1:
            losses = run.all_gather(losses).mean(0)  # a rank's loss is its share of the mean
        found = self._judge([step for step, _ in unread], losses.tolist())
        found = from_main_rank(run, found)
        if found is not None:
            self._act(run, *found)

    def _judge(self, steps: list[int], losses: list[float]) -> tuple[int, float, float] | None:
        """Take losses up; returns the first step of the first row of spikes that is long enough, its loss and bound."""
        found = None
        for step, loss in zip(steps, losses, strict=True):
            bound = self._bound()
            if math.isfinite(loss):
                self._losses.append(loss)
            if math.isfinite(loss) and loss <= bound:
                self._in_a_row = 0
                continue
            self._in_a_row += 1
            if self._in_a_row == 1:
                self._first_of_row = step
            if self._in_a_row == self.patience and found is None:
                found = self._first_of_row, loss, bound
        return found

    def _bound(self) -> float:
        """Return the largest loss that is no spike."""
        if len(self._losses) < self.window // 2:
            return math.inf
        median = statistics.median(self._losses)
        mad = statistics.median(abs(loss - median) for loss in self._losses)
        return median + self.threshold * max(_TO_SIGMA * mad, _FLOOR * abs(median))

    def _act(self, run: Run, first: int, loss: float, bound: float) -> None:
        self.num_spikes += 1
        self.last_spike = first - 1
        above = "" if math.isinf(bound) else f", above {bound:.5g}"
        message = f"LossSpikeDetector: the training loss jumped at step {first - 1}: {loss:.5g}{above}"
        if self.action == "rollback":
            run.request_rollback(message, before_step=first - 1)
            return
        if run.is_global_zero:
            warnings.warn(f"{message}.", TrainwrightWarning, stacklevel=2)
        if self.action == "stop":
            run.request_stop(message)
