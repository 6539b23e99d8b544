"""Checkpoints that are kept permanently, one per interval of training."""

from __future__ import annotations

import datetime
import math
from typing import Any

from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError
from trainwright.core.run import Run

Length = int | str | Duration | datetime.timedelta


class KeepEvery:
    """Intervals of training with one permanent checkpoint each. `every` of None disables them.

    Raises:
        ConfigurationError: the length is not above 0.
    """

    def __init__(self, every: Length | None) -> None:
        self.names: list[str] = []  # permanent checkpoints, oldest first
        self._every = None if every is None else _parse(every)
        # Progress of the run from which the next interval counts, in the interval's unit: at the newest permanent
        # checkpoint, or at `begin` if that is earlier or there is none yet. None before `begin`.
        self._last_progress: float | None = None

    def begin(self, trainer: Run) -> None:
        """Start an interval at the current progress, or at the progress of a loaded state if that is earlier."""
        if self._every is None:
            return
        now = _progress(trainer, self._every)
        if self._last_progress is None:
            self._last_progress = now
        else:
            # A run that starts again from an earlier step passes the same intervals again.
            self._last_progress = min(self._last_progress, now)

    def due_progress(self, trainer: Run) -> float | None:
        """Return the progress of the run if an interval has ended since the last permanent checkpoint, else None."""
        if self._every is None:
            return None
        now = _progress(trainer, self._every)
        last = self._last_progress or 0.0
        # An interval is due once, however many of them passed since the last save.
        if _num_intervals(now, self._every) > _num_intervals(last, self._every):
            return now
        return None

    def add(self, name: str, progress: float) -> None:
        """Add a permanent checkpoint. `progress` is the result of `due_progress`."""
        self.names.append(name)
        self._last_progress = progress

    def remove(self, names: set[str]) -> None:
        """Remove entries of checkpoints that no longer exist."""
        self.names = [name for name in self.names if name not in names]

    def state_dict(self) -> dict[str, Any]:
        """Return the names and the progress, serializable as JSON."""
        unit = None if self._every is None else self._every.unit
        return {"names": self.names, "unit": unit, "at": self._last_progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`. An interval whose unit has changed starts at the current progress."""
        self.names = list(state["names"])
        if self._every is not None and state["unit"] == self._every.unit:
            self._last_progress = state["at"]
        else:
            self._last_progress = None


def _num_intervals(progress: float, every: Duration) -> int:
    # The small addend is for rounding errors: 0.3 / 0.1 is a little less than 3.
    return math.floor(progress / every.value + 1e-9)


def _progress(trainer: Run, every: Duration) -> float:
    state = trainer.state
    if every.unit != "epochs":
        return every.elapsed(state)
    # `Duration.elapsed` counts finished epochs only, and an interval may be a fraction of one. At an epoch's end the
    # epoch counter has not increased yet, but all of its batches are done.
    num_batches = trainer.num_training_batches
    if 0 < num_batches < math.inf:
        return state.epoch + state.batch_in_epoch / num_batches
    return state.epoch + float(state.epoch_done)


def _parse(every: Length) -> Duration:
    length = Duration(every, "steps") if isinstance(every, int) else Duration(every)
    # A length of 0 would divide by zero at the first save.
    if length.value <= 0:
        raise ConfigurationError(
            f"ModelCheckpoint(keep_every={every!r}): write a length above 0, such as '1000 steps', or None."
        )
    return length
