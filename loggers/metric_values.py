"""Values of slots: those of a step, the aggregates of an epoch, the results of metric objects."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from trainwright.core.errors import ConfigurationError, TaskError, TrainwrightWarning
from trainwright.core.metric_value import MetricValue
from trainwright.loggers.metric_slot import HostReads, MetricSlot, Reduction, is_metric_object, pick, to_number


def step_values(slot: MetricSlot) -> Iterator[tuple[Entry, float | Tensor]]:
    """Yield the values of a slot's last step, one number at a time; the slot has a value."""
    last = slot.last
    entry = entry_of(slot)
    if slot.metric is None and isinstance(last, (float, Tensor)):
        yield entry, last
        return
    if is_metric_object(last):
        # Without a batch value: the accumulated value, unless the epoch's end has reset it meanwhile.
        parts = last.values() if isinstance(last, torch.nn.ModuleDict) else (last,)
        if not all(part.update_called for part in parts):
            return
        last = compute_alone(last)
    yield from named_values(entry, last)


def named_values(entry: Entry, result: object) -> Iterator[tuple[Entry, float | Tensor]]:
    """Yield the results of a metric object, one number at a time; the parts of a dict are named `name/key`."""
    if isinstance(result, dict):
        for key, value in result.items():
            name = f"{entry.name}/{key}"
            yield entry._replace(name=name), to_number(name, value)
    else:
        yield entry, to_number(entry.name, result)


def path_in(owner: torch.nn.Module | None, metric: object) -> str | None:
    """Return the name of a metric object among the modules of a task; None if it is not one of them."""
    return None if owner is None else next((path for path, found in owner.named_modules() if found is metric), None)


def compute_without_values(metric: Any) -> Any:
    """Compute a metric object that other ranks have updated, and reset it; collective."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics expects an update
        result = metric.compute()
    metric.reset()  # its result would else be used again
    return result


def compute_alone(metric: Any) -> Any:
    """Compute a metric object without other ranks, and without caching the result."""
    with without_ranks(metric):
        return metric.compute()


@contextmanager
def without_ranks(metric: torch.nn.Module) -> Iterator[None]:
    """Compute the metric objects in a module from this rank's values only, within the context."""
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
    return pick(device_values if slot.host_extreme is None else [slot.host_extreme, *device_values], slot.kind)


def put_combined(
    flushed: Flushed,
    entries: dict[str, list[Entry]],
    reductions: dict[str, Reduction],
    when: Literal["step", "epoch"],
) -> None:
    """Add the reduction of each key's entries, one for each rank that has it."""
    for key, found in entries.items():
        value = combine(found, reductions.get(key))
        if value is not None:
            flushed.put(found[0], value, when)


class NewValues:
    """Values of this rank that have not been read yet: each is read from its device once, and stays pending."""

    def __init__(self) -> None:
        self.steps: dict[MetricSlot, Any] = {}  # the value of a step that was looked at last; a flush empties it
        self._epochs: dict[MetricSlot, Any] = {}

    def of_steps(self, slots: Iterable[MetricSlot]) -> Flushed:
        """Return the latest values of steps that were logged since the last read. Waits for the device if there are
        any.
        """
        new = [slot for slot in slots if slot.last is not None and self.steps.get(slot) is not slot.last]
        self.steps.update((slot, slot.last) for slot in new if not is_metric_object(slot.last))
        return read_steps(new)

    def all_steps(self, slots: list[MetricSlot]) -> Flushed:
        """Return the latest values of steps, including those that were read before."""
        self.steps.update((slot, slot.last) for slot in slots if not is_metric_object(slot.last))
        return read_steps(slots)

    def close_epoch(self, slots: Iterable[MetricSlot]) -> None:
        """Forget what was read of the aggregates of an epoch that ends: those of the next one are new."""
        for slot in slots:
            self._epochs.pop(slot, None)

    def of_epoch(self, slots: Iterable[MetricSlot]) -> Flushed:
        """Return the aggregates of the epoch so far, on this rank alone, that have changed since the last read."""
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
                read_into(flushed, list(named_values(entry_of(slot), compute_alone(slot.metric))), "epoch")
        return flushed


def read_steps(slots: Iterable[MetricSlot]) -> Flushed:
    """Return this rank's own latest values of steps; they stay pending. Waits for each device once."""
    flushed = Flushed()
    read_into(flushed, [pair for slot in slots if slot.last is not None for pair in step_values(slot)], "step")
    return flushed


def read_into(flushed: Flushed, values: list[tuple[Entry, float | Tensor]], when: Literal["step", "epoch"]) -> None:
    """Read values from their devices, with one copy each, and add them."""
    for entry, value in read_values(values):
        flushed.put(entry, value, when)


def read_values(values: list[tuple[Key, float | Tensor]]) -> list[tuple[Key, float]]:
    """Read values from their devices, with one copy for each device."""
    reads = HostReads()
    waiting = [(key, reads.add(value) if isinstance(value, Tensor) else float(value)) for key, value in values]
    read = reads.read()
    return [(key, at if isinstance(at, float) else read[at][0]) for key, at in waiting]


def _copy(slot: MetricSlot) -> MetricSlot:
    copied = copy.copy(slot)
    copied.values, copied.weights = list(slot.values), list(slot.weights)
    copied.totals, copied.chunks = dict(slot.totals), list(slot.chunks)
    return copied


Key = TypeVar("Key")
Exchange = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Hands this rank's dict to every rank and returns all of them in the order of the ranks. Collective."""


@dataclass(slots=True)
class Flushed:
    """Numbers on the host, by name.

    Attributes:
        logged: those for the loggers.
        callback: all of them; where a key was logged on step and epoch, also under its plain name.
        prog_bar: those for the progress bar.
        loaders: key → the one of several evaluation loaders that it is about.
        aliases: the plain names of values that `callback` also has under their full names.
        last_step: `loss`, the mean over all data that all ranks consumed in a step, and `grad_norm`, if they were read.
    """

    logged: dict[str, float] = field(default_factory=dict)
    callback: dict[str, float] = field(default_factory=dict)
    prog_bar: dict[str, float] = field(default_factory=dict)
    loaders: dict[str, int] = field(default_factory=dict)
    aliases: set[str] = field(default_factory=set)
    last_step: dict[str, float] = field(default_factory=dict)

    def put(self, entry: Entry, value: float, when: Literal["step", "epoch"]) -> None:
        """Enter one value under the names that its options ask for."""
        plain = entry.name + entry.suffix
        shown = f"{entry.name}_{when}{entry.suffix}" if entry.forked else plain
        self.callback[shown] = MetricValue(value)
        if when == "epoch" or not entry.epoch_closed:  # the plain name keeps the aggregate of a closed epoch
            self.callback[plain] = self.callback[shown]
        if entry.forked:
            self.aliases.add(plain)
        if entry.loader is not None:
            self.loaders[shown] = entry.loader
        if entry.logger:
            self.logged[shown] = value
        if entry.prog_bar:
            self.prog_bar[shown] = value


class Entry(NamedTuple):
    """One key's value on one rank. Its plain values are exchanged as a tuple.

    Attributes:
        name, suffix: the key is `name + suffix`.
        forked: logged on step and epoch, so that names end in `_step` and `_epoch`.
        logger, prog_bar: destinations of the value.
        kind: `"mean"`, `"sum"`, `"min"`, `"max"` or `"custom"`.
        main_only: only rank 0's value counts.
        total: the weighted sum (mean), the sum, the smallest or the largest value.
        weight: the sum of the weights; 0 when this rank has nothing.
        values: all values, for a reduction of the user's own.
        loader: the one of several evaluation loaders that it is about; None: none of them.
        epoch_closed: the aggregate of the epoch in which a step's value was logged has been read.
    """

    name: str
    suffix: str
    forked: bool
    logger: bool
    prog_bar: bool
    kind: str
    main_only: bool
    total: float = 0.0
    weight: float = 0.0
    values: Sequence[float] = ()
    loader: int | None = None
    epoch_closed: bool = False


def entry_of(slot: MetricSlot) -> Entry:
    """Return the entry of `slot`, without values."""
    settings = slot.settings
    forked = settings.on_step and settings.on_epoch
    kind, main_only, loader = slot.kind, settings.main_only, slot.loader
    closed = forked and slot.metric is None and not slot.has_epoch_values
    entry = Entry(slot.name, slot.suffix, forked, settings.logger, settings.prog_bar, kind, main_only, loader=loader)
    return entry._replace(epoch_closed=True) if closed else entry


def combine(entries: Sequence[Entry], reduction: Reduction | None) -> float | None:
    """Reduce one key's entries, one for each rank that has it, to one number.

    Args:
        entries: in the order of the ranks; at least one.
        reduction: the user's own function for the kind `"custom"`; None on a rank that never logged the key.

    Returns:
        The number (NaN when any value is NaN, and for a mean over no weight), or None when this rank lacks the
        function.

    Raises:
        ConfigurationError: the ranks reduce the key differently; raised alike on every rank.
    """
    kind = entries[0].kind
    if any(entry.kind != kind for entry in entries):
        kinds = sorted({entry.kind for entry in entries})
        raise ConfigurationError(
            f"log({entries[0].name!r}): the ranks reduce it differently ({', '.join(kinds)}). Use one reduce_fx."
        )
    if kind == "custom":
        return apply(reduction, entries[0].name, [value for entry in entries for value in entry.values])
    if kind == "mean":
        weight = sum(entry.weight for entry in entries)
        return sum(entry.total for entry in entries) / weight if weight else float("nan")
    if kind == "sum":
        return sum(entry.total for entry in entries)
    return pick([entry.total for entry in entries], kind)


def apply(reduction: Reduction | None, name: str, values: Sequence[float]) -> float | None:
    """Call the user's own reduction on a 1-D float64 host tensor of `values`; None when there is no function."""
    if reduction is None or isinstance(reduction, str):
        return None
    result = reduction(torch.tensor(values, dtype=torch.float64))
    try:
        return float(result)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TaskError(f"log({name!r}): reduce_fx returned {result!r}; expected one number.") from error


def gather_entries(gathered: Sequence[dict[str, Any]]) -> dict[str, list[Entry]]:
    """Return key → the entries of the ranks that have it, in an order that is the same on every rank."""
    found: dict[str, list[Entry]] = {}
    for rank, payload in enumerate(gathered):
        for key, raw in payload["metrics"].items():
            entry = Entry(*raw)
            if not entry.main_only or rank == 0:
                found.setdefault(key, []).append(entry)
    return found


def put_objects(
    flushed: Flushed, objects: dict[str, MetricSlot], gathered: list[dict[str, Any]], owner: torch.nn.Module | None
) -> None:
    """Put the results of metric objects of an epoch; collective. See `MetricBuffer.flush_epoch`."""
    counts = Counter(key for payload in gathered for key in payload["objects"])
    shared = {key: found for payload in reversed(gathered) for key, found in payload["objects"].items()}
    waiting: list[tuple[Entry, float | Tensor]] = []
    # Every rank computes in the same order, because torchmetrics communicates in `compute`.
    for key in counts:
        path, entry = shared[key]
        metric: Any = objects[key].metric if key in objects else None
        if counts[key] == len(gathered) or (path is not None and metric is not None):
            result = metric.compute()
        elif path is not None and owner is not None:  # this rank had no batch
            result = compute_without_values(owner.get_submodule(path))
        elif metric is not None:
            warnings.warn(
                f"the metric object {key!r} was logged on {counts[key]} of {len(gathered)} ranks only, and is not "
                "a module of the task: each of them reports its own value. Log it on every rank.",
                TrainwrightWarning,
                stacklevel=3,
            )
            result = compute_alone(metric)
        else:
            continue
        waiting += named_values(Entry(*entry), result)
    for key, slot in objects.items():
        if slot.on_epoch and key not in counts:
            waiting += named_values(entry_of(slot), compute_alone(slot.metric))
    read_into(flushed, waiting, "epoch")
