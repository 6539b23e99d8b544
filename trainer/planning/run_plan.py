"""The plan of a fit as data and as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.core.host.byte_sizes import format_bytes

UNKNOWN = "not known"
_WIDTH = 100  # characters of a long value in the text


@dataclass(frozen=True, slots=True)
class PlannedSetting:
    """A setting of the Trainer.

    Attributes:
        value: its value as data for JSON. Objects are represented by the names of their classes.
        source: `"default"`, `"argument"`, `"attribute"` (changed after the Trainer was created), the name of an
            environment variable or a configuration file, `"command line"`, or the argument that overrides it.
    """

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a fit. `str(plan)` is a text with tables.

    None means that a value is not known without training. `notes` say why.

    Attributes:
        settings: the Trainer's settings.
        strategy: `name`, `options` (the arguments passed to it), `units` (number of modules that are sharded or
            offloaded separately) and `unit_classes`.
        processes: `count`, `started_by`, `device`, `data_ranks` (ranks that read different batches) and `mesh` (ranks
            along each axis).
        precision: `name`, and the data types of `parameters`, `computation`, `reduction` and `optimizer_state`.
        parameters: `total`, `trainable` and `frozen`, and the same on one device: `total_per_device`, ….
        memory: `forecast_bytes`, of one device in a step of Adam without activations. After a fit of this Trainer also
            `peak_bytes` of this process, measured as in `peak_of`.
        data: `micro_batch`, `accumulate_grad_batches`, `global_batch`, `tokens_per_step` (with `setup_data=True`,
            estimated from the first batch), `batches_per_epoch` of one rank, `samples_per_epoch` of all ranks,
            `steps_per_epoch`, `total_steps`, and further limits of the fit in `other_limits`.
        callbacks: classes of the callbacks, in the order of their calls.
        loggers: classes of the loggers.
        notes: reasons why values are not known.
    """

    settings: Mapping[str, PlannedSetting]
    strategy: Mapping[str, Any]
    processes: Mapping[str, Any]
    precision: Mapping[str, str | None]
    parameters: Mapping[str, int | None]
    memory: Mapping[str, int | str | None]
    data: Mapping[str, Any]
    callbacks: Sequence[str]
    loggers: Sequence[str]
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as data for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Return the plan as a text with tables."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for title in ("strategy", "processes", "precision", "parameters", "memory", "data"):
            facts: Mapping[str, Any] = getattr(self, title)
            yield from _table(title, [(name, _text(name, value)) for name, value in facts.items()])
        for title, names in (("callbacks", self.callbacks), ("loggers", self.loggers)):
            yield from _table(title, [(name, "") for name in names or ["none"]])
        rows = []
        for name, setting in self.settings.items():
            # None is a value of a setting, unlike above, where it is a value that is not known.
            rows.append((name, _text(name, setting.value, none="None"), setting.source))
        yield from _table("settings", rows)
        for note in self.notes:
            yield f"note: {note}"


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [f"{title}:"]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    lines.append("")
    return lines


def _text(name: str, value: Any, none: str = UNKNOWN) -> str:
    """Return a value as text of at most `_WIDTH` characters. `none` is the text for None."""
    if isinstance(value, Mapping):
        text = ", ".join(f"{key}={item}" for key, item in value.items()) or "none"
    elif isinstance(value, (list, tuple)):
        text = ", ".join(map(str, value)) or "none"
    elif value is None:
        text = none
    elif name.endswith("_bytes"):
        text = format_bytes(value)
    elif type(value) is int:  # not a bool
        text = f"{value:,}"
    else:
        text = str(value)
    if len(text) > _WIDTH:
        text = text[: _WIDTH - 1] + "…"
    return text
