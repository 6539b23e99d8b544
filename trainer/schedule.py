"""Schedules for validation and for the end of a fit."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING

from trainwright.callbacks.agreed_clock import AgreedClock
from trainwright.core.duration import Duration, Interval
from trainwright.core.errors import ConfigurationError
from trainwright.core.run import Run
from trainwright.core.state import TrainState

if TYPE_CHECKING:
    from trainwright.trainer.configuration.lengths import Limits


class ValidationSchedule:
    """Schedule that decides after each step whether a validation is due.

    Args:
        interval: number of micro-batches of one rank, fraction of an epoch (1.0: at its end), or a Duration.
        every_n_epoch: validate in every n-th epoch only. None validates in every epoch, and counts micro-batches over
            epochs instead of from the start of each epoch.
        num_batches: micro-batches of an epoch; None if unknown.

    Raises:
        ConfigurationError: a number of micro-batches, counted from the start of each epoch, is larger than an epoch. Or
            the interval is a fraction of an epoch of unknown length.
    """

    def __init__(self, interval: int | float | Duration, every_n_epoch: int | None, num_batches: int | None) -> None:
        self._every_n_epoch = every_n_epoch
        self._num_batches = num_batches
        # Exactly one of these five is set. It is the unit of the interval:
        self._at_epoch_end = False
        self._batches = 0  # micro-batches, also for a fraction of an epoch
        self._epochs: float | None = None
        self._interval: Interval | None = None  # steps, samples, tokens, or batches, as in "500 batches"
        self._clock: AgreedClock | None = None  # seconds
        # Only for seconds, of `state.seconds`: the interval, and the time at which the next validation is due.
        self._span_s = 0.0
        self._next_s = 0.0
        self._run: Run | None = None  # None until `align`
        if isinstance(interval, Duration):
            self._set_duration(interval)
        elif isinstance(interval, float):
            if interval == 1.0:
                self._at_epoch_end = True
            elif num_batches is None:
                raise _without_length(interval)
            else:
                self._batches = max(1, int(num_batches * interval))
        else:
            if every_n_epoch is not None and num_batches is not None and interval > num_batches:
                raise ConfigurationError(
                    f"val_check_interval={interval} batches, but an epoch has {num_batches}, so validation would "
                    f"never run. Use at most {num_batches}, or check_val_every_n_epoch=None to count batches over "
                    "epochs."
                )
            self._batches = interval

    def _set_duration(self, interval: Duration) -> None:
        if interval.unit == "epochs":
            if self._num_batches is None and not float(interval.value).is_integer():
                raise _without_length(f"'{interval}'")
            self._epochs = interval.value
        elif interval.unit == "seconds":
            self._span_s = interval.value
            self._clock = AgreedClock(self._remaining_s)
        else:
            self._interval = Interval(interval)

    def align(self, trainer: Run) -> None:
        """Begin at the current progress: the next multiple of the interval is due first. Later calls have no effect."""
        if self._run is not None:
            return
        self._run = trainer
        if self._interval is not None:
            self._interval.align(trainer.state)
        if self._clock is not None:
            self._next_s = (trainer.state.seconds // self._span_s + 1) * self._span_s
            self._clock.start(trainer)

    @property
    def num_batches_between(self) -> int | float | None:
        """Micro-batches between two validations; infinite if an epoch's length is unknown, None for a Duration."""
        if self._at_epoch_end:
            return math.inf if self._num_batches is None else self._num_batches
        return self._batches or None

    def in_epoch(self, epoch: int) -> bool:
        """Return whether the 0-based `epoch` has validations."""
        return self._every_n_epoch is None or (epoch + 1) % self._every_n_epoch == 0

    def due(self, state: TrainState, group_size: int, is_last: bool) -> bool:
        """Return whether a validation is due after a step of `group_size` micro-batches, already counted in `state`.

        An interval that ends within the step is due at the step's end. `is_last` marks the last step of an epoch. A
        validation that becomes due in an epoch without validations is omitted. For an interval in seconds rank 0's
        clock decides, and some calls are collective (see `AgreedClock`).
        """
        # The calls of `due` and `_time_is_up` come first: they move the due time, also in an epoch without validations,
        # and the clock is collective.
        if self._interval is not None:
            return self._interval.due(state) and self.in_epoch(state.epoch)
        if self._clock is not None:
            return self._time_is_up(state) and self.in_epoch(state.epoch)
        return self._ends_in_step(state, group_size, is_last)

    def outstanding(self, state: TrainState, group_size: int, is_last: bool) -> bool:
        """Return whether a validation is due at the current step, without changing the schedule.

        Not collective, and therefore always False for an interval in seconds.
        """
        if self._clock is not None:
            return False
        if self._interval is not None:
            return self._interval.left(state) <= 0 and self.in_epoch(state.epoch)
        return self._ends_in_step(state, group_size, is_last)

    def _ends_in_step(self, state: TrainState, group_size: int, is_last: bool) -> bool:
        """Return whether an interval in micro-batches or epochs ends in the step that `state` counts last."""
        if not self.in_epoch(state.epoch):
            return False
        if self._at_epoch_end:
            return is_last
        if self._epochs is not None:
            return self._epochs_end_in_step(state, group_size, is_last)
        # An interval of 10, a step from micro-batch 8 to 12: 12 // 10 = 1 interval has ended, and 0 before the step.
        after = self._counted_batches(state)
        return after // self._batches > (after - group_size) // self._batches

    def _epochs_end_in_step(self, state: TrainState, group_size: int, is_last: bool) -> bool:
        """Return whether an interval in epochs ends in the step that `state` counts last."""
        assert self._epochs is not None  # checked by the caller
        if self._num_batches is None:  # then the interval is a whole number of epochs
            return is_last and (state.epoch + 1) % self._epochs == 0
        batches_per_interval = self._epochs * self._num_batches
        after = state.epoch * self._num_batches + state.batch_in_epoch
        # The tolerance corrects rounding: three times a third of 30 batches must give 30.
        num_ended = int(after / batches_per_interval + 1e-9)
        num_ended_before = int((after - group_size) / batches_per_interval + 1e-9)
        return num_ended > num_ended_before

    def _counted_batches(self, state: TrainState) -> int:
        """Return the micro-batches that an interval in micro-batches counts: of the run, or of the current epoch."""
        return state.batches if self._every_n_epoch is None else state.batch_in_epoch

    def groups_left(self, state: TrainState, accumulate: int) -> float:
        """Return the number of steps of `accumulate` micro-batches until `due` must be called again.

        The end of an epoch is always checked and not counted here.
        """
        if self._interval is not None and self._interval.counts_steps:
            return self._interval.left(state)
        if self._at_epoch_end:
            return math.inf
        if self._batches and not self.in_epoch(state.epoch):
            return math.inf
        if self._batches:
            # An interval of 10, 13 micro-batches so far, groups of 4: 7 are left, which the second group reaches.
            batches_left = self._batches - self._counted_batches(state) % self._batches
            return math.ceil(batches_left / accumulate)
        return 1  # other units are checked after every step

    def _remaining_s(self) -> float:
        """Return the seconds until the next validation is due, by this rank's clock."""
        return float("inf") if self._run is None else self._next_s - self._run.state.seconds

    def _time_is_up(self, state: TrainState) -> bool:
        """Return whether an interval in seconds has ended. If so, the next multiple of the interval is due next."""
        if self._clock is None or self._run is None or not self._clock.is_up(self._run):
            return False
        self._next_s = (state.seconds // self._span_s + 1) * self._span_s
        return True


def _without_length(interval: object) -> ConfigurationError:
    return ConfigurationError(
        f"val_check_interval={interval} is a fraction of an epoch, but the training loader has no length. Use 1.0 (at "
        "the epoch's end), a number of batches, or a duration such as '500 steps'."
    )


class Stop(IntEnum):
    """Stop requests, in increasing order of priority."""

    NOT = 0
    WITHIN_EPOCH = 1  # a resume continues the interrupted epoch
    AND_CLOSE_EPOCH = 2  # the interrupted epoch counts as complete, so a resume begins the next one


class EndOfFit:
    """Conditions for the end of a fit: its limits, and the minimum before an early stop.

    Attributes:
        is_checked_every_step: True if there are limits in samples, tokens or seconds, for which the number of steps
            left is unknown.
    """

    def __init__(self, limits: Limits) -> None:
        self._max_epochs = limits.max_epochs if limits.max_epochs is not None else float("inf")
        self._max_steps = limits.max_steps if limits.max_steps != -1 else float("inf")
        self._counted = tuple(limit for limit in limits.others if limit.unit != "seconds")  # samples, tokens
        self._timed = tuple(limit for limit in limits.others if limit.unit == "seconds")
        self._limits = limits
        self.is_checked_every_step = bool(limits.others)

    def steps_left(self, state: TrainState) -> float:
        """Return the number of steps left until `max_steps`; infinite without this limit."""
        return self._max_steps - state.step

    def reached(self, state: TrainState) -> bool:
        """Return whether a limit is reached, except limits in seconds, which differ between ranks."""
        if state.step >= self._max_steps or state.epoch >= self._max_epochs:
            return True
        return any(limit.reached(state) for limit in self._counted)

    def reached_by(self, state: TrainState, num_batches: int | None) -> str:
        """Return a message that names the reached limits, including this rank's clock; empty if none is reached.

        `num_batches` is the number of micro-batches of an epoch, or None. 0 counts as a limit that is reached.
        """
        if num_batches == 0:
            return "limit_train_batches=0"
        reached = []
        if state.epoch >= self._max_epochs:
            reached.append(f"max_epochs={self._limits.max_epochs}")
        if state.step >= self._max_steps:
            reached.append(f"max_steps={self._limits.max_steps}")
        for limit in (*self._counted, *self._timed):
            if limit.reached(state):
                reached.append(f"the limit of {limit}")
        if not reached:
            return ""
        return f"{' and '.join(reached)} is reached at epoch {state.epoch}, step {state.step}"

    def stop_request(self, state: TrainState, requested: Stop) -> Stop:
        """Return this rank's stop request: `requested`, or `WITHIN_EPOCH` if its time limit is reached."""
        if any(limit.reached(state) for limit in self._timed):
            return max(requested, Stop.WITHIN_EPOCH)
        return requested

    def may_stop_early(self, state: TrainState) -> bool:
        """Return whether `min_epochs` and `min_steps` are reached."""
        return state.epoch >= self._limits.min_epochs and state.step >= self._limits.min_steps
