"""The values behind slots: what a step logged, what an epoch has aggregated, what metric objects compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from trainwright.loggers.metric_ranks import Entry, Flushed, combine, entry_of
from trainwright.loggers.metric_slot import HostReads, MetricSlot, Reduction, is_metric_object, to_number


def step_values(slot: MetricSlot) -> Iterator[tuple[Entry, float | Tensor]]:
    """Yield what a slot holds of its last step, one number at a time; the slot has a value."""
    last = slot.last
    entry = entry_of(slot)
    if slot.metric is None and isinstance(last, (float, Tensor)):
        yield entry, last
        return
    if is_metric_object(last):
        # Without a batch value: what has been accumulated, unless the epoch's end has reset it meanwhile.
        parts = last.values() if isinstance(last, torch.nn.ModuleDict) else (last,)
        if not all(part.update_called for part in parts):
            return
        last = compute_alone(last)
    yield from named_values(slot, entry, last)


def named_values(slot: MetricSlot, entry: Entry, result: object) -> Iterator[tuple[Entry, float | Tensor]]:
    """Yield what a metric object gave, one number at a time; the parts of a dict are named `name/key`."""
    if isinstance(result, dict):
        for key, value in result.items():
            yield entry._replace(name=f"{slot.name}/{key}"), to_number(f"{slot.name}/{key}", value)
    else:
        yield entry, to_number(slot.name, result)


def compute_alone(metric: Any) -> Any:
    """Compute a metric object without other ranks, and without its remembering the result."""
    with without_ranks(metric):
        return metric.compute()


@contextmanager
def without_ranks(metric: torch.nn.Module) -> Iterator[None]:
    """Let the metric objects among a module and its parts compute this rank's own values, without the other ranks."""
    changed: list[tuple[Any, Callable[[], bool] | None, bool]] = []
    parts: list[Any] = [part for part in metric.modules() if hasattr(part, "distributed_available_fn")]
    try:
        for part in parts:
            changed.append((part, part.distributed_available_fn, part.compute_with_cache))
            part.distributed_available_fn, part.compute_with_cache = _no_ranks, False
        yield
    finally:
        for part, available, cached in changed:
            part.distributed_available_fn, part.compute_with_cache = available, cached


def _no_ranks() -> bool:
    return False


def epoch_entries(slots: list[MetricSlot]) -> dict[str, Entry]:
    """Return key → this rank's aggregate, read from the devices with one copy each."""
    reads = HostReads()
    waiting: list[tuple[MetricSlot, list[int | list[float]]]] = []
    for slot in slots:
        if not slot.has_epoch_values:
            continue
        slot.fold()
        parts: list[int | list[float]]
        if slot.kind == "custom":
            parts = [reads.add(chunk) if isinstance(chunk, Tensor) else chunk for chunk in slot.chunks]
        else:
            parts = [reads.add(total) for total in slot.totals.values()]
        waiting.append((slot, parts))
    read = reads.read()
    found: dict[str, Entry] = {}
    for slot, parts in waiting:
        values = [value for part in parts for value in (read[part] if isinstance(part, int) else part)]
        entry = entry_of(slot)
        if slot.kind == "custom":
            found[slot.key] = entry._replace(values=values)
        else:
            found[slot.key] = entry._replace(total=_total(slot, values), weight=slot.weight)
    return found


def _total(slot: MetricSlot, device_values: list[float]) -> float:
    if slot.kind in ("mean", "sum"):
        return slot.host_total + sum(device_values)
    values = device_values if slot.host_extreme is None else [slot.host_extreme, *device_values]
    entries = [Entry(slot.name, slot.suffix, False, False, False, slot.kind, False, total=value) for value in values]
    result = combine(entries, None)
    return float("nan") if result is None else result


def put_combined(
    flushed: Flushed,
    entries: dict[str, list[Entry]],
    reductions: dict[str, Reduction],
    when: Literal["step", "epoch"],
) -> None:
    """Enter the reduction of each key's entries, one for each rank that has it."""
    for key, found in entries.items():
        value = combine(found, reductions.get(key))
        if value is not None:
            flushed.put(found[0], value, when)


class NewValues:
    """This rank's values that nobody has looked at yet: each is read from its device once, and goes on waiting.

    Attributes:
        steps: slot → the value of a step that was looked at last; a flush empties it.
    """

    def __init__(self) -> None:
        self.steps: dict[MetricSlot, Any] = {}
        self._epochs: dict[MetricSlot, Any] = {}

    def of_steps(self, slots: Iterable[MetricSlot]) -> Flushed:
        """Return the latest values of steps that were logged since the last look. Waits for the device if there are."""
        new = [slot for slot in slots if slot.last is not None and self.steps.get(slot) is not slot.last]
        self.steps.update((slot, slot.last) for slot in new if not is_metric_object(slot.last))
        return read_steps(new)

    def all_steps(self, slots: list[MetricSlot]) -> Flushed:
        """Return the latest values of steps, also those that were looked at before."""
        self.steps.update((slot, slot.last) for slot in slots if not is_metric_object(slot.last))
        return read_steps(slots)

    def of_epoch(self, slots: Iterable[MetricSlot]) -> Flushed:
        """Return what the epoch has aggregated so far, on this rank alone, where it has changed since the last look."""
        flushed = Flushed()
        new: list[MetricSlot] = []
        for slot in slots:
            token = (slot.weight, len(slot.values), getattr(slot.metric, "_update_count", 0))
            if slot.on_epoch and any(token) and self._epochs.get(slot) != token:
                self._epochs[slot] = token
                new.append(slot)
        copies = [_copy(slot) for slot in new if slot.metric is None]  # a fold would change the order of the sum
        reductions = {slot.key: slot.settings.reduction for slot in copies}
        put_combined(flushed, {key: [entry] for key, entry in epoch_entries(copies).items()}, reductions, "epoch")
        for slot in new:
            if slot.metric is not None:
                read_into(flushed, list(named_values(slot, entry_of(slot), compute_alone(slot.metric))), "epoch")
        return flushed


def read_steps(slots: Iterable[MetricSlot]) -> Flushed:
    """Return this rank's own latest values of steps; they go on waiting. Waits for each device once."""
    flushed = Flushed()
    read_into(flushed, [pair for slot in slots if slot.last is not None for pair in step_values(slot)], "step")
    return flushed


def read_into(flushed: Flushed, values: list[tuple[Entry, float | Tensor]], when: Literal["step", "epoch"]) -> None:
    """Read values from their devices, with one copy each, and enter them."""
    reads = HostReads()
    waiting = [(entry, reads.add(value) if isinstance(value, Tensor) else float(value)) for entry, value in values]
    read = reads.read()
    for entry, at in waiting:
        flushed.put(entry, at if isinstance(at, float) else read[at][0], when)


def _copy(slot: MetricSlot) -> MetricSlot:
    copied = copy.copy(slot)
    copied.values, copied.weights = list(slot.values), list(slot.weights)
    copied.totals, copied.chunks = dict(slot.totals), list(slot.chunks)
    return copied
