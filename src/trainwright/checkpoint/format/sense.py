"""Whether what a checkpoint's files say makes sense to a resume: found before anything is restored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainwright.core.errors import CheckpointError
from trainwright.core.state import TrainState

_BOUND = 2**63
Check = Callable[[Any], bool]


def _is(kind: type) -> Check:
    return lambda value: isinstance(value, kind)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _BOUND


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _with(**checks: Check) -> Check:
    """Return a check of a dict, and of those of its entries that are there."""
    return lambda value: (
        isinstance(value, dict) and all(name not in value or check(value[name]) for name, check in checks.items())
    )


def _is_place(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and "batch" in value and all(map(_is_count, value.values())))


def _is_data(value: Any) -> bool:
    whole = isinstance(value, dict) and (not value or {"position", "epoch"} <= value.keys())
    return whole and _with(position=_is_place, epoch=_is_count, order=_is(dict))(value)


# The entries of the trainer part that a resume takes apart, and what each is (see docs/checkpoint-format.md).
_ENTRIES: dict[str, tuple[str, Check]] = {
    "task": ("a dict", _is(dict)),
    "callbacks": ("a dict", _is(dict)),
    "schedulers": ("a list of dicts", _list_of(_is(dict))),
    "strategy": ("a dict", _is(dict)),
    "data": ("a dict with a position of counts and an epoch", _is_data),
    "data_ranks": ("a list of ranks", _list_of(_is_count)),
    "loggers": ("a list of dicts", _list_of(_is(dict))),
    "datamodule": ("a dict", _is(dict)),
    "left_out": (
        "a dict of lists and a count",
        _with(skipped=_list_of(_is(dict)), num_rollbacks=_is_count, abandoned=_is(list)),
    ),
    "metrics": ("a list of dicts", _list_of(_with(logged=_with(), objects=_with()))),
    "frozen": ("a list of names", _list_of(_is(str))),
    "seed": ("a whole number", lambda value: type(value) is int),
    "run_id": ("a text", _is(str)),
}
_GROUP = _with(params=_list_of(_is(str)))


def check_progress(state: Mapping[str, Any], origin: str) -> None:
    """Check the counters of a run.

    Raises:
        CheckpointError: one is no number, negative or absurd.
    """
    for field in dataclasses.fields(TrainState):
        value, kind = state.get(field.name, field.default), type(field.default)
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits or not 0 <= value < _BOUND:
            raise CheckpointError(f"{origin}: progress.{field.name} is {value!r}; it is damaged or not ours.")


def check_entries(trainer: Mapping[str, Any], origin: str) -> None:
    """Check what a resume takes for granted of the trainer part.

    Raises:
        CheckpointError: an entry is of another form than this version writes.
    """
    for name, (expected, check) in _ENTRIES.items():
        if name in trainer and not check(trainer[name]):
            raise CheckpointError(f"{origin}: {name!r} is not {expected}; it is damaged or not ours.")


def check_optimizers(trees: Sequence[Any], origin: str) -> None:
    """Check what a resume takes for granted of the optimizer part.

    Raises:
        CheckpointError: parameter groups or states are of another form than this version writes.
    """
    for number, tree in enumerate(trees):
        groups = tree.get("groups", tree.get("param_groups", [])) if isinstance(tree, dict) else None
        states = tree.get("state", {}) if isinstance(tree, dict) else None
        if not _list_of(_GROUP)(groups) or not isinstance(states, dict):
            raise CheckpointError(f"{origin}: optimizer {number} has no groups and states; it is damaged or not ours.")
