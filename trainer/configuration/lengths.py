"""Limits and intervals of a Trainer, parsed from its arguments."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from typing import Any

from trainwright.core.duration import Duration, parse_time
from trainwright.core.errors import ConfigurationError
from trainwright.trainer.configuration.argument_checks import check_whole
from trainwright.trainer.configuration.arguments import TrainerArguments

DEFAULT_MAX_EPOCHS = 1000  # of a fit without any limit
# Field of `Limits` → its value without a limit.
_NO_LIMIT: dict[str, int | None] = {"max_epochs": None, "max_steps": -1, "min_epochs": 0, "min_steps": 0}
# Argument → its smallest value, and the value that means no limit, for messages.
_LIMITS = {
    "max_epochs": (-1, "-1 for no bound"),
    "max_steps": (-1, "-1 for no bound"),
    "max_samples": (1, "None for no bound"),
    "max_tokens": (1, "None for no bound"),
    "min_epochs": (0, "None for no bound"),
    "min_steps": (0, "None for no bound"),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a fit.

    Attributes:
        max_epochs: maximum number of epochs; None for no limit.
        max_steps: maximum number of optimizer steps; -1 for no limit.
        others: further limits, in samples, tokens or seconds.
        min_epochs, min_steps: stop requests take effect once both are reached.
    """

    max_epochs: int | None
    max_steps: int
    others: tuple[Duration, ...]
    min_epochs: int
    min_steps: int

    def with_changed(self, name: str, value: int | None) -> Limits:
        """Return the limits with another value of `name`. None, and -1 for a maximum, mean no limit.

        Raises:
            ConfigurationError: the value is not a whole number, or is too small.
        """
        is_maximum = name in ("max_epochs", "max_steps")
        check_whole(name, value, -1 if is_maximum else 0, "None for no bound")
        if value is None or value == -1:
            value = _NO_LIMIT[name]
        changed: dict[str, Any] = {name: value}
        return replace(self, **changed)


def limits_of(arguments: TrainerArguments) -> Limits:
    """Return the limits of a fit with these arguments. Default without any maximum: 1,000 epochs.

    Raises:
        ConfigurationError: a limit is not a whole number, or a minimum is above its maximum.
    """
    for name, (lowest, otherwise) in _LIMITS.items():
        check_whole(name, getattr(arguments, name), lowest, otherwise)
    others: list[Duration] = []
    if arguments.max_samples is not None:
        others.append(Duration(arguments.max_samples, "samples"))
    if arguments.max_tokens is not None:
        others.append(Duration(arguments.max_tokens, "tokens"))
    if arguments.max_time is not None:
        others.append(parse_time(arguments.max_time, "max_time"))
    max_steps: int | None = arguments.max_steps
    if max_steps is None:  # as in Lightning
        max_steps = -1
    if arguments.fast_dev_run:  # at least the steps of `limit_train_batches`, which ends the run
        max_steps = int(arguments.fast_dev_run) * arguments.accumulate_grad_batches
    max_epochs = arguments.max_epochs
    if max_epochs is None and max_steps == -1 and not others:
        max_epochs = DEFAULT_MAX_EPOCHS
    if max_epochs == -1:
        max_epochs = None
    min_epochs = arguments.min_epochs or 0
    min_steps = arguments.min_steps or 0
    if max_epochs is not None and min_epochs > max_epochs:
        raise ConfigurationError(f"min_epochs={min_epochs} is more than max_epochs={max_epochs}. Raise max_epochs.")
    if max_steps != -1 and min_steps > max_steps:
        raise ConfigurationError(f"min_steps={min_steps} is more than max_steps={max_steps}. Raise max_steps.")
    return Limits(max_epochs, max_steps, tuple(others), min_epochs, min_steps)


def validation_interval_of(arguments: TrainerArguments, limits: Limits) -> int | float | Duration:
    """Return the interval of validations: a number of batches, a fraction of an epoch, or a Duration.

    Raises:
        ConfigurationError: the value is invalid.
    """
    # Libraries pass min(interval, max_steps). If nothing is trained, the interval has no effect.
    trains_nothing = 0 in (limits.max_steps, limits.max_epochs)
    if trains_nothing and arguments.val_check_interval == 0:
        return 1.0
    return _parse_interval(arguments.val_check_interval)


def _parse_interval(value: object) -> int | float | Duration:
    if value is None:
        return 1.0  # at the end of each epoch
    if isinstance(value, (str, Duration, datetime.timedelta, dict)):
        try:
            duration = parse_time(value, "it") if isinstance(value, dict) else Duration(value)
        except ConfigurationError as error:
            raise ConfigurationError(f"val_check_interval: {error}") from None
        if duration.value <= 0:
            raise ConfigurationError(f"val_check_interval={value!r} must be above 0.")
        return duration
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(
            f"val_check_interval={value!r}: write a whole number of batches, a fraction of an epoch such as 0.25, or a "
            "length with its unit such as '500 steps' or {'minutes': 5}."
        )
    if isinstance(value, float) and not 0.0 < value <= 1.0:
        raise ConfigurationError(
            f"val_check_interval={value!r}: a float is a fraction of an epoch, above 0 and up to 1.0. For a number of "
            f"batches write {max(int(value), 1)}."
        )
    if isinstance(value, int) and value < 1:
        raise ConfigurationError(f"val_check_interval={value!r} batches: must be at least 1.")
    return value


def parse_grace(value: float | str | datetime.timedelta | Duration | None) -> float | None:
    """Parse `preemption_grace`. Return seconds, or None if signals are not handled.

    Raises:
        ConfigurationError: the value is not a positive duration.
    """
    if value is None:
        return None
    try:
        length = Duration(value, "seconds") if isinstance(value, (int, float)) else Duration(value)
    except (ConfigurationError, TypeError) as error:
        raise ConfigurationError(f"preemption_grace={value!r} is not a duration in time. {error}") from None
    if length.unit != "seconds" or not length.value > 0:
        raise ConfigurationError(
            f"preemption_grace={value!r} is not a duration in time. Write seconds, '2 min', or None to ignore signals."
        )
    return float(length.value)
