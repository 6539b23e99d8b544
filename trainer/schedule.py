"""When a fit ends and when it validates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.core.duration import Duration, Interval
from trainwright.core.errors import ConfigurationError
from trainwright.core.state import TrainState

if TYPE_CHECKING:
    from trainwright.trainer.settings import Limits


class ValidationSchedule:
    """Tells after each group of micro-batches whether a validation is due.

    Args:
        interval: a number of batches, a fraction of an epoch (1.0: at its end), or a Duration.
        every_n_epoch: only in every so many epochs; None: batches are counted over epochs.
        num_batches: micro-batches of an epoch; None when unknown.

    Raises:
        ConfigurationError: an interval that an epoch cannot hold.
    """

    def __init__(self, interval: int | float | Duration, every_n_epoch: int | None, num_batches: int | None) -> None:
        self._every_n_epoch = every_n_epoch
        self._at_end = False
        self._batches = 0
        self._interval: Interval | None = None
        if isinstance(interval, Duration):
            self._interval = Interval(interval)
        elif isinstance(interval, float):
            if interval == 1.0:
                self._at_end = True
            elif num_batches is None:
                raise ConfigurationError(
                    f"val_check_interval={interval} is a fraction of an epoch, but the training loader has no length. "
                    "Use 1.0 (at the epoch's end), a number of batches, or a length such as '500 steps'."
                )
            else:
                self._batches = max(1, int(num_batches * interval))
        else:
            if every_n_epoch is not None and num_batches is not None and interval > num_batches:
                raise ConfigurationError(
                    f"val_check_interval={interval} batches, but an epoch has {num_batches}: it would never validate. "
                    f"Use at most {num_batches}, or check_val_every_n_epoch=None to count batches over epochs."
                )
            self._batches = interval

    def align(self, state: TrainState) -> None:
        """Count on from the next multiple after `state`."""
        if self._interval is not None:
            self._interval.align(state)

    def in_epoch(self, epoch: int) -> bool:
        """Tell whether 0-based `epoch` has validations at all."""
        return self._every_n_epoch is None or (epoch + 1) % self._every_n_epoch == 0

    def due(self, state: TrainState, group_size: int, is_last: bool) -> bool:
        """Tell whether a validation is due after a group of `group_size` micro-batches that `state` counts already.

        An interval that ended inside the group is honoured at its end.
        """
        if self._interval is not None:
            return self._interval.due(state) and self.in_epoch(state.epoch)
        if not self.in_epoch(state.epoch):
            return False
        if self._at_end:
            return is_last
        now = state.batches if self._every_n_epoch is None else state.batch_in_epoch
        return now // self._batches > (now - group_size) // self._batches


class EndOfFit:
    """Tells whether a fit has reached one of its bounds, or may heed a wish to stop."""

    def __init__(self, limits: Limits) -> None:
        self._max_epochs = limits.max_epochs if limits.max_epochs is not None else float("inf")
        self._max_steps = limits.max_steps if limits.max_steps != -1 else float("inf")
        self._counted = tuple(limit for limit in limits.others if limit.unit != "seconds")
        self._timed = tuple(limit for limit in limits.others if limit.unit == "seconds")
        self._limits = limits
        self.counts_tokens = any(limit.unit == "tokens" for limit in limits.others)
        self.counts_samples = any(limit.unit == "samples" for limit in limits.others)

    def reached(self, state: TrainState) -> bool:
        """Tell whether a bound that every rank counts alike is reached."""
        if state.step >= self._max_steps or state.epoch >= self._max_epochs:
            return True
        return any(limit.reached(state) for limit in self._counted)

    def out_of_time(self, state: TrainState) -> bool:
        """Tell whether this rank's clock says that the time is over; ranks must agree on it."""
        return any(limit.reached(state) for limit in self._timed)

    def may_stop_early(self, state: TrainState) -> bool:
        """Tell whether the minimum of epochs and steps is behind."""
        return state.epoch >= self._limits.min_epochs and state.step >= self._limits.min_steps
