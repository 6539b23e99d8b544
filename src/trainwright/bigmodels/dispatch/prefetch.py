"""Bring the weights of the next modules in while the present one computes.

Which module comes next is learned from the calls themselves: after the two that came last, whatever followed them the
last time, or else what followed the last one alone. So nothing has to be declared, a loop of `generate` closes by
itself, and where the order changes a guess is wrong once: the weights are then fetched when they are needed, as without
any of this. Guesses decide when weights are read, never which are used.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
import weakref
from collections import OrderedDict
from typing import Any, Protocol

from trainwright.bigmodels.dispatch.device_copies import Fetched
from trainwright.core.errors import ConfigurationError
from trainwright.core.host.memory import is_out_of_memory

_IDLE_S = 1.0  # with no unit in use and no work for so long, the reader ends and what nobody came for is dropped
MIN_BUDGET_BYTES = 64 * 2**20
# What the system has in memory comes within this; so many in a row, and nothing is brought in ahead until one does not.
_QUICK_S, _QUICK_BYTES_PER_S, _QUICK_IN_A_ROW = 100e-6, 10e9, 16


_prefetchers: weakref.WeakSet[Prefetcher] = weakref.WeakSet()
_readers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_ending = threading.Event()  # the interpreter


class Fetchable(Protocol):
    """What is brought in as one: the offloaded weights of one module."""

    @property
    def num_bytes(self) -> int:
        """How much memory it takes while it waits to be used."""

    @property
    def stays_on_host(self) -> bool:
        """Whether nothing is copied: what the system has in memory needs no fetching ahead."""

    def fetch(self) -> Fetched:
        """Bring it in and return it; called from any thread."""


class _Fetch:
    """A unit that was asked for ahead of its use."""

    def __init__(self, unit: Fetchable) -> None:
        self.unit = unit
        self.num_bytes = unit.num_bytes
        self.started = False
        self.done = threading.Event()
        self.seconds = 0.0  # that it took
        self.value: Fetched | None = None  # None after an error: the caller meets it again itself


class Prefetcher:
    """Hands out units, and has a reader thread bring in those that will probably be asked for next.

    The thread starts with the first guess and ends a second after the last unit was used.

    Args:
        budget_bytes: how much may wait to be used at a time; 0 fetches nothing ahead. Unless told, twice the largest
            unit, and at least 64 MiB.

    Raises:
        ConfigurationError: the budget is no whole number, or negative.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        whole = isinstance(budget_bytes, int) and not isinstance(budget_bytes, bool)
        if budget_bytes is not None and (not whole or budget_bytes < 0):
            raise ConfigurationError(
                f"prefetch_bytes={budget_bytes!r}, expected whole bytes, such as {MIN_BUDGET_BYTES}; 0 reads nothing "
                "ahead, and None leaves it to the largest layer."
            )
        self._fixed_budget = budget_bytes
        self._largest = 0
        self._condition = threading.Condition()
        self._numbers = itertools.count()
        self._units: weakref.WeakValueDictionary[int, Fetchable] = weakref.WeakValueDictionary()
        self._next: dict[tuple[int, int], int] = {}
        self._last: dict[int, tuple[int, int]] = {}  # by thread: the last two units it asked for
        self._jobs: OrderedDict[int, _Fetch] = OrderedDict()  # asked for ahead, oldest first
        self._held_bytes = 0
        self._num_used = 0
        self._num_quick = 0  # fetches in a row that had nothing to wait for
        self._reader: threading.Thread | None = None
        _prefetchers.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Prefetcher:
        return self  # a copied model has units of its own here, and shares the budget

    @property
    def budget_bytes(self) -> int:
        """How much may wait to be used."""
        if self._fixed_budget is not None:
            return self._fixed_budget
        return max(MIN_BUDGET_BYTES, 2 * self._largest)

    def add(self, unit: Fetchable) -> int:
        """Make a unit known, weakly; return the number to `take` it by."""
        with self._condition:
            number = next(self._numbers)
            self._units[number] = unit
            self._largest = max(self._largest, unit.num_bytes)
            return number

    def take(self, number: int) -> Fetched:
        """Return a unit's tensors, from the reader if it has them or is at it, else fetched here and now.

        Tell `give_back` when they are no longer used. Blocks until they are there (on an accelerator: until the copies
        are in its queue).

        Raises:
            Exception: whatever fetching it raised.
        """
        if self._fixed_budget == 0:
            return self._units[number].fetch()
        with self._condition:
            self._num_used += 1
            job = self._drop(number)
            self._learn(number)
            if self._held_bytes * 2 <= self.budget_bytes and (self._is_slow or not self._units[number].stays_on_host):
                self._plan(number)
        try:
            if job is not None and job.started:
                job.done.wait()
                if job.value is not None:
                    self._note(job.num_bytes, job.seconds)
                    return job.value
            return self._fetch(self._units[number])
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Say that a unit is no longer used. The reader waits for its next work as long as one is."""
        if self._fixed_budget != 0:
            with self._condition:
                self._num_used -= 1

    def _fetch(self, unit: Fetchable) -> Fetched:
        try:
            return self._timed(unit)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self.forget()  # what waits to be used takes memory that is needed now
        return unit.fetch()

    def _timed(self, unit: Fetchable) -> Fetched:
        """Fetch a unit, and note whether that took longer than what the system has in memory takes."""
        begin_s = time.perf_counter()
        found = unit.fetch()
        self._note(unit.num_bytes, time.perf_counter() - begin_s)
        return found

    def _note(self, num_bytes: int, seconds: float) -> None:
        is_quick = seconds <= _QUICK_S + num_bytes / _QUICK_BYTES_PER_S
        self._num_quick = self._num_quick + 1 if is_quick else 0

    @property
    def _is_slow(self) -> bool:
        """Whether something had to be waited for lately: otherwise another thread costs more than it saves."""
        return self._num_quick < _QUICK_IN_A_ROW

    def forget(self) -> None:
        """Drop everything that was brought in ahead; what the reader is at just now is dropped when it is done."""
        with self._condition:
            self._jobs.clear()
            self._held_bytes = 0

    def _drop(self, number: int) -> _Fetch | None:
        job = self._jobs.pop(number, None)
        if job is not None:
            self._held_bytes -= job.num_bytes
        return job

    def _learn(self, number: int) -> None:
        thread = threading.get_ident()
        last = self._last.get(thread)
        if last is None:
            if len(self._last) > 64:  # threads come and go, and their numbers with them
                self._last.clear()
            last = (-1, -1)
        self._next[last] = number
        self._next[-1, last[1]] = number  # for when the one before is another
        self._last[thread] = (last[1], number)

    def _plan(self, number: int) -> None:
        """Ask the reader for what will probably follow, as far as the budget goes."""
        wanted: list[int] = []
        room = self.budget_bytes
        pair = self._last[threading.get_ident()]
        seen = {number}
        while (follower := self._follower(pair)) is not None and follower not in seen:
            unit = self._units.get(follower)
            if unit is None or unit.num_bytes > room:
                break
            room -= unit.num_bytes
            seen.add(follower)
            wanted.append(follower)
            pair = (pair[1], follower)
        new = [follower for follower in wanted if follower not in self._jobs]
        need = sum(self._units[follower].num_bytes for follower in new)
        for stale in [other for other in self._jobs if other not in seen]:
            if self._held_bytes + need <= self.budget_bytes:
                break
            self._drop(stale)
        for follower in new:
            job = _Fetch(self._units[follower])
            if self._held_bytes + job.num_bytes > self.budget_bytes:
                break
            self._jobs[follower] = job
            self._held_bytes += job.num_bytes
        if new:
            self._wake()

    def _follower(self, pair: tuple[int, int]) -> int | None:
        found = self._next.get(pair)
        return self._next.get((-1, pair[1])) if found is None else found

    def _wake(self) -> None:
        if _ending.is_set():
            return
        if self._reader is None or not self._reader.is_alive():  # dead after a fork, too
            self._reader = threading.Thread(target=_read, args=(weakref.ref(self),), name="prefetch", daemon=True)
            _readers.add(self._reader)
            self._reader.start()
        else:
            self._condition.notify_all()

    def _wait(self) -> _Fetch | None:
        """Return the next job to do; None when there was none for a while, which ends the reader."""
        with self._condition:
            idle = False
            while not _ending.is_set():
                for job in self._jobs.values():
                    if not job.started:
                        job.started = True
                        return job
                if idle and not self._num_used:
                    break
                idle = not self._condition.wait(_IDLE_S)
            self._reader = None
            self._jobs.clear()
            self._held_bytes = 0
            return None


def _read(reference: weakref.ref[Prefetcher]) -> None:
    """Do jobs until there are none. It keeps no model alive: between two jobs it holds nothing."""
    while True:
        prefetcher = reference()
        job = None if prefetcher is None else prefetcher._wait()
        del prefetcher
        if job is None:
            return
        try:
            with contextlib.suppress(Exception):  # who takes the unit fetches it again and meets the error there
                begin_s = time.perf_counter()
                job.value = job.unit.fetch()
                job.seconds = time.perf_counter() - begin_s
        finally:
            job.done.set()
        del job


@atexit.register
def _end_readers() -> None:
    """Let readers end before the interpreter does: a thread that it stops within torch aborts the process."""
    _ending.set()
    for prefetcher in list(_prefetchers):
        with prefetcher._condition:
            prefetcher._condition.notify_all()
    for reader in list(_readers):
        reader.join()
