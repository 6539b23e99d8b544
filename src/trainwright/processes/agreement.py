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
        self.begin(0)

    def begin(self, count: int) -> None:
        """Set the count from which steps are counted, the same on every rank. The first exchange is at `count + 1`."""
        self._last_count = count  # of the last exchange
        self._next_count = count + 1  # of the next exchange
        self._last_time_s = time.perf_counter()  # of the last exchange

    def steps_until_exchange(self, count: int) -> int:
        """Return the number of steps from `count` until the next exchange."""
        return self._next_count - count

    def due(self, count: int) -> bool:
        """Return whether ranks exchange at `count`. The result is the same on every rank."""
        return count >= self._next_count

    def exchange(self, count: int, values: list[int]) -> list[list[int]]:
        """Return the `values` of every rank, in rank order. Collective, on the host, with equal `count`."""
        now_s = time.perf_counter()
        num_steps = max(count - self._last_count, 1)
        us_per_step = int((now_s - self._last_time_s) / num_steps * 1e6)
        # The time per step travels with the values, because all ranks must compute the same next exchange from it.
        by_rank = self._processes.gather_integers([*values, us_per_step])
        slowest_us = max(of_rank[-1] for of_rank in by_rank)
        steps_in_period = int(_PERIOD_S * 1e6) // max(slowest_us, 1)
        # With at_most = 10, after step 7 there are at most 3 steps until the exchange at step 10.
        steps_until_multiple = self._at_most - count % self._at_most
        self._last_count = count
        self._last_time_s = now_s
        self._next_count = count + max(min(steps_in_period, steps_until_multiple), 1)
        return [of_rank[:-1] for of_rank in by_rank]
