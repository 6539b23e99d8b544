"""Exchange of a flush between ranks, and the reduction to one number for each key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.core.metric_value import MetricValue
from trainwright.loggers.metric_slot import MetricSlot, Reduction, pick

Exchange = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""All-gather of a dict: returns those of all ranks, in the order of the ranks. Collective."""


@dataclass(slots=True)
class Flushed:
    """Numbers on the host, by name.

    Attributes:
        logged: values for the loggers.
        callback: all values; if a key was logged on step and epoch, also under its plain name.
        prog_bar: values for the progress bar.
        loaders: key → its evaluation loader, if there are several.
        aliases: the plain names of values that `callback` also has under their full names.
    """

    logged: dict[str, float] = field(default_factory=dict)
    callback: dict[str, float] = field(default_factory=dict)
    prog_bar: dict[str, float] = field(default_factory=dict)
    loaders: dict[str, int] = field(default_factory=dict)
    aliases: set[str] = field(default_factory=set)

    def put(self, entry: Entry, value: float, when: Literal["step", "epoch"]) -> None:
        """Add one value under the names of its options."""
        plain = entry.name + entry.suffix
        shown = f"{entry.name}_{when}{entry.suffix}" if entry.forked else plain
        self.callback[plain] = self.callback[shown] = MetricValue(value)
        if entry.forked:
            self.aliases.add(plain)
        if entry.loader is not None:
            self.loaders[shown] = entry.loader
        if entry.logger:
            self.logged[shown] = value
        if entry.prog_bar:
            self.prog_bar[shown] = value


class Entry(NamedTuple):
    """Value of one key on one rank; made of plain values, so that it can be sent as a tuple.

    Attributes:
        name, suffix: the key is `name + suffix`.
        forked: logged on step and epoch, so that names end in `_step` and `_epoch`.
        logger, prog_bar: whether it is sent there.
        kind: `"mean"`, `"sum"`, `"min"`, `"max"` or `"custom"`.
        main_only: only rank 0's value counts.
        total: the weighted sum (mean), the sum, the smallest or the largest value.
        weight: the sum of the weights; 0 if this rank has no value.
        values: all values, for a custom reduction.
        loader: its evaluation loader, if there are several; else None.
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


def entry_of(slot: MetricSlot) -> Entry:
    """Return the entry of `slot`, without values."""
    settings = slot.settings
    forked = settings.on_step and settings.on_epoch
    kind, main_only, loader = slot.kind, settings.main_only, slot.loader
    return Entry(slot.name, slot.suffix, forked, settings.logger, settings.prog_bar, kind, main_only, loader=loader)


def combine(entries: Sequence[Entry], reduction: Reduction | None) -> float | None:
    """Reduce one key's entries, one for each rank that has it, to one number.

    Args:
        entries: in the order of the ranks; at least one.
        reduction: the user's own function for the kind `"custom"`; None on a rank that never logged the key.

    Returns:
        The number (NaN if any value is NaN, and for a mean without weight), or None if this rank lacks the function.

    Raises:
        ConfigurationError: the ranks reduce the key differently; raised on every rank.
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
    result = entries[0].total
    for entry in entries[1:]:
        result = pick(result, entry.total, kind)
    return result


def apply(reduction: Reduction | None, name: str, values: Sequence[float]) -> float | None:
    """Call a custom reduction on a 1-D float64 host tensor of `values`; None without a function.

    Raises:
        TaskError: it returned something that is not one number.
    """
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
