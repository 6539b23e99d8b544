"""Prefetching of the next units' weights during a unit's computation. A unit is a module or a part of a model.

The order of units is learned from the calls, including the loop of `generate`. The predicted unit is the one that last
followed the same two units, or else the one that last followed the same unit. After a wrong prediction, weights are
fetched when they are used, as without prefetching.

There are two kinds of prefetchers. With `num_units` (training with `OffloadStrategy`), the calling thread queues
asynchronous copies to the device, and no other thread is used. Without it (inference with offloaded weights), a
background thread, the reader, reads files and copies to the device within a budget of bytes.
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
from typing import Any, NamedTuple, Protocol

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
_NO_UNIT = -1  # stands for a unit's number: no unit was used before, or no unit is predicted
_MAX_THREADS = 64  # more threads than this have probably ended

# All readers, with the conditions that they wait for, so that the interpreter's exit can end them.
_readers: weakref.WeakKeyDictionary[threading.Thread, threading.Condition] = weakref.WeakKeyDictionary()
_ending = threading.Event()  # set when the interpreter exits


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
    """A fetch of one unit, before or at its use.

    Attributes:
        unit: The unit. It is referenced until the fetch is dropped.
        num_bytes: Memory of the unit in bytes when the fetch was created.
        started: True once a thread runs the fetch. Set by the reader under the prefetcher's lock, so that `acquire` can
            take a fetch that no thread runs.
        done: Set when the fetch has ended, also with an error.
        seconds: Duration. 0 until the fetch has ended without an error.
        value: The weights. None until the fetch has ended, and after an error: `acquire` then fetches the unit again.
    """

    def __init__(self, unit: Fetchable) -> None:
        self.unit = unit
        self.num_bytes = unit.num_bytes
        self.started = False
        self.done = threading.Event()
        self.seconds = 0.0
        self.value: Fetched | None = None

    def run(self) -> None:
        """Fetch the unit."""
        self.started = True
        begin_s = time.perf_counter()
        try:
            self.value = self.unit.fetch()
            self.seconds = time.perf_counter() - begin_s
        finally:
            self.done.set()


class _LastUses(NamedTuple):
    """The numbers of the last two units that a thread used. `_NO_UNIT` before the first use and the second use."""

    before_last: int
    last: int


class Prefetcher:
    """Prefetcher that provides units, and fetches the units that will probably be used next.

    Call `acquire` before the use of a unit and `release` afterwards. Call `follow` at each use, from which the order of
    units is learned. With `num_units`, the calling thread starts asynchronous copies. Otherwise a background thread
    fetches the units. The thread starts with the first prediction, and ends after a second without fetches, if no unit
    is in use.

    Args:
        budget_bytes: Maximum size of prefetched units that are not yet used; 0 disables prefetching. Default: twice the
            largest unit, and at least 64 MiB.
        num_units: Number of units to prefetch, instead of `budget_bytes`. No thread is used. Default: None, which
            prefetches up to the budget in a thread.

    Attributes:
        budget_bytes: Maximum size of prefetched units that are not yet used. By default, it grows in `add`.
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
        self._has_fixed_budget = budget_bytes is not None
        self._num_units = num_units
        # Its lock guards the fields below, except `_num_quick`, where a lost count does no harm. The lock is reentrant:
        # methods that hold it call each other.
        self._condition = threading.Condition()
        self._numbers = itertools.count()
        self.total_bytes = 0
        self._units: weakref.WeakValueDictionary[int, Fetchable] = weakref.WeakValueDictionary()
        self._streams: dict[torch.device, CopyStream] = {}
        # The learned order. After uses of the units 0, 1 and 2 in a pass, `_next` has the entries
        #   (-1, -1): 0    the first unit of a pass
        #   (-1, 0): 1     the unit after 0, whatever precedes 0
        #   (0, 1): 2      the unit after 0 and 1
        #   (-1, 1): 2     the unit after 1, whatever precedes 1
        # and `_previous` is {0: -1, 1: 0, 2: 1}, which predicts the order of the backward.
        self._next: dict[_LastUses, int] = {}
        self._previous: dict[int, int] = {}
        self._last_uses: dict[int, _LastUses] = {}  # by the thread's id
        # Fetches of units that are not yet used, by the unit's number, the oldest first.
        self._jobs: OrderedDict[int, _Fetch] = OrderedDict()
        self._held_bytes = 0  # total size of the units in `_jobs`
        self._num_used = 0  # calls of `acquire` without their `release`
        self._num_quick = 0  # consecutive fetches from the page cache
        # None before the first prediction, and after the thread has ended.
        self._reader: threading.Thread | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Prefetcher:
        return self  # a copied model shares the budget, and threads and locks cannot be copied

    def add(self, unit: Fetchable) -> int:
        """Register a unit by a weak reference. Return its number for `acquire`."""
        with self._condition:
            number = next(self._numbers)
            self._units[number] = unit
            self.total_bytes += unit.num_bytes
            if not self._has_fixed_budget:
                self.budget_bytes = max(self.budget_bytes, 2 * unit.num_bytes)
            return number

    def copies_to(self, device: torch.device) -> CopyStream:
        """Return the stream of copies to a device. All units share it."""
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
            # From now on, the reader cannot start this fetch. If it has not started, this thread fetches.
            job = self._pop(number)
        try:
            if job is not None and job.started:
                job.done.wait()
            if job is None or job.value is None:  # not prefetched, not started, or failed
                job = self._fetch(self._units[number])
        except BaseException:
            self.release()
            raise
        is_quick = job.seconds <= _QUICK_S + job.num_bytes / _QUICK_BYTES_PER_S
        if is_quick:
            self._num_quick += 1
        else:
            self._num_quick = 0
        assert job.value is not None  # otherwise the fetch raised
        return job.value

    def release(self) -> None:
        """Record the end of a unit's use. The background thread runs while any unit is in use."""
        with self._condition:
            self._num_used -= 1

    def _fetch(self, unit: Fetchable) -> _Fetch:
        """Fetch a unit in the calling thread. If memory is exhausted, discard prefetched units and try again."""
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
        """Discard one prefetched unit, or all. The result of a running fetch is not used.

        Args:
            number: Number of the unit, which may be one that is not prefetched. Default: None, all units.
        """
        with self._condition:
            if number is not None:
                self._drop(number)
                return
            for each in list(self._jobs):  # a copy, because `_drop` removes entries
                self._drop(each)

    def _pop(self, number: int) -> _Fetch | None:
        """Remove a unit's fetch. Return None if the unit is not prefetched."""
        job = self._jobs.pop(number, None)
        if job is not None:
            self._held_bytes -= job.num_bytes
        return job

    def _drop(self, number: int) -> None:
        job = self._pop(number)
        if job is not None and job.value is not None:  # the value is None if the fetch is running, or failed
            job.value.discard()

    # Prefetching

    def begin(self) -> None:
        """Start a new pass over the model, and prefetch its first units."""
        self._last_uses.clear()
        self.prefetch(self.first())

    def first(self) -> list[int]:
        """Return the numbers of the first `num_units` units that a pass will probably use."""
        at_start = _LastUses(_NO_UNIT, _NO_UNIT)
        return list(itertools.islice(self._expected_after(at_start), self._num_units))

    def follow(self, number: int, *, backward: bool = False) -> None:
        """Record the use of a unit, and prefetch the units that will probably be used next.

        Args:
            number: Number of the unit.
            backward: Predict the reverse of the last order, and do not record the use. Default: False.
        """
        if self.budget_bytes == 0:
            return
        with self._condition:
            if backward:
                expected = self._expected_before(number)
            else:
                expected = self._expected_after(self._learn(number))
            if self._num_units is not None:
                self.prefetch(itertools.islice(expected, self._num_units))
                return
            # A reader thread that never waits for the disk costs more than it saves.
            all_is_cached = self._num_quick >= _QUICK_IN_A_ROW and self._units[number].stays_on_host
            if not all_is_cached:
                self._plan(expected)

    def _learn(self, number: int) -> _LastUses:
        """Record the use of a unit by the calling thread. Return this thread's last two uses, including this one."""
        thread = threading.get_ident()
        if thread not in self._last_uses and len(self._last_uses) > _MAX_THREADS:
            self._last_uses.clear()
        uses = self._last_uses.get(thread, _LastUses(_NO_UNIT, _NO_UNIT))
        self._next[uses] = number
        self._next[_LastUses(_NO_UNIT, uses.last)] = number  # used if the unit before the last one differs
        self._previous[number] = uses.last
        new_uses = _LastUses(uses.last, number)
        self._last_uses[thread] = new_uses
        return new_uses

    def _expected_after(self, uses: _LastUses) -> Iterator[int]:
        """Yield the units that will probably be used after the last two uses. Ends before the first repeated unit."""
        seen = {_NO_UNIT, uses.last}
        while True:
            after_last = self._next.get(_LastUses(_NO_UNIT, uses.last), _NO_UNIT)
            number = self._next.get(uses, after_last)
            if number in seen:
                return
            yield number
            seen.add(number)
            uses = _LastUses(uses.last, number)

    def _expected_before(self, number: int) -> Iterator[int]:
        """Yield the units that were last used before a unit, the latest first: the order of the backward."""
        seen = {_NO_UNIT, number}
        while True:
            number = self._previous.get(number, _NO_UNIT)
            if number in seen:
                return
            yield number
            seen.add(number)

    def _plan(self, expected: Iterable[int]) -> None:
        """Prefetch expected units up to the budget, once half of it is free.

        With less free memory, nothing is done, so that not every use computes the prediction.
        """
        if self._held_bytes * 2 > self.budget_bytes:
            return
        wanted: dict[int, Fetchable] = {}
        room_bytes = self.budget_bytes
        for number in expected:
            unit = self._units.get(number)  # None if its module was freed
            if unit is None or unit.num_bytes > room_bytes:
                break
            wanted[number] = unit
            room_bytes -= unit.num_bytes
        new_bytes = sum(unit.num_bytes for number, unit in wanted.items() if number not in self._jobs)
        # Discard units that are no longer expected, the oldest first, until the new ones fit.
        stale = [number for number in self._jobs if number not in wanted]
        for number in stale:
            if self._held_bytes + new_bytes <= self.budget_bytes:
                break
            self._drop(number)
        self.prefetch(wanted)

    def prefetch(self, numbers: Iterable[int]) -> None:
        """Prefetch the given units in order, regardless of the budget."""
        with self._condition:
            for number in numbers:
                if number in self._jobs:
                    continue
                job = _Fetch(self._units[number])
                uses_thread = self._num_units is None
                if not uses_thread:
                    job.run()  # before the job is registered: an error leaves no job behind
                self._jobs[number] = job
                self._held_bytes += job.num_bytes
                if uses_thread:
                    self._wake_reader()

    # The reader

    def _wake_reader(self) -> None:
        if _ending.is_set():
            return
        if self._reader is None or not self._reader.is_alive():  # a forked process has no threads of its parent
            self._reader = threading.Thread(target=_read, args=(weakref.ref(self),), name="prefetch", daemon=True)
            _readers[self._reader] = self._condition
            self._reader.start()
        else:
            self._condition.notify_all()

    def _wait_for_fetch(self) -> _Fetch | None:
        """Return the next fetch, which the caller must run. Called by the reader. May block.

        Return None, which ends the thread, after a second without fetches if no unit is in use. All prefetched units
        are then discarded.
        """
        with self._condition:
            idle = False
            while not _ending.is_set():
                for job in self._jobs.values():
                    if not job.started:
                        job.started = True
                        return job
                if idle and not self._num_used:
                    break
                was_notified = self._condition.wait(_IDLE_S)
                idle = not was_notified
            self.discard()
            self._reader = None
            return None


def _read(reference: weakref.ref[Prefetcher]) -> None:
    """Run fetches until the prefetcher is idle or freed. The prefetcher can be freed during a fetch."""
    while True:
        prefetcher = reference()
        job = None if prefetcher is None else prefetcher._wait_for_fetch()
        del prefetcher
        if job is None:
            return
        with contextlib.suppress(Exception):  # `acquire` fetches the unit again and raises the error
            job.run()
        del job  # no reference to the weights while waiting for the next fetch


@atexit.register
def _end_readers() -> None:
    """End the readers before the interpreter exits, because a thread that is stopped in torch aborts the process."""
    _ending.set()
    readers = list(_readers.items())
    for _, condition in readers:
        with condition:
            condition.notify_all()
    for reader, _ in readers:
        reader.join()
