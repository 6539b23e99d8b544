"""Schedules of `torch.profiler`, made of dictionaries."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerAction

from trainwright.core.errors import ConfigurationError, nearest

_KEYS = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")
_FAR = 10_000  # steps in which a schedule is searched for its first active step


class Schedule:
    """A schedule as a function of the step, which can be sent to another process.

    Args:
        options: Arguments of `torch.profiler.schedule`; `wait`, `warmup` are 0 and `active` is 1 if they are missing.

    Raises:
        ConfigurationError: A key is unknown, or a value is not a whole number in its range.
    """

    def __init__(self, options: Mapping[str, int]) -> None:
        for key, value in options.items():
            if key not in _KEYS:
                raise ConfigurationError(
                    f"a schedule has no key {key!r}.{nearest(str(key), _KEYS)} Known: {', '.join(_KEYS)}."
                )
            least = 1 if key == "active" else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{key}={value!r} of a schedule: expected a whole number of at least {least}.")
        self.options = {"wait": 0, "warmup": 0, "active": 1, **options}
        self._make()

    def _make(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Profiler won't be using warmup")  # it was requested
            self._call = torch.profiler.schedule(**self.options)

    def __call__(self, step: int) -> ProfilerAction:
        action: ProfilerAction = self._call(step)
        return action

    def __getstate__(self) -> dict[str, object]:
        return {"options": self.options}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._make()


def make_schedule(given: Mapping[str, int] | Callable[[int], ProfilerAction]) -> Callable[[int], ProfilerAction]:
    """Return a schedule for a dictionary of torch's arguments, or the given function.

    Raises:
        ConfigurationError: A key is unknown, or a value is not a whole number in its range.
    """
    return given if callable(given) else Schedule(given)


def first_active_step(schedule: Callable[[int], ProfilerAction]) -> int | None:
    """Return the first 0-based step that a schedule records; None if there is none among the first 10,000."""
    active = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
    return next((step for step in range(_FAR) if schedule(step) in active), None)
