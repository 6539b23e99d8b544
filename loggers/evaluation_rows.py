"""Values that the batches of an evaluation log `on_step`: one row for the loggers from each batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from trainwright.loggers.metric_slot import HostReads, MetricSlot, Reduction
from trainwright.loggers.metric_values import Entry, Flushed, gather_entries, put_combined, step_values

_READ_EVERY = 1024
"""Number of pending values that are read at a time, with one copy from their device."""

Place = tuple[int, int]
"""The indices of a loader and of its batch, which identify a row on every rank."""
Rows = dict[int, dict[str, float]]
"""Numbers for the loggers by the 0-based index of the evaluation step."""


class _Value(NamedTuple):
    step: int
    place: Place
    entry: Entry
    weight: float
    is_synced: bool
    value: float | Tensor


class EvaluationRows:
    """Rows of the current evaluation. Values stay on their device until `read`.

    Values with `sync_dist=True` are then kept on the host until the end of the evaluation, because only there all ranks
    meet.
    """

    def __init__(self) -> None:
        self._pending: list[_Value] = []
        self._synced: dict[Place, dict[str, Entry]] = {}
        self._steps: dict[Place, int] = {}
        self._reductions: dict[str, Reduction | None] = {}

    @property
    def is_full(self) -> bool:
        """True if the pending values should be read."""
        return len(self._pending) >= _READ_EVERY

    def add(self, step: int, place: Place, slots: Iterable[MetricSlot]) -> None:
        """Add what the batch at `place` has logged. Does not wait for the device.

        Args:
            step: number of earlier evaluation steps of the run.
            place: the batch.
            slots: slots of the stage.
        """
        for slot in slots:
            if slot.is_new and slot.settings.logger:
                is_synced = slot.settings.sync_dist is True
                self._reductions[slot.key] = slot.settings.reduction
                for entry, value in step_values(slot):
                    self._pending.append(_Value(step, place, entry, slot.last_weight, is_synced, value))
            slot.is_new = False

    def read(self, *, has_ranks: bool) -> Rows:
        """Read the pending values. Return those that no other rank contributes to. Waits for each device once."""
        reads, rows = HostReads(), dict[int, Flushed]()
        waiting = [(pending, reads.add(pending.value)) for pending in self._pending]
        self._pending = []
        reads.read()
        for pending, (value,) in waiting:
            entry = pending.entry
            if has_ranks and pending.is_synced:
                weight = pending.weight if entry.kind == "mean" else 1.0
                total = value * weight if entry.kind == "mean" else value
                shared = entry._replace(total=total, weight=weight, values=(value,))
                self._synced.setdefault(pending.place, {})[entry.name + entry.suffix] = shared
                self._steps[pending.place] = pending.step
            else:
                rows.setdefault(pending.step, Flushed()).put(entry, value, "step")
        return {step: flushed.logged for step, flushed in rows.items()}

    def payload(self) -> dict[Place, dict[str, Any]]:
        """Return this rank's values with `sync_dist=True`, to be exchanged."""
        return {place: {name: tuple(entry) for name, entry in row.items()} for place, row in self._synced.items()}

    def combine(self, gathered: Sequence[Mapping[Place, dict[str, Any]]]) -> Rows:
        """Reduce the payloads of all ranks, in their order. Return the rows of the batches that this rank had."""
        rows: Rows = {}
        for place, step in self._steps.items():
            flushed = Flushed()
            entries = gather_entries([{"metrics": rank.get(place, {})} for rank in gathered])
            put_combined(flushed, entries, self._reductions, "step")
            rows[step] = flushed.logged
        return rows
