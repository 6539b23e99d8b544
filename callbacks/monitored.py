"""Helpers of callbacks that monitor a metric: comparison of values, and the error for a missing metric."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, TypeVar

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.run import Run

Mode = Literal["min", "max"]
T = TypeVar("T")


def check_mode(mode: str, owner: str) -> Mode:
    """Return `mode`. If it is unknown, raise a ConfigurationError that names the callback `owner`."""
    if mode == "min":
        return "min"
    if mode == "max":
        return "max"
    raise ConfigurationError(f"{owner}(mode={mode!r}): write 'min' (lower is better) or 'max' (higher is better).")


def is_better(score: float, than: float, mode: Mode) -> bool:
    """Return whether `score` is strictly better than the score `than`. NaN is never better."""
    return score < than if mode == "min" else score > than


def worst(mode: Mode) -> float:
    """Return the worst possible score."""
    return math.inf if mode == "min" else -math.inf


def missing_metric(owner: str, name: str, logged: Iterable[str], trainer: Run | None = None) -> str:
    """Return the error text for a missing metric `name` that `owner` needs. The text lists the logged metrics, most
    similar first, and has a hint if `trainer` is a fit without validation.
    """
    known = sorted(logged)
    known_text = ", ".join(map(repr, known)) or "none"
    hint = nearest(name, known)
    if trainer is not None and trainer.stage == "fit" and not trainer.has_validation:
        hint = " This fit does not validate: it lacks a validation_step, val_dataloaders or limit_val_batches above 0."
    return f"{owner} needs the metric {name!r}, which was not logged.{hint} Logged so far: {known_text}."


def from_main_rank(trainer: Run, value: T) -> T:
    """Return rank 0's `value` on every rank. Collective when there are several processes; blocks the host only."""
    if trainer.world_size == 1:
        return value
    main_value: T = trainer.broadcast(value)
    return main_value


def to_json(number: float | None) -> float | str | None:
    """Return a value for strict JSON. Infinities and NaN become text."""
    if number is None or math.isfinite(number):
        return number
    return str(number)


def from_json(value: float | str | None) -> float | None:
    """Undo `to_json`."""
    return None if value is None else float(value)
