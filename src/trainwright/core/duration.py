"""Lengths and intervals of a run with their unit: `Duration("500 steps")`, `Duration("0.25 epoch")`."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trainwright.core.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from trainwright.core.state import TrainState

Unit = Literal["steps", "batches", "epochs", "samples", "tokens", "seconds"]

# Words for a unit, the unit, and the factor by which an amount in these words is multiplied.
_SPELLINGS: tuple[tuple[str, Unit, float], ...] = (
    ("step steps", "steps", 1),
    ("batch batches", "batches", 1),
    ("ep epoch epochs", "epochs", 1),
    ("sample samples", "samples", 1),
    ("token tokens", "tokens", 1),
    ("s sec second seconds", "seconds", 1),
    ("min minute minutes", "seconds", 60),
    ("h hour hours", "seconds", 3600),
    ("d day days", "seconds", 86400),
)
_UNITS = {word: (unit, factor) for words, unit, factor in _SPELLINGS for word in words.split()}
_PREFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
# A number, a prefix and a unit (`2.5M samples`, `1e3 steps`, `1_000 steps`), or a number with a unit of time directly
# after it (`30s`). `10min` is the second form: in the first, a space stands before the unit.
_TEXT = re.compile(
    r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([kKMBGT]?)\s+([A-Za-z]+)\s*"
    r"|\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(s|min|h|d)\s*"
)
_CLOCK = re.compile(r"\s*(\d+):(\d{1,2}):(\d{1,2}):(\d{1,2})\s*")  # days:hours:minutes:seconds


@dataclass(frozen=True, slots=True)
class Duration:
    """Length of training with its unit.

    Write `Duration("500 steps")`, `Duration("0.25 epoch")`, `Duration("10 min")`, `Duration("2B tokens")`,
    `Duration("00:12:00:00")` (days:hours:minutes:seconds), `Duration(500, "steps")` or pass a `timedelta`. The second
    argument is used for a number only.

    Attributes:
        value: the number, ≥ 0, in `unit`. Every run has reached a length of 0.
        unit: `"steps"` (completed optimizer steps), `"batches"` (micro-batches of one data-parallel rank), `"epochs"`,
            `"samples"` or `"tokens"` (over all ranks), or `"seconds"` (wall-clock time in training).

    Raises:
        ConfigurationError: the length is negative or NaN, cannot be parsed, or has no unit or an unknown one.
    """

    value: float
    unit: Unit

    def __init__(self, value: float | int | str | datetime.timedelta | Duration, unit: str | None = None) -> None:
        amount, parsed_unit = _parse(value, unit)
        if amount < 0 or math.isnan(amount):
            raise ConfigurationError(f"Duration({value!r}): a length cannot be negative or NaN. Write 0 or more.")
        object.__setattr__(self, "value", amount)  # the dataclass is frozen
        object.__setattr__(self, "unit", parsed_unit)

    def __str__(self) -> str:
        number = int(self.value) if float(self.value).is_integer() else self.value
        return f"{number} {self.unit}"

    def elapsed(self, state: TrainState) -> float:
        """Return the progress of the run in this unit. In epochs, this is the number of finished epochs."""
        return float(getattr(state, _FIELDS.get(self.unit, self.unit)))

    def reached(self, state: TrainState) -> bool:
        """Return whether the run has reached this length."""
        return self.elapsed(state) >= self.value


_FIELDS = {"steps": "step", "epochs": "epoch"}  # of TrainState, whose other fields have the names of their units


def _parse(value: float | int | str | datetime.timedelta | Duration, unit: str | None) -> tuple[float, Unit]:
    if isinstance(value, Duration):
        return value.value, value.unit
    if isinstance(value, datetime.timedelta):
        return value.total_seconds(), "seconds"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if unit is None:
            raise ConfigurationError(
                f"Duration({value!r}) has no unit. Write, for example, Duration('{value} steps'); units are "
                "steps, batches, epochs, samples, tokens, seconds."
            )
        name, factor = _unit(unit, f"Duration({value!r}, {unit!r})")
        return float(value) * factor, name
    if not isinstance(value, str):
        raise ConfigurationError(
            f"a Duration is created from text such as '500 steps', not from {type(value).__name__}."
        )
    clock = _CLOCK.fullmatch(value)
    if clock:
        days, hours, minutes, seconds = (int(part) for part in clock.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds), "seconds"
    match = _TEXT.fullmatch(value)
    if match is None:
        raise ConfigurationError(
            f"{value!r} is not a length of training. Write a number and a unit, for example '500 steps', "
            "'0.25 epoch', '2M samples', '10 min'."
        )
    # The groups of the form that does not match are None.
    number, prefix, word, short_number, short_word = match.groups()
    name, factor = _unit(word or short_word, value)
    amount = float((number or short_number).replace("_", ""))
    return amount * _PREFIXES.get(prefix, 1.0) * factor, name


def _unit(word: str, origin: str) -> tuple[Unit, float]:
    """Return the unit for a word, and the factor by which the amount is multiplied. `origin` is for the error."""
    unit_and_factor = _UNITS.get(word) or _UNITS.get(word.lower())
    if unit_and_factor is None:
        raise ConfigurationError(
            f"{origin!r}: unknown unit {word!r}.{nearest(word, _UNITS)} Units are steps, batches, epochs, samples, "
            "tokens, seconds (also s, min, h, d)."
        )
    return unit_and_factor


def parse_time(value: Any, name: str) -> Duration:
    """Return the argument `name` as a `Duration` in seconds. Another unit raises a ConfigurationError.

    `value` is a timedelta, a dict of its arguments (`{"hours": 2}`), `"00:12:00:00"` (days first) or `"10 min"`.
    """
    if isinstance(value, Mapping):
        try:
            value = datetime.timedelta(**value)
        except TypeError as error:
            raise ConfigurationError(f"{name}={value!r}: {error}. Use datetime.timedelta's argument names.") from None
    duration = Duration(value)
    if duration.unit != "seconds":
        raise ConfigurationError(f"{name}={value!r} is in {duration.unit}; write a length of time, such as '10 min'.")
    return duration


class Interval:
    """Interval that becomes due at step boundaries.

    The interval is due at the end of each step in which the run reaches a multiple of `every`. If a step passes a
    multiple, the next due time is still the next multiple, not one interval after the step. For example, an interval of
    100 samples with steps of 32 samples is due after 128, 224 and 320 samples.

    Args:
        every: length of the interval. None or a value of 0 disables it.

    Attributes:
        _span: the value of `every`, infinite if the interval is disabled.
        _field: name of the field of TrainState that counts the unit.
        _next: the due time: the next multiple of `_span`.
    """

    __slots__ = ("_field", "_next", "_span", "every")

    def __init__(self, every: Duration | None) -> None:
        self.every = every
        self._span = math.inf
        self._field = "step"
        if every is not None:
            self._field = _FIELDS.get(every.unit, every.unit)
            if every.value > 0:
                self._span = every.value
        self._next = self._span

    def align(self, state: TrainState) -> None:
        """Set the due time to the first multiple of `every` after `state`. Called when a run starts or resumes."""
        now = getattr(state, self._field)
        self._next = (now // self._span + 1) * self._span  # infinite for an infinite span: 5 // inf is 0

    @property
    def counts_steps(self) -> bool:
        """True if the unit is optimizer steps."""
        return self._field == "step"

    def left(self, state: TrainState) -> float:
        """Return the remaining length until the interval is due, in the interval's unit."""
        return self._next - float(getattr(state, self._field))

    def due(self, state: TrainState) -> bool:
        """Return whether the run has reached the due time. If so, move the due time to the next multiple."""
        now = getattr(state, self._field)
        if now < self._next:
            return False
        self._next = (now // self._span + 1) * self._span
        return True
