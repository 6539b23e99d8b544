"""What ranks tell each other between steps: wishes and signals that only some of them have had."""

from __future__ import annotations

import time

from trainwright.processes.process_group import Processes

_PERIOD_S = 1.0  # how long a wish of one rank may stay unheard


class Agreement:
    """An exchange of a few numbers on the host at counts that all ranks know beforehand.

    At each exchange the slowest rank's pace also says when the next one comes: about a second later, after at least one
    count and at most `at_most`.

    Args:
        processes: this rank among the others.
        at_most: there is an exchange at every multiple of it, however fast the counts go by.
    """

    def __init__(self, processes: Processes, at_most: int) -> None:
        self._processes = processes
        self._at_most = at_most
        self._last = 0
        self._since = time.perf_counter()
        self._next = 1

    def begin(self, count: int) -> None:
        """Start at a count, alike on every rank; the first exchange comes at the next one."""
        self._last, self._next, self._since = count, count + 1, time.perf_counter()

    def left(self, count: int) -> int:
        """Return after how many counts the next exchange comes."""
        return self._next - count

    def due(self, count: int) -> bool:
        """Tell, alike on every rank, whether ranks exchange at `count`; it never goes back."""
        return count >= self._next

    def hold(self, count: int, values: list[int]) -> list[list[int]]:
        """Return every rank's `values`, by rank. Collective, on the host; all ranks pass the same `count`."""
        now = time.perf_counter()
        pace_us = int((now - self._since) / max(count - self._last, 1) * 1e6)
        everyone = self._processes.gather_integers([*values, pace_us])
        slowest_us = max(of_rank[-1] for of_rank in everyone)
        wait = min(int(_PERIOD_S * 1e6) // max(slowest_us, 1), self._at_most - count % self._at_most)
        self._last, self._since, self._next = count, now, count + max(wait, 1)
        return [of_rank[:-1] for of_rank in everyone]
