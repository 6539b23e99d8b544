"""Names of callbacks and loggers without their module in configurations: `EarlyStopping` or `early_stopping`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

# Key of `trainer:` → the package of its classes, and the name of that package's registry.
_PACKAGES = {
    "callbacks": ("trainwright.callbacks", "CALLBACKS"),
    "logger": ("trainwright.loggers", "LOGGERS"),
}


def expand_config(config: dict[str, Any]) -> None:
    """Replace short names in `trainer.callbacks` and `trainer.logger` by class paths, in place.

    An item may be a name, or a mapping whose `class_path` is a name; unknown names are unchanged.
    """
    settings = config.get("trainer")
    if not isinstance(settings, dict):
        return
    for key in _PACKAGES.keys() & settings.keys():
        value = settings[key]
        settings[key] = [_expand(key, item) for item in value] if isinstance(value, list) else _expand(key, value)


def expand_assignments(assignments: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the assignments with short names replaced likewise: `trainer.callbacks+=EarlyStopping`."""
    expanded = []
    for key, text in assignments:
        match = re.fullmatch(r"trainer\.(\w+)\+?(\.class_path)?", key)
        path = class_path(match[1], text) if match is not None and match[1] in _PACKAGES else None
        expanded.append((key, text if path is None else path))
    return expanded


def class_path(key: str, name: str) -> str | None:
    """Return the full path of the class that `name` means under `trainer.<key>`; None for an unknown name."""
    module, registry_name = _PACKAGES[key]
    package = import_module(module)
    registry = getattr(package, registry_name)
    if name in registry:
        found = registry.get(name)
    elif name in package.__all__:
        found = getattr(package, name)
    else:
        return None
    return f"{found.__module__}.{found.__qualname__}" if isinstance(found, type) else None


def short_names(key: str) -> list[str]:
    """Return the names that may be written at a key: those of `trainer.callbacks` or `trainer.logger`, else none."""
    _, _, name = key.rpartition("trainer.")
    if name not in _PACKAGES:
        return []
    module, registry_name = _PACKAGES[name]
    package = import_module(module)
    classes = {public for public in package.__all__ if isinstance(getattr(package, public), type)}
    known = {getattr(package, registry_name).get(short) for short in getattr(package, registry_name)}
    return sorted(name for name in classes if getattr(package, name) in known)


def _expand(key: str, item: object) -> Any:
    spec = item if isinstance(item, dict) else {"class_path": item}
    name = spec.get("class_path")
    path = class_path(key, name) if isinstance(name, str) else None
    return item if path is None else {**spec, "class_path": path}
