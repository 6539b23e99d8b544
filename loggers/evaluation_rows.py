"""Values that the batches of an evaluation log `on_step`: one row for the loggers from each batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from trainwright.loggers.metric_options import Reduction
from trainwright.loggers.metric_slot import HostReads, MetricSlot
from trainwright.loggers.metric_values import (
    Entry,
    Flushed,
    gather_entries,
    put_combined,
    step_values,
    with_step_value,
)

_READ_EVERY = 1024
"""Number of pending values after which `EvaluationRows.is_full`. They are read with one copy per device."""

Place = tuple[int, int]
"""The indices of a loader and of its batch, which identify a row on every rank."""
Rows = dict[int, dict[str, float]]
"""Numbers for the loggers by the 0-based index of the evaluation step."""


class _PendingValue(NamedTuple):
    """A number of one batch, which may still be on its device. `weight` is its weight in a mean over ranks."""

    step: int
    place: Place
    entry: Entry
    weight: float
    is_synced: bool
    value: float | Tensor


class EvaluationRows:
    """Rows of the current evaluation. Values stay on their device until `read`.

    `read` keeps values with `sync_dist=True` on the host until the end of the evaluation, because ranks communicate
    only there. `payload` and `combine` then reduce them over the ranks.
    """

    def __init__(self) -> None:
        self._pending: list[_PendingValue] = []
        self._synced: dict[Place, dict[str, Entry]] = {}  # values with sync_dist=True that were read, by key
        self._steps: dict[Place, int] = {}  # evaluation step of each place in `_synced`
        self._reductions: dict[str, Reduction | None] = {}

    @property
    def is_full(self) -> bool:
        """True if the pending values should be read."""
        return len(self._pending) >= _READ_EVERY

    def add(self, step: int, place: Place, slots: Iterable[MetricSlot]) -> None:
        """Add the values that the batch at `place` has logged. Does not wait for the device.

        Args:
            step: number of earlier evaluation steps of the run.
            place: the batch.
            slots: slots of the stage. Sets their `needs_row` to False, so that the next batch does not add old values.
        """
        for slot in slots:
            if slot.needs_row and slot.settings.logger:
                is_synced = slot.settings.sync_dist is True
                self._reductions[slot.key] = slot.settings.reduction
                for entry, value in step_values(slot):
                    self._pending.append(_PendingValue(step, place, entry, slot.last_weight, is_synced, value))
            slot.needs_row = False

    def read(self, *, has_ranks: bool) -> Rows:
        """Read the pending values. Return the rows of those that are not reduced over ranks. Waits for each device
        once.

        Args:
            has_ranks: True if there are several ranks. False returns values with `sync_dist=True`, too.
        """
        reads = HostReads()
        waiting: list[tuple[_PendingValue, list[float]]] = []
        for pending in self._pending:
            waiting.append((pending, reads.add(pending.value)))
        self._pending = []
        reads.read()
        rows: dict[int, Flushed] = {}
        for pending, (value,) in waiting:
            entry = pending.entry
            if has_ranks and pending.is_synced:
                of_batch = self._synced.setdefault(pending.place, {})
                of_batch[entry.name + entry.suffix] = with_step_value(entry, value, pending.weight)
                self._steps[pending.place] = pending.step
            else:
                rows.setdefault(pending.step, Flushed()).put(entry, value, "step")
        return {step: flushed.logged for step, flushed in rows.items()}

    def payload(self) -> dict[Place, dict[str, Any]]:
        """Return this rank's values with `sync_dist=True` by batch and key, as tuples to be exchanged."""
        rows: dict[Place, dict[str, Any]] = {}
        for place, of_batch in self._synced.items():
            rows[place] = {key: tuple(entry) for key, entry in of_batch.items()}
        return rows

    def combine(self, gathered: Sequence[Mapping[Place, dict[str, Any]]]) -> Rows:
        """Reduce the payloads of all ranks, in the order of the ranks. Return the rows of this rank's batches.

        Ranks without a batch at a place do not contribute to its row.
        """
        rows: Rows = {}
        for place, step in self._steps.items():
            of_ranks = [{"metrics": payload.get(place, {})} for payload in gathered]
            flushed = Flushed()
            put_combined(flushed, gather_entries(of_ranks), self._reductions, "step")
            rows[step] = flushed.logged
        self._synced = {}  # later flushes of the fit must not exchange them again
        self._steps = {}
        return rows
