"""Prefetching of the next units' weights during a unit's computation. A unit is a module or a part of a model.

The order of units is learned from the calls, including the loop of `generate`. The predicted unit is the one that last
followed the same two units, or else the one that last followed the same unit. After a wrong prediction, weights are
fetched when they are used, as without prefetching.
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

_IDLE_S = 1.0  # after this time without work and units in use, the reader ends and discards prefetched units
MIN_BUDGET_BYTES = 64 * 2**20
# A fetch within these limits reads from the page cache. After so many in a row, prefetching pauses until a slower one.
_QUICK_S = 100e-6
_QUICK_BYTES_PER_S = 10e9
_QUICK_IN_A_ROW = 16
_NOBODY = -1  # predecessor of the first unit

_readers: weakref.WeakKeyDictionary[threading.Thread, threading.Condition] = weakref.WeakKeyDictionary()
_ending = threading.Event()  # the interpreter exits


class Fetchable(Protocol):
    """A unit of prefetching: the offloaded weights of one module, or of one part of a model."""

    @property
    def num_bytes(self) -> int:
        """Memory of the prefetched unit in bytes."""

    @property
    def stays_on_host(self) -> bool:
        """True if the unit is used in host memory: prefetching then only reads files into the page cache."""

    def fetch(self) -> Fetched:
        """Copy or read the unit's weights, unless this was done, and return them. May be called from any thread."""


class _Fetch:
    """A fetch of one unit, before or at its use."""

    def __init__(self, unit: Fetchable) -> None:
        self.unit = unit
        self.num_bytes = unit.num_bytes
        self.started = False
        self.done = threading.Event()
        self.seconds = 0.0  # duration
        self.value: Fetched | None = None  # None after an error: the user of the unit fetches it again

    def run(self) -> None:
        """Fetch the unit."""
        self.started, begin_s = True, time.perf_counter()
        try:
            self.value = self.unit.fetch()
            self.seconds = time.perf_counter() - begin_s
        finally:
            self.done.set()


class Prefetcher:
    """Prefetcher that provides units, and fetches the units that will probably be used next.

    Call `acquire` before the use of a unit and `release` afterwards. Call `follow` at each use, from which the order of
    units is learned. With `num_units`, the calling thread starts asynchronous copies. Otherwise a background thread
    fetches the units. The thread starts with the first prediction, and ends a second after the last use.

    Args:
        budget_bytes: Maximum size of prefetched units that are not yet used; 0 disables prefetching. Default: twice the
            largest unit, and at least 64 MiB.
        num_units: Number of units to prefetch, instead of `budget_bytes`. No thread is used.

    Attributes:
        budget_bytes: Maximum size of prefetched units that are not yet used.
        total_bytes: Total size of all units.

    Raises:
        ConfigurationError: The budget is not an integer, or is negative.
    """

    def __init__(self, budget_bytes: int | None = None, *, num_units: int | None = None) -> None:
        is_int = isinstance(budget_bytes, int) and not isinstance(budget_bytes, bool)
        if budget_bytes is not None and (not is_int or budget_bytes < 0):
            raise ConfigurationError(
                f"prefetch_bytes={budget_bytes!r}, expected a number of bytes, such as {MIN_BUDGET_BYTES}; 0 to "
                "disable prefetching; or None for twice the largest layer."
            )
        self.budget_bytes = MIN_BUDGET_BYTES if budget_bytes is None else budget_bytes
        self._is_fixed = budget_bytes is not None
        self._num_units = num_units
        self._condition = threading.Condition()
        self._numbers = itertools.count()
        self.total_bytes = 0
        self._units: weakref.WeakValueDictionary[int, Fetchable] = weakref.WeakValueDictionary()
        self._streams: dict[torch.device, CopyStream] = {}
        self._next: dict[tuple[int, int], int] = {}
        self._before: dict[int, int] = {}
        self._last: dict[int, tuple[int, int]] = {}  # by thread: its last two units
        self._jobs: OrderedDict[int, _Fetch] = OrderedDict()  # oldest first
        self._held_bytes = 0
        self._num_used = 0
        self._num_quick = 0  # consecutive fetches from the page cache
        self._reader: threading.Thread | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Prefetcher:
        return self  # a copied model shares the budget

    def add(self, unit: Fetchable) -> int:
        """Register a unit by a weak reference. Return its number for `acquire`."""
        with self._condition:
            number = next(self._numbers)
            self._units[number] = unit
            self.total_bytes += unit.num_bytes
            if not self._is_fixed:
                self.budget_bytes = max(self.budget_bytes, 2 * unit.num_bytes)
            return number

    def copies_to(self, device: torch.device) -> CopyStream:
        """Return the stream of copies to a device."""
        with self._condition:
            if device not in self._streams:
                self._streams[device] = CopyStream(device)
            return self._streams[device]

    # Units that are used

    def acquire(self, number: int) -> Fetched:
        """Return a unit's weights. Fetch them now if they were not prefetched.

        Call `release` after the use of the weights. Blocks until the weights are fetched; on an accelerator, until the
        copies are queued.

        Raises:
            Exception: Any error of the fetch.
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
            self.release()
            raise
        is_quick = job.seconds <= _QUICK_S + job.num_bytes / _QUICK_BYTES_PER_S
        self._num_quick = self._num_quick + 1 if is_quick else 0
        assert job.value is not None  # otherwise the fetch raised
        return job.value

    def release(self) -> None:
        """Record the end of a unit's use. The background thread runs while any unit is in use."""
        with self._condition:
            self._num_used -= 1

    def _fetch(self, unit: Fetchable) -> _Fetch:
        job = _Fetch(unit)
        try:
            job.run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.discard()  # free the memory of prefetched units
            job.run()
        return job

    def discard(self, number: int | None = None) -> None:
        """Discard one prefetched unit, or all. The result of a running fetch is discarded when it ends."""
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

    # Prefetching

    def begin(self) -> None:
        """Start a new pass over the model, and prefetch its first units."""
        self._last.clear()
        self.prefetch(self.first())

    def first(self) -> list[int]:
        """Return the numbers of the first `num_units` units that a pass will probably use."""
        return list(itertools.islice(self._expected((_NOBODY, _NOBODY)), self._num_units))

    def follow(self, number: int, *, backward: bool = False) -> None:
        """Record the use of a unit, and prefetch the units that will probably be used next.

        Args:
            number: Number of the unit.
            backward: Predict the reverse of the last order, and do not record the use. Default: False.
        """
        if self.budget_bytes == 0:
            return
        with self._condition:
            last = (_NOBODY, number) if backward else self._learn(number)
            expected = self._expected(last, backward=backward)
            if self._num_units is not None:
                self.prefetch(itertools.islice(expected, self._num_units))
            # A reader thread that never waits for the disk costs more than it saves.
            elif self._num_quick < _QUICK_IN_A_ROW or not self._units[number].stays_on_host:
                self._plan(expected)

    def _learn(self, number: int) -> tuple[int, int]:
        thread = threading.get_ident()
        if thread not in self._last and len(self._last) > 64:  # ids of ended threads
            self._last.clear()
        last = self._last.get(thread, (_NOBODY, _NOBODY))
        self._next[last] = number
        self._next[_NOBODY, last[1]] = number  # used if the unit before it differs
        self._before[number] = last[1]
        self._last[thread] = (last[1], number)
        return self._last[thread]

    def _expected(self, last: tuple[int, int], *, backward: bool = False) -> Iterator[int]:
        seen = {_NOBODY, last[1]}
        while True:
            if backward:
                found = self._before.get(last[1], _NOBODY)
            else:  # the successor of the last two units, or else of the last one
                found = self._next.get(last, self._next.get((_NOBODY, last[1]), _NOBODY))
            if found in seen:
                return
            yield found
            seen.add(found)
            last = (last[1], found)

    def _plan(self, expected: Iterable[int]) -> None:
        """Prefetch expected units up to the budget, once half of it is free."""
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
        self.prefetch(wanted)

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Prefetch the given units in order, regardless of the budget."""
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
        """Wait for the next fetch. Return None, which ends the thread, after a second without fetches and use."""
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
            self.discard()
            self._reader = None
            return None


def _read(reference: weakref.ref[Prefetcher]) -> None:
    """Run fetches until none is left. Holds no reference to the prefetcher between fetches, so that it can be freed."""
    while True:
        prefetcher = reference()
        job = None if prefetcher is None else prefetcher._wait()
        del prefetcher
        if job is None:
            return
        with contextlib.suppress(Exception):  # `acquire` fetches the unit again and raises the error
            job.run()
        del job


@atexit.register
def _end_readers() -> None:
    """End the threads before the interpreter exits, because a thread that is stopped in torch aborts the process."""
    _ending.set()
    readers = list(_readers.items())
    for _, condition in readers:
        with condition:
            condition.notify_all()
    for reader, _ in readers:
        reader.join()
