"""Bring the weights of the next units in while the present one computes: those of modules, or of parts of a model.

Which unit comes next is learned from the calls themselves: after the two that came last, whatever followed them the
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
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from trainwright.core.errors import ConfigurationError
from trainwright.core.host.memory import is_out_of_memory
from trainwright.strategies.offload.copy_stream import CopyStream, Fetched

_IDLE_S = 1.0  # with no unit in use and no work for so long, the reader ends and what nobody came for is dropped
MIN_BUDGET_BYTES = 64 * 2**20
# What the system has in memory comes within this; so many in a row, and nothing is brought in ahead until one does not.
_QUICK_S, _QUICK_BYTES_PER_S, _QUICK_IN_A_ROW = 100e-6, 10e9, 16
_NOBODY = -1  # the number of no unit: what comes before the first one

_readers: weakref.WeakKeyDictionary[threading.Thread, threading.Condition] = weakref.WeakKeyDictionary()
_ending = threading.Event()  # the interpreter


class Fetchable(Protocol):
    """What is brought in as one: the offloaded weights of one module, or of one part of a model."""

    @property
    def num_bytes(self) -> int:
        """How much memory it takes while it waits to be used."""

    @property
    def stays_on_host(self) -> bool:
        """Whether nothing is copied: what the system has in memory needs no fetching ahead."""

    def fetch(self) -> Fetched:
        """Bring it in, unless it is there, and return it; called from any thread."""


class _Fetch:
    """A unit that was asked for ahead of its use."""

    def __init__(self, unit: Fetchable) -> None:
        self.unit, self.num_bytes = unit, unit.num_bytes
        self.started = False
        self.done = threading.Event()
        self.seconds = 0.0  # that it took
        self.value: Fetched | None = None  # None after an error: the caller meets it again itself

    def run(self) -> None:
        """Fetch the unit."""
        self.started, begin_s = True, time.perf_counter()
        try:
            self.value = self.unit.fetch()
            self.seconds = time.perf_counter() - begin_s
        finally:
            self.done.set()


class Prefetcher:
    """Hands out units, and brings those ahead that will probably be asked for next.

    Whoever uses a unit calls `take` and, when it is no longer used, `give_back`; `follow` says that its turn has come
    in the order that is learned. Units whose copies do not hold up the caller are brought by itself; others by a reader
    thread, which starts with the first guess and ends a second after the last unit was used.

    Args:
        budget_bytes: how much may wait to be used at a time; 0 fetches nothing ahead. Default: twice the largest unit,
            and at least 64 MiB.
        num_units: how many units are brought ahead instead, by the caller, without a thread.

    Attributes:
        budget_bytes: how much may wait to be used.
        total_bytes: sum of the sizes of all units that were added.

    Raises:
        ConfigurationError: the budget is no whole number, or negative.
    """

    def __init__(self, budget_bytes: int | None = None, *, num_units: int | None = None) -> None:
        whole = isinstance(budget_bytes, int) and not isinstance(budget_bytes, bool)
        if budget_bytes is not None and (not whole or budget_bytes < 0):
            raise ConfigurationError(
                f"prefetch_bytes={budget_bytes!r}, expected whole bytes, such as {MIN_BUDGET_BYTES}; 0 reads nothing "
                "ahead, and None leaves it to the largest layer."
            )
        self.budget_bytes = MIN_BUDGET_BYTES if budget_bytes is None else budget_bytes
        self._is_fixed, self._num_units = budget_bytes is not None, num_units
        self._condition = threading.Condition()
        self._numbers = itertools.count()
        self.total_bytes = 0
        self._units: weakref.WeakValueDictionary[int, Fetchable] = weakref.WeakValueDictionary()
        self._streams: dict[torch.device, CopyStream] = {}
        self._next: dict[tuple[int, int], int] = {}
        self._before: dict[int, int] = {}
        self._last: dict[int, tuple[int, int]] = {}  # by thread: the last two units that it followed
        self._jobs: OrderedDict[int, _Fetch] = OrderedDict()  # asked for ahead, oldest first
        self._held_bytes = 0
        self._num_used = 0
        self._num_quick = 0  # fetches in a row that had nothing to wait for
        self._reader: threading.Thread | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Prefetcher:
        return self  # a copied model has units of its own here, and shares the budget

    def add(self, unit: Fetchable) -> int:
        """Make a unit known, weakly; return the number to `take` it by."""
        with self._condition:
            number = next(self._numbers)
            self._units[number] = unit
            self.total_bytes += unit.num_bytes
            if not self._is_fixed:
                self.budget_bytes = max(self.budget_bytes, 2 * unit.num_bytes)
            return number

    def copies_to(self, device: torch.device) -> CopyStream:
        """Return the stream that units come to a device on."""
        with self._condition:
            if device not in self._streams:
                self._streams[device] = CopyStream(device)
            return self._streams[device]

    # Units that are used

    def take(self, number: int) -> Fetched:
        """Return a unit's weights, as they were brought ahead, or else fetched here and now.

        Call `give_back` when they are no longer used. Blocks until they are there (on an accelerator: until the copies
        are in its queue).

        Raises:
            Exception: whatever fetching it raised.
        """
        with self._condition:
            self._num_used += 1
            job = self._pop(number)
        try:
            if job is not None and job.started:
                job.done.wait()
            if job is None or job.value is None:
                job = self._fetch(self._units[number])
        except BaseException:
            self.give_back()
            raise
        is_quick = job.seconds <= _QUICK_S + job.num_bytes / _QUICK_BYTES_PER_S
        self._num_quick = self._num_quick + 1 if is_quick else 0
        assert job.value is not None  # else fetching it raised
        return job.value

    def give_back(self) -> None:
        """Say that a unit is no longer used. The reader waits for its next work as long as one is."""
        with self._condition:
            self._num_used -= 1

    def _fetch(self, unit: Fetchable) -> _Fetch:
        job = _Fetch(unit)
        try:
            job.run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.forget()  # what waits to be used takes memory that is needed now
            job.run()
        return job

    def forget(self, number: int | None = None) -> None:
        """Drop what was brought ahead, or one unit of it; what the reader is at is dropped when it is done."""
        with self._condition:
            for each in list(self._jobs) if number is None else [number]:
                self._drop(each)

    def _pop(self, number: int) -> _Fetch | None:
        job = self._jobs.pop(number, None)
        if job is not None:
            self._held_bytes -= job.num_bytes
        return job

    def _drop(self, number: int) -> None:
        job = self._pop(number)
        if job is not None and job.value is not None:
            job.value.discard()

    # Units that are brought ahead

    def begin(self) -> None:
        """Have those brought that a pass over the model begins with, which does not follow the pass before it."""
        self._last.clear()
        self.bring(self.first())

    def first(self) -> list[int]:
        """Return the `num_units` units that a pass probably begins with."""
        return list(itertools.islice(self._expected((_NOBODY, _NOBODY)), self._num_units))

    def follow(self, number: int, *, backward: bool = False) -> None:
        """Take note that it is a unit's turn, and have those brought that will probably be next.

        Args:
            number: the unit's.
            backward: the order is that in which units came last, reversed, and not another one to be learned.
        """
        if self.budget_bytes == 0:
            return
        with self._condition:
            last = (_NOBODY, number) if backward else self._learn(number)
            expected = self._expected(last, backward=backward)
            if self._num_units is not None:
                self.bring(itertools.islice(expected, self._num_units))
            # Another thread that has nothing to wait for costs more than it saves.
            elif self._num_quick < _QUICK_IN_A_ROW or not self._units[number].stays_on_host:
                self._plan(expected)

    def _learn(self, number: int) -> tuple[int, int]:
        thread = threading.get_ident()
        if thread not in self._last and len(self._last) > 64:  # threads come and go, and their numbers with them
            self._last.clear()
        last = self._last.get(thread, (_NOBODY, _NOBODY))
        self._next[last] = number
        self._next[_NOBODY, last[1]] = number  # for when the one before is another
        self._before[number] = last[1]
        self._last[thread] = (last[1], number)
        return self._last[thread]

    def _expected(self, last: tuple[int, int], *, backward: bool = False) -> Iterator[int]:
        seen = {_NOBODY, last[1]}
        while True:
            if backward:
                found = self._before.get(last[1], _NOBODY)
            else:  # what followed the last two, or else what followed the last one
                found = self._next.get(last, self._next.get((_NOBODY, last[1]), _NOBODY))
            if found in seen:
                return
            yield found
            seen.add(found)
            last = (last[1], found)

    def _plan(self, expected: Iterable[int]) -> None:
        """Have brought what is expected, as far as the budget goes, once half of it is free."""
        if self._held_bytes * 2 > self.budget_bytes:
            return
        wanted: dict[int, Fetchable] = {}
        room = self.budget_bytes
        for number in expected:
            unit = self._units.get(number)
            if unit is None or unit.num_bytes > room:
                break
            wanted[number] = unit
            room -= unit.num_bytes
        need = sum(unit.num_bytes for number, unit in wanted.items() if number not in self._jobs)
        for stale in [number for number in self._jobs if number not in wanted]:
            if self._held_bytes + need <= self.budget_bytes:
                break
            self._drop(stale)
        self.bring(wanted)

    def bring(self, numbers: Iterable[int]) -> None:
        """Have units brought ahead of their use, in this order, whatever the budget."""
        with self._condition:
            for number in numbers:
                if number in self._jobs:
                    continue
                job = _Fetch(self._units[number])
                if self._num_units is not None:
                    job.run()
                self._jobs[number] = job
                self._held_bytes += job.num_bytes
                if self._num_units is None:
                    self._wake()

    # The reader

    def _wake(self) -> None:
        if _ending.is_set():
            return
        if self._reader is None or not self._reader.is_alive():  # dead after a fork, too
            self._reader = threading.Thread(target=_read, args=(weakref.ref(self),), name="prefetch", daemon=True)
            _readers[self._reader] = self._condition
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
            self.forget()
            self._reader = None
            return None


def _read(reference: weakref.ref[Prefetcher]) -> None:
    """Do jobs until there are none. It keeps no model alive: between two jobs it holds nothing."""
    while True:
        prefetcher = reference()
        job = None if prefetcher is None else prefetcher._wait()
        del prefetcher
        if job is None:
            return
        with contextlib.suppress(Exception):  # who takes the unit fetches it again and meets the error there
            job.run()
        del job


@atexit.register
def _end_readers() -> None:
    """Let readers end before the interpreter does: a thread that it stops within torch aborts the process."""
    _ending.set()
    readers = list(_readers.items())
    for _, condition in readers:
        with condition:
            condition.notify_all()
    for reader, _ in readers:
        reader.join()
