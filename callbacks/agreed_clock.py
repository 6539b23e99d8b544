"""A clock that all ranks agree on without communication at every step."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainwright.callbacks.monitored import from_main_rank
from trainwright.core.run import Run

MAX_STEPS_BETWEEN_CHECKS = 1000


class AgreedClock:
    """Timer that ends at the same step on all ranks, as measured by rank 0's clock.

    With one process the clock is read at every step. With several processes, rank 0 broadcasts its clock only at some
    steps, the checks. Each check sets the number of steps (1 to 1000) until the next check, such that half of the
    remaining time will have passed at the current pace. Any duration thus costs about twenty broadcasts of two numbers.
    Other steps cost one comparison.

    Args:
        remaining_s: returns the seconds that are left on this rank; 0 or less ends the timer.
    """

    def __init__(self, remaining_s: Callable[[], float]) -> None:
        self._remaining_s = remaining_s
        self._next_check = 0
        self._checked_at_s = 0.0
        self._checked_at_step = 0

    def start(self, trainer: Run) -> None:
        """Start at the current step, which must be the same on every rank."""
        self._next_check = trainer.state.step + 1
        self._checked_at_step = trainer.state.step
        self._checked_at_s = time.monotonic()

    def is_up(self, trainer: Run) -> bool:
        """Return whether the time is up. Call it after each step. Collective at checks; blocks the host only."""
        if trainer.world_size == 1:
            return self._remaining_s() <= 0
        if trainer.state.step < self._next_check:
            return False
        up, wait = from_main_rank(trainer, self._look(trainer.state.step))
        self._next_check = trainer.state.step + wait
        return up

    def _look(self, step: int) -> tuple[bool, int]:
        remaining_s = self._remaining_s()
        now_s = time.monotonic()
        seconds_per_step = max((now_s - self._checked_at_s) / max(step - self._checked_at_step, 1), 1e-6)
        self._checked_at_s = now_s
        self._checked_at_step = step
        wait = int(0.5 * remaining_s / seconds_per_step) if remaining_s > 0 else 1
        return remaining_s <= 0, min(max(wait, 1), MAX_STEPS_BETWEEN_CHECKS)
