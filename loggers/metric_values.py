"""Values of slots (step values, epoch aggregates, results of metric objects), and states of metric objects."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from trainwright.core.errors import ConfigurationError, TaskError, TrainwrightWarning
from trainwright.core.metric_value import MetricValue
from trainwright.core.tree import map_tensors, restore_attributes
from trainwright.loggers.metric_options import Reduction
from trainwright.loggers.metric_slot import (
    HostReads,
    MetricSlot,
    State,
    is_metric_object,
    pack,
    pick,
    reset_metric,
    restored_slot,
    to_number,
)


def step_values(slot: MetricSlot) -> Iterator[tuple[Entry, float | Tensor]]:
    """Yield the numbers of a slot's last step. The slot must have a value."""
    last = slot.last
    entry = entry_of(slot)
    if slot.metric is None and isinstance(last, (float, Tensor)):
        yield entry, last
        return
    if is_metric_object(last):
        # It has no value for this batch, so use its accumulated value. The end of an epoch may have reset the object
        # since the step.
        parts = last.values() if isinstance(last, torch.nn.ModuleDict) else (last,)
        if not all(part.update_called for part in parts):
            return
        last = compute_alone(last)
    yield from named_values(entry, last)


def named_values(entry: Entry, result: object) -> Iterator[tuple[Entry, float | Tensor]]:
    """Yield the numbers in the result of a metric object. Entries of a dict are named `name/key`."""
    if isinstance(result, dict):
        for key, value in result.items():
            name = f"{entry.name}/{key}"
            yield entry._replace(name=name), to_number(name, value)
    else:
        yield entry, to_number(entry.name, result)


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
            part.distributed_available_fn = lambda: False
            # A cached result would be returned by a later `compute` over all ranks.
            part.compute_with_cache = False
        yield
    finally:
        for part, distributed_available_fn, compute_with_cache in changed:
            part.distributed_available_fn = distributed_available_fn
            part.compute_with_cache = compute_with_cache


def epoch_entries(slots: Iterable[MetricSlot]) -> dict[str, Entry]:
    """Return this rank's aggregates by key, read with one copy per device."""
    reads = HostReads()
    waiting: list[tuple[MetricSlot, list[list[float]]]] = []
    for slot in slots:
        if not slot.has_epoch_values:
            continue
        slot.fold()
        lists: list[list[float]] = []
        for part in slot.chunks if slot.kind == "custom" else slot.totals.values():
            lists.append(reads.add(part) if isinstance(part, Tensor) else part)
        waiting.append((slot, lists))
    reads.read()
    entries: dict[str, Entry] = {}
    for slot, lists in waiting:
        values = list(itertools.chain.from_iterable(lists))
        entry = entry_of(slot)
        if slot.kind == "custom":
            entry = entry._replace(values=values)
        elif slot.kind in ("mean", "sum"):
            entry = entry._replace(total=slot.host_total + sum(values), weight=slot.weight)
        else:
            if slot.host_extreme is not None:
                values.append(slot.host_extreme)
            entry = entry._replace(total=pick(values, slot.kind), weight=slot.weight)
        entries[slot.key] = entry
    return entries


def merge(states: Sequence[Mapping[str, Any]]) -> State:
    """Merge the aggregates of several ranks, each of which is a state from `slot_states`."""
    slots = [restored_slot(state, torch.device("cpu")) for state in states]
    entries: list[Entry] = []
    for slot in slots:
        entries += epoch_entries([slot]).values()
    totals = [entry.total for entry in entries]
    values: list[float] = []
    for entry in entries:
        values += entry.values
    merged = dict(states[0])  # the name and settings
    merged["values"] = pack([], {})
    merged["weights"] = []
    merged["totals"] = {}
    merged["last"] = None
    merged["chunks"] = [pack(values, {})] if values else []
    merged["num_folded"] = sum(slot.num_folded for slot in slots)
    merged["weight"] = sum(entry.weight for entry in entries)
    merged["host_total"] = sum(totals)
    has_extreme = slots[0].is_extreme and bool(totals)
    merged["host_extreme"] = pick(totals, slots[0].kind) if has_extreme else None
    merged["metric"] = None  # objects of several ranks are not merged
    return merged


def put_combined(
    flushed: Flushed,
    entries: dict[str, list[Entry]],
    reductions: Mapping[str, Reduction | None],
    when: Literal["step", "epoch"],
) -> None:
    """Reduce each key's entries, one per rank that has logged it, and add the result to `flushed`."""
    for key, of_ranks in entries.items():
        value = combine(of_ranks, reductions.get(key))
        if value is not None:
            flushed.put(of_ranks[0], value, when)


def new_of_epoch(slots: Iterable[MetricSlot]) -> Flushed:
    """Return this rank's aggregates of the epoch so far that have changed since the last call for these slots."""
    flushed = Flushed()
    copies: list[MetricSlot] = []
    with_objects: list[MetricSlot] = []
    for slot in slots:
        has_values = any(slot.epoch_count)  # (0, 0) without values
        is_new = has_values and slot.seen_epoch != slot.epoch_count
        if not slot.on_epoch or not is_new:
            continue
        slot.seen_epoch = slot.epoch_count
        if slot.metric is None:
            copies.append(_copy(slot))  # to fold the slot now would change the order of its sum
        else:
            with_objects.append(slot)
    reductions = {slot.key: slot.settings.reduction for slot in copies}
    put_combined(flushed, {key: [entry] for key, entry in epoch_entries(copies).items()}, reductions, "epoch")
    for slot in with_objects:
        read_into(flushed, named_values(entry_of(slot), compute_alone(slot.metric)), "epoch")
    return flushed


def read_steps(slots: Iterable[MetricSlot]) -> Flushed:
    """Return this rank's latest step values, and mark them as read (`seen_step`). The next flush returns them too.

    Waits for each device once.
    """
    flushed = Flushed()
    values: list[tuple[Entry, float | Tensor]] = []
    for slot in slots:
        if slot.last is None:
            continue
        # A metric object stays the same object when its value changes, so it is never marked as read.
        slot.seen_step = None if is_metric_object(slot.last) else slot.last
        values += step_values(slot)
    read_into(flushed, values, "step")
    return flushed


def read_into(flushed: Flushed, values: Iterable[tuple[Entry, float | Tensor]], when: Literal["step", "epoch"]) -> None:
    """Read values with one copy per device, and add them to `flushed`."""
    reads = HostReads()
    waiting = [(entry, reads.add(value)) for entry, value in values]
    reads.read()
    for entry, (value,) in waiting:
        flushed.put(entry, value, when)


def _copy(slot: MetricSlot) -> MetricSlot:
    copied = copy.copy(slot)
    copied.values = list(slot.values)
    copied.weights = list(slot.weights)
    copied.totals = dict(slot.totals)
    copied.chunks = list(slot.chunks)
    return copied


Exchange = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Function that gathers a dict of every rank and returns the list in the order of the ranks. Collective."""


@dataclass(slots=True)
class Flushed:
    """Metrics that were read from their devices: numbers by name.

    Attributes:
        logged: numbers for the loggers.
        callback: all numbers. A metric that was logged on step and epoch is here under its plain name too, besides the
            names that end in `_step` and `_epoch`.
        prog_bar: numbers for the progress bar.
        loaders: index of the evaluation loader of each key, if there are several.
        aliases: the names without `_step` and `_epoch` in `callback`, whose values it contains twice.
        last_step: `loss`, the mean over all data that all ranks consumed in a step, and `grad_norm`, if they were read.
        rows: numbers for the loggers of each batch of an evaluation, by evaluation step.
    """

    logged: dict[str, float] = field(default_factory=dict)
    callback: dict[str, MetricValue] = field(default_factory=dict)
    prog_bar: dict[str, float] = field(default_factory=dict)
    loaders: dict[str, int] = field(default_factory=dict)
    aliases: set[str] = field(default_factory=set)
    last_step: dict[str, float] = field(default_factory=dict)
    rows: dict[int, dict[str, float]] = field(default_factory=dict)

    def put(self, entry: Entry, value: float, when: Literal["step", "epoch"]) -> None:
        """Add one value under the names that its options define."""
        plain_key = entry.name + entry.suffix
        key = f"{entry.name}_{when}{entry.suffix}" if entry.forked else plain_key
        self.callback[key] = MetricValue(value)
        # A step value that is flushed after its epoch's aggregate must not replace it under the plain name.
        if when == "epoch" or not entry.epoch_closed:
            self.callback[plain_key] = self.callback[key]
        if entry.forked:
            self.aliases.add(plain_key)
        if entry.loader is not None:
            self.loaders[key] = entry.loader
        if entry.logger:
            self.logged[key] = value
        if entry.prog_bar:
            self.prog_bar[key] = value


class Entry(NamedTuple):
    """The value of one metric on one rank. Ranks exchange entries as tuples.

    Attributes:
        name, suffix: the metric's name, and the suffix for its evaluation loader. Their sum is the key.
        forked: True if logged on step and epoch, so that names end in `_step` and `_epoch`.
        logger, prog_bar: destinations of the value.
        kind: `"mean"`, `"sum"`, `"min"`, `"max"` or `"custom"`.
        main_only: True if only rank 0's value is used.
        total: the weighted sum (mean), the sum, the smallest or the largest value.
        weight: the sum of the weights, which only a mean uses.
        values: all values, for a user-defined reduction.
        loader: index of the evaluation loader, or None.
        epoch_closed: True if the aggregate of the epoch in which the value was logged has been read.
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
    """Return an entry of `slot` without values."""
    settings = slot.settings
    forked = settings.on_step and settings.on_epoch
    has_epoch_value = slot.metric is not None or slot.has_epoch_values
    return Entry(
        name=slot.name,
        suffix=slot.suffix,
        forked=forked,
        logger=settings.logger,
        prog_bar=settings.prog_bar,
        kind=slot.kind,
        main_only=settings.main_only,
        loader=slot.loader,
        epoch_closed=forked and not has_epoch_value,
    )


def with_step_value(entry: Entry, value: float, weight: float) -> Entry:
    """Return an entry with one step value, to be reduced over the ranks. Only a mean uses `weight`."""
    if entry.kind != "mean":
        weight = 1.0
    return entry._replace(total=value * weight, weight=weight, values=(value,))


def combine(entries: Sequence[Entry], reduction: Reduction | None) -> float | None:
    """Reduce one key's entries to one number.

    Args:
        entries: one per rank that has logged the key, in the order of the ranks.
        reduction: the user's function for the kind `"custom"`; None on a rank that has not logged the key.

    Returns:
        The number, or None if this rank lacks the function. NaN if any value is NaN, or if the weights of a mean are 0.

    Raises:
        ConfigurationError: the ranks reduce the key differently. Raised on every rank.
        TaskError: `reduction` did not return a number.
    """
    kind = entries[0].kind
    if any(entry.kind != kind for entry in entries):
        kinds = sorted({entry.kind for entry in entries})
        raise ConfigurationError(
            f"log({entries[0].name!r}): the ranks reduce it differently ({', '.join(kinds)}). Use one reduce_fx."
        )
    if kind == "mean":
        weight = sum(entry.weight for entry in entries)
        if weight == 0:
            return float("nan")
        return sum(entry.total for entry in entries) / weight
    if kind == "sum":
        return sum(entry.total for entry in entries)
    if kind != "custom":
        return pick([entry.total for entry in entries], kind)
    if reduction is None or isinstance(reduction, str):
        return None
    values: list[float] = []
    for entry in entries:
        values += entry.values
    result = reduction(torch.tensor(values, dtype=torch.float64))
    try:
        return float(result)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TaskError(f"log({entries[0].name!r}): reduce_fx returned {result!r}; expected one number.") from error


def gather_entries(gathered: Sequence[dict[str, Any]]) -> dict[str, list[Entry]]:
    """Return the entries of all ranks by key. The order of keys is the same on every rank."""
    by_key: dict[str, list[Entry]] = {}
    for rank, payload in enumerate(gathered):
        for key, fields in payload["metrics"].items():
            entry = Entry(*fields)
            if not entry.main_only or rank == 0:
                by_key.setdefault(key, []).append(entry)
    return by_key


def objects_payload(objects: Mapping[str, MetricSlot], owner: torch.nn.Module | None) -> dict[str, Any]:
    """Return, by key, the path in `owner` and the entry of each metric object that reduces over ranks."""
    paths = module_paths(owner)
    payload: dict[str, Any] = {}
    for key, slot in objects.items():
        if slot.on_epoch and slot.settings.sync_dist is not False:
            payload[key] = (paths.get(id(slot.metric)), tuple(entry_of(slot)))
    return payload


def module_paths(owner: torch.nn.Module | None) -> dict[int, str]:
    """Return the names of all modules in `owner` by their ids."""
    if owner is None:
        return {}
    return {id(module): path for path, module in owner.named_modules()}


def put_objects(
    flushed: Flushed, objects: dict[str, MetricSlot], gathered: list[dict[str, Any]], owner: torch.nn.Module | None
) -> None:
    """Add the results of an epoch's metric objects to `flushed`. Collective; see `MetricBuffer.flush_epoch`.

    `objects` are this rank's slots by key. `gathered` contains the dict that each rank has passed to the exchange.
    """
    counts: Counter[str] = Counter()
    shared: dict[str, tuple[str | None, tuple[Any, ...]]] = {}  # path and entry of the first rank that has logged it
    for payload in gathered:
        for key, path_and_entry in payload["objects"].items():
            counts[key] += 1
            shared.setdefault(key, path_and_entry)
    waiting: list[tuple[Entry, float | Tensor]] = []
    # Every rank computes in the same order, because torchmetrics communicates in `compute`.
    for key, num_ranks in counts.items():
        path, entry = shared[key]
        metric: Any = objects[key].metric if key in objects else None
        is_on_all_ranks = num_ranks == len(gathered)
        # With a path, ranks that have not logged the object compute it in the second branch.
        if metric is not None and (is_on_all_ranks or path is not None):
            result = metric.compute()
        elif path is not None and owner is not None:
            # This rank had no batch, but the others wait for it in `compute`.
            result = _compute_unused(owner.get_submodule(path))
        elif metric is not None:
            warnings.warn(
                f"the metric object {key!r} was logged on {num_ranks} of {len(gathered)} ranks only, and is not "
                "a module of the task: each of them reports its own value. Log it on every rank.",
                TrainwrightWarning,
                stacklevel=3,
            )
            result = compute_alone(metric)
        else:
            continue
        waiting += named_values(Entry(*entry), result)
    for key, slot in objects.items():
        if slot.on_epoch and key not in counts:  # with sync_dist=False
            waiting += named_values(entry_of(slot), compute_alone(slot.metric))
    read_into(flushed, waiting, "epoch")


def _compute_unused(metric: Any) -> Any:
    """Compute a metric object that this rank has not updated, together with the ranks that have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics warns about `compute` before `update`
        result = metric.compute()
    reset_metric(metric)  # `compute` caches its result, which a later `compute` would return
    return result


@contextmanager
def same_metric_objects(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Restore the metric objects among `modules` after the context, so that they do not count a batch of padding.

    Metric objects are not replaced by ones that ignore updates, because the step may use their results.
    """
    # By id, because torchmetrics hashes an object by its state too. Each object is restored once.
    by_id = {id(module): module for module in modules}
    with ExitStack() as undo:
        for module in by_id.values():
            if is_metric_object(module):
                undo.enter_context(restore_attributes(module, ("_modules", "_parameters")))
        yield


def objects_state(module: torch.nn.Module, *, without: Sequence[Any] = ()) -> State:
    """Return the states of the torchmetrics objects in a module, by module name. Omit objects without an update.

    A module's state dict contains them only if a user enables it (`persistent`).

    Args:
        module: the task.
        without: objects to omit. Default: none.
    """
    omitted = {id(part) for part in without}
    states = {}
    for name, part in _metric_parts(module):
        if part.update_called and id(part) not in omitted:
            state = map_tensors(torch.Tensor.cpu, part.metric_state)
            states[name] = {"update_count": part.update_count, "state": state}
    return states


def unused_objects(module: torch.nn.Module) -> list[Any]:
    """Return the torchmetrics objects in a module that have no update."""
    return [part for _, part in _metric_parts(module) if not part.update_called]


def load_objects_state(module: torch.nn.Module, states: Mapping[str, Any], device: torch.device) -> list[str]:
    """Restore the states of metric objects. Return the names that the module does not have."""
    parts = dict(_metric_parts(module))
    for name, saved in states.items():
        part = parts.get(name)
        if part is None:
            continue
        for key, value in saved["state"].items():
            setattr(part, key, map_tensors(lambda tensor: tensor.to(device), value))
        # torchmetrics has no public way to mark a metric as updated.
        part._update_count = saved["update_count"]
        part._computed = None  # the cached result is of the old state
    return [name for name in states if name not in parts]


def _metric_parts(module: torch.nn.Module) -> Iterable[tuple[str, Any]]:
    """Yield each Metric in a module, including those in collections."""
    for name, part in module.named_modules():
        if not is_metric_object(part):
            continue
        if isinstance(part, torch.nn.ModuleDict):
            part.values(copy_state=False)  # type: ignore[call-arg]  # links the metrics that share a state
        elif hasattr(part, "update_called"):
            yield name, part
