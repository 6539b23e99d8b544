"""Exchange of stop requests and signals between ranks."""

from __future__ import annotations

import time

from trainwright.processes.process_group import Processes

_PERIOD_S = 1.0  # between two exchanges


class Agreement:
    """Exchange of a few numbers between ranks, on the host, after the same number of steps on every rank.

    A count is a number of completed steps. Each exchange also schedules the next exchange: about a second later at the
    speed of the slowest rank, after 1 to `at_most` steps.

    Args:
        processes: the processes of the run.
        at_most: maximum number of steps between two exchanges. Each multiple of `at_most` has an exchange.
    """

    def __init__(self, processes: Processes, at_most: int) -> None:
        self._processes = processes
        self._at_most = at_most
        self._last = 0
        self._since = time.perf_counter()
        self._next = 1

    def begin(self, count: int) -> None:
        """Set the count from which steps are counted, the same on every rank. The first exchange is at `count + 1`."""
        self._last, self._next, self._since = count, count + 1, time.perf_counter()

    def left(self, count: int) -> int:
        """Return the number of steps from `count` until the next exchange."""
        return self._next - count

    def due(self, count: int) -> bool:
        """Return whether ranks exchange at `count`. The result is the same on every rank."""
        return count >= self._next

    def exchange(self, count: int, values: list[int]) -> list[list[int]]:
        """Return the `values` of every rank, in rank order. Collective, on the host, with equal `count`."""
        now = time.perf_counter()
        pace_us = int((now - self._since) / max(count - self._last, 1) * 1e6)
        everyone = self._processes.gather_integers([*values, pace_us])
        slowest_us = max(of_rank[-1] for of_rank in everyone)
        wait = min(int(_PERIOD_S * 1e6) // max(slowest_us, 1), self._at_most - count % self._at_most)
        self._last = count
        self._since = now
        self._next = count + max(wait, 1)
        return [of_rank[:-1] for of_rank in everyone]
