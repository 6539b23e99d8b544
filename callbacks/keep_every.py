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
    """Intervals of training with one permanent checkpoint each."""

    def __init__(self, every: Length | None) -> None:
        self.names: list[str] = []
        self._every = None if every is None else _parse(every)
        self._at: float | None = None  # progress of the run at the last one, in the interval's unit

    def begin(self, trainer: Run) -> None:
        """Start at the current progress, or at the progress of a loaded state if that is earlier."""
        if self._every is None:
            return
        now = self._progress(trainer)
        self._at = now if self._at is None else min(self._at, now)  # a new run may pass the same intervals again

    def look(self, trainer: Run) -> float | None:
        """Return the progress of the run if an interval has ended since the last permanent checkpoint, else None."""
        if self._every is None:
            return None
        now = self._progress(trainer)
        at = self._at or 0.0
        return now if self._stretch(now) > self._stretch(at) else None

    def keep(self, name: str, at: float) -> None:
        """Add a permanent checkpoint for the interval that has ended at `at`."""
        self.names.append(name)
        self._at = at

    def forget(self, names: set[str]) -> None:
        """Remove entries of checkpoints that no longer exist."""
        self.names = [name for name in self.names if name not in names]

    def state_dict(self) -> dict[str, Any]:
        """Return the names and the progress, serializable as JSON."""
        return {"names": self.names, "unit": None if self._every is None else self._every.unit, "at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`. An interval whose unit has changed starts at the current progress."""
        self.names = list(state["names"])
        same = self._every is not None and state["unit"] == self._every.unit
        self._at = state["at"] if same else None

    def _stretch(self, progress: float) -> int:
        assert self._every is not None  # `look` asks for it
        return math.floor(progress / self._every.value + 1e-9)  # 0.3 / 0.1 is a little less than 3

    def _progress(self, trainer: Run) -> float:
        if self._every is None:
            return 0.0
        if self._every.unit != "epochs":
            return self._every.elapsed(trainer.state)
        state = trainer.state
        total = trainer.num_training_batches
        # At an epoch's end the epoch counter has not increased yet, but all of its batches are done.
        return state.epoch + (state.batch_in_epoch / total if 0 < total < math.inf else float(state.epoch_done))


def _parse(every: Length) -> Duration:
    if isinstance(every, bool):
        raise ConfigurationError(f"ModelCheckpoint(keep_every={every}): write a length, such as '1000 steps'.")
    length = Duration(every, "steps") if isinstance(every, int) else Duration(every)
    if length.value <= 0:
        raise ConfigurationError(
            f"ModelCheckpoint(keep_every={every!r}): write a length above 0, such as '1000 steps', or None."
        )
    return length
