"""Passes over prepared loaders in a user-written loop, and what the loop does with the batches that it receives."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a loader knows about a micro-batch of this rank.

    Attributes:
        is_padding: The rank has run out of data before other ranks, and repeats a batch. It has no weight.
        num_real: Number of batches of this round, over all ranks, that are not padding. None if none is padding.
        num_rows: Number of samples of a micro-batch that may not be full. None for a full micro-batch.
    """

    is_padding: bool = False
    num_real: int | None = None
    num_rows: int | None = None


FULL = MicroBatch()


@dataclass(slots=True, eq=False)
class Pass:
    """One pass over a prepared loader. Only the loader changes it.

    Attributes:
        loader: The loader.
        position: Number of the epoch's batches that were delivered, or skipped at the start.
        num_delivered: Number of batches that the loop has received.
        num_left: Number of batches that will follow. None if it is unknown, but not 0.
        is_exhausted: The loop has requested a batch after the last one.
        trains: When the pass began, autograd recorded and a prepared model was in training mode.
    """

    loader: Any
    position: int = 0
    trains: bool = True
    num_delivered: int = 0
    num_left: int | None = None
    is_exhausted: bool = False
    _unusual: dict[int, MicroBatch] = field(default_factory=dict)  # only those that are not full

    @property
    def ends_data(self) -> bool:
        """True once the loop has received the last batch."""
        return self.num_left == 0

    def deliver(self, batch: MicroBatch, num_left: int | None) -> None:
        """Record that the loop receives a batch now."""
        self.num_left = num_left
        self.position += 1
        self.num_delivered += 1
        if batch is not FULL:
            self._unusual[self.num_delivered] = batch

    def batch(self, number: int | None = None) -> MicroBatch:
        """Return the `number`-th batch of this pass (1-based). Default: None, the newest one."""
        if not self._unusual:
            return FULL
        if number is None:
            number = self.num_delivered
        return self._unusual.get(number, FULL)


@dataclass(slots=True)
class _Cycle:
    """A part of a loop: it receives some batches, and then begins micro-batches until it receives the next batch."""

    num_received: int
    num_begun: int = 0

    @property
    def parts(self) -> float:
        """Number of micro-batches that begin for each received batch."""
        return self.num_begun / self.num_received


class Habit:
    """What a loop does with the batches that it receives, learned from what it has done.

    The loader knows which batch is the last one. How many micro-batches begin after its delivery depends on the loop:
    one in a plain loop, several in a loop that fetches ahead or divides batches. The newest complete cycle of the loop
    predicts its last one. A cycle with a single micro-batch has skipped its other batches. If cycles differ, each
    micro-batch after the last delivery may be the last one.

    Cycles, as (received batches, begun micro-batches):

    - A plain loop over 3 batches: (1, 1), (1, 1), (1, 1).
    - A loop that fetches 4 batches and then trains them: (4, 4), (4, 4), ….
    - A loop that divides each batch into 2 micro-batches: (1, 2), (1, 2), ….
    - A loop that begins a batch when it has received the next one, over 3 batches: (2, 1), (1, 1), and one micro-batch
      after the end of the data, which is late.
    """

    def __init__(self) -> None:
        self._pass: Pass | None = None  # to which the current micro-batch belongs
        self._num_begun = 0  # micro-batches in this pass
        self._cycle = _Cycle(0)  # the current one
        self._num_before = 0  # batches of this pass that were received before this cycle
        self._complete: _Cycle | None = None  # the newest complete cycle
        self._is_steady = True  # all complete cycles had the same number of micro-batches for each batch
        self._began_after_end = False  # this cycle began after the end of the data
        self._num_late = 0  # micro-batches of this pass that began after the end of the data
        self._num_late_before = 0  # the same of the previous pass

    def begin(self, reading: Pass) -> bool:
        """Record that a micro-batch begins. Return False if an earlier one already seemed to be the last one."""
        if reading is not self._pass:
            self._complete_cycle()
            self._pass = reading
            self._num_begun = 0
            self._num_before = 0
            self._num_late_before = self._num_late
            self._num_late = 0
            self._begin_cycle(reading)
        elif reading.num_delivered > self._num_before + self._cycle.num_received:
            self._complete_cycle()
            self._num_before += self._cycle.num_received
            self._begin_cycle(reading)
        elif reading.is_exhausted and not self._began_after_end:
            self._num_late += 1
        self._num_begun += 1
        self._cycle.num_begun += 1
        return self._num_late <= self._num_late_before

    def _begin_cycle(self, reading: Pass) -> None:
        self._cycle = _Cycle(reading.num_delivered - self._num_before)
        self._began_after_end = reading.is_exhausted

    def _complete_cycle(self) -> None:
        if self._cycle.num_begun == 0 or self._cycle.num_received == 0:
            return
        if self._complete is not None and self._complete.parts != self._cycle.parts:
            self._is_steady = False
        self._complete = self._cycle

    def is_last(self, reading: Pass, num_steps: int) -> bool:
        """Return whether the current micro-batch is probably the last one of its pass."""
        return reading.ends_data and self._cycle.num_begun >= self._num_expected(num_steps)

    def num_left(self, reading: Pass, num_steps: int) -> int | None:
        """Return how many micro-batches will probably begin in this pass after the current one. None if unknown."""
        if reading.num_left is None:
            return None
        in_cycle = max(0, self._num_expected(num_steps) - self._cycle.num_begun)
        return in_cycle + round(reading.num_left * self._parts)

    def batch_number(self) -> int:
        """Return the number in its pass (1-based) of the batch to which the current micro-batch belongs."""
        num_received = self._num_before + self._cycle.num_received
        if self._skips:
            return num_received - max(0, self._num_late_before - self._num_late)
        return min(num_received, self._num_before + math.ceil(self._cycle.num_begun / self._parts))

    def num_held(self, reading: Pass) -> int | None:
        """Return how many of the newest batches of a pass have not begun. None if batches of its loader never begin."""
        if reading is self._pass:
            return reading.num_delivered - self.batch_number()
        if self._pass is not None and self._pass.loader is reading.loader:  # a new pass over the same loader
            return reading.num_delivered
        return None

    def holds_batches_of(self, ended: Pass, num_steps: int) -> bool:
        """Return whether the next micro-batch belongs to a pass that was read to its end."""
        if ended is not self._pass:
            return True  # all its batches were fetched before the first micro-batch
        has_received_more = ended.num_delivered > self._num_before + self._cycle.num_received
        is_within_cycle = self._cycle.num_begun < self._num_expected(num_steps)
        return has_received_more or is_within_cycle or self._num_begun < ended.num_delivered

    @property
    def is_ambiguous(self) -> bool:
        """True if earlier batches of the pass were either skipped, or are held back and begin later."""
        if self._skips:
            is_known = self._num_late_before > 0
        else:
            is_known = self._complete is not None
        num_received = self._num_before + self._cycle.num_received
        return not is_known and self._num_begun < num_received

    @property
    def _skips(self) -> bool:
        return self._complete is not None and self._complete.num_begun == 1

    @property
    def _parts(self) -> float:
        """Number of micro-batches for each received batch."""
        if self._complete is None or not self._is_steady:
            return 1.0
        return self._complete.parts

    def _num_expected(self, num_steps: int) -> int:
        """Return how many micro-batches will probably begin in this cycle, if it is the last one."""
        if self._complete is None:
            # The first batches of a loop: a group that is fetched ahead, or batches that a resumed loop skips.
            is_fetched_ahead = self._began_after_end or self._cycle.num_received <= num_steps
            return self._cycle.num_received if is_fetched_ahead else 1
        if self._skips:
            return 1 + self._num_late_before
        if not self._is_steady or not self._parts.is_integer():
            return 1
        return self._cycle.num_received * int(self._parts)
