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
        self._next_check = 0  # completed steps at which ranks communicate next
        # Time and completed steps at this rank's last check, for the pace. Only rank 0's are used.
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
        is_up, steps_until_check = from_main_rank(trainer, self._check(trainer.state.step))
        self._next_check = trainer.state.step + steps_until_check
        return is_up

    def _check(self, step: int) -> tuple[bool, int]:
        """Return whether the time is up by this rank's clock, and the number of steps until the next check."""
        remaining_s = self._remaining_s()
        now_s = time.monotonic()
        num_steps = max(step - self._checked_at_step, 1)
        seconds_per_step = max((now_s - self._checked_at_s) / num_steps, 1e-6)
        self._checked_at_s = now_s
        self._checked_at_step = step
        if remaining_s <= 0:
            return True, 1
        # With 100 s left at 0.5 s per step, the next check is 100 steps later, when about 50 s are left.
        steps_until_check = int(0.5 * remaining_s / seconds_per_step)
        return False, min(max(steps_until_check, 1), MAX_STEPS_BETWEEN_CHECKS)
