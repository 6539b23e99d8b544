"""The settings of a Trainer as data, and where each comes from."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from trainwright.trainer.configuration.apply_defaults import variable_of
from trainwright.trainer.configuration.lengths import limits_of
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.planning.run_plan import PlannedSetting

_CREDENTIALS = re.compile(r"(\w+://)[^/@\s]*@")
_SECRET_KEYS = re.compile(r"key|token|secret|passw", re.IGNORECASE)


def planned_settings(settings: Settings) -> dict[str, PlannedSetting]:
    """Return the value and the source of each argument of a Trainer."""
    passed_arguments = settings.given  # as the user has passed them
    arguments = settings.arguments  # with the defaults of the launcher, of fast_dev_run and of barebones
    # Values that replace an argument in the plan, because they are more specific.
    resolved = {
        "accelerator": settings.selection.settings.device_type,
        "strategy": settings.selection.strategy,
        "precision": settings.selection.settings.precision.name,
        "logger": settings.loggers,
        "callbacks": settings.callbacks,
        "max_epochs": settings.limits.max_epochs,
        "max_steps": settings.limits.max_steps,
        "log_every_n_steps": settings.log_every_n_steps,
        "num_sanity_val_steps": settings.num_sanity_val_steps,
        "default_root_dir": str(settings.root),
    }
    limits = limits_of(arguments)
    # The user may change these attributes of a Trainer after it was created.
    initial = {"max_epochs": limits.max_epochs, "max_steps": limits.max_steps}
    planned = {}
    for field in fields(arguments):
        name = field.name
        value = getattr(arguments, name)
        passed = getattr(passed_arguments, name)
        if name in initial and initial[name] != resolved[name]:
            source = "attribute"
        elif not _is_same(value, passed):  # a variable, fast_dev_run or barebones has changed it
            source = variable_of(name) or ("fast_dev_run" if arguments.fast_dev_run else "barebones")
        elif _is_same(passed, field.default):
            source = "default"
        else:
            source = "argument"
        planned[name] = PlannedSetting(as_data(resolved.get(name, value)), source)
    return planned


def _is_same(value: object, other: object) -> bool:
    return value is other or (type(value) is type(other) and bool(value == other))


def as_data(value: object) -> Any:
    """Return a value as data for JSON. Objects are represented by the names of their classes.

    Texts under a key of a mapping that suggests a secret, and credentials in URLs, are hidden.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime.timedelta):
        return str(value)
    if isinstance(value, str):
        return _CREDENTIALS.sub(r"\1", value)
    if isinstance(value, Mapping):
        data = {}
        for key, item in value.items():
            is_secret = isinstance(item, str) and _SECRET_KEYS.search(str(key))
            data[str(key)] = "hidden" if is_secret else as_data(item)
        return data
    if isinstance(value, Iterable):
        return [as_data(item) for item in value]
    return value.__name__ if isinstance(value, type) else type(value).__name__
