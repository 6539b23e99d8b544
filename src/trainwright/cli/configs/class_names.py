"""Class names in configuration files: Lightning's paths, and short names such as `early_stopping`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.foreign_names import LIBRARIES, answer, own_name

# Key of `trainer:` → the package of its classes, and the name of that package's registry. The Trainer itself reads
# registered names of strategies and profilers, so their registries are not used here.
_PACKAGES: dict[str, tuple[str, str | None]] = {
    "callbacks": ("trainwright.callbacks", "CALLBACKS"),
    "logger": ("trainwright.loggers", "LOGGERS"),
    "strategy": ("trainwright.strategies", None),
    "profiler": ("trainwright.profilers", None),
}


def translate_config(node: object, place: str = "") -> None:
    """Replace class paths of Lightning and Accelerate in place.

    Args:
        node: the configuration, or a part of it.
        place: dotted key of the node in the full configuration, for errors. Default: an empty text, for the whole.

    Raises:
        ConfigurationError: a class has no counterpart.
    """
    if isinstance(node, list):
        for index, item in enumerate(node):
            translate_config(item, f"{place}[{index}]")
    if not isinstance(node, dict):
        return
    path = node.get("class_path")
    if isinstance(path, str):
        node["class_path"] = _own_path(path, place)
    for key, item in node.items():
        translate_config(item, f"{place}.{key}" if place else str(key))


def _own_path(path: str, place: str) -> str:
    """Return Trainwright's class path for a class of Lightning or Accelerate. Other paths are not changed."""
    library = LIBRARIES.get(path.partition(".")[0])
    if library is None:
        return path
    new_path = own_name(path)
    if new_path is None:
        advice = answer(path.rpartition(".")[2], library) or "Trainwright has no such class."
        raise ConfigurationError(f"{place}.class_path={path}: {advice}")
    return new_path


def expand_config(config: dict[str, Any]) -> None:
    """Replace short names of callbacks, loggers, strategies and profilers in `trainer` by class paths, in place.

    An item is a name, or a mapping whose `class_path` is a name. Unknown names are not changed.
    """
    settings = config.get("trainer")
    if not isinstance(settings, dict):
        return
    for key in _PACKAGES.keys() & settings.keys():
        value = settings[key]
        if isinstance(value, list):
            settings[key] = [_expand(key, item) for item in value]
        else:
            settings[key] = _expand(key, value)


def expand_assignments(assignments: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Replace short names in assignments, such as `trainer.callbacks+=EarlyStopping`; see `expand_config`."""
    expanded: list[tuple[str, str]] = []
    for key, text in assignments:
        match = re.fullmatch(r"trainer\.(\w+)\+?(\.class_path)?", key)
        path = class_path(match[1], text) if match is not None else None
        if path is None:
            expanded.append((key, text))
        elif key == "trainer.strategy":  # its type also accepts text, so that the parser would keep a path as text
            expanded.append(("trainer.strategy.class_path", path))
        else:
            expanded.append((key, path))
    return expanded


def expand_help(flags: Sequence[str]) -> list[str]:
    """Replace short names in flags such as `--trainer.callbacks.help=EarlyStopping`. Unknown names are not changed."""
    expanded: list[str] = []
    for flag in flags:
        match = re.fullmatch(r"(--trainer\.(\w+)\.help)=(\w+)", flag)
        path = class_path(match[2], match[3]) if match is not None else None
        if match is not None and path is not None:
            flag = f"{match[1]}={path}"
        expanded.append(flag)
    return expanded


def class_path(key: str, name: str) -> str | None:
    """Return the class path for a short name under `trainer.<key>`, or None for an unknown name or key."""
    if key not in _PACKAGES:
        return None
    package, registry = _package(key)
    if name in registry:
        cls = registry.get(name)
    elif name in package.__all__:
        cls = getattr(package, name)
    else:
        return None
    if not isinstance(cls, type):  # a registered function, or a function of the package
        return None
    return f"{cls.__module__}.{cls.__qualname__}"


def class_names(key: str) -> list[str]:
    """Return the public classes of the package of `trainer.<key>`. Empty for other keys."""
    if key not in _PACKAGES:
        return []
    package, _ = _package(key)
    return [name for name in package.__all__ if isinstance(getattr(package, name), type)]


def short_names(key: str) -> list[str]:
    """Return the short names for the key `trainer.callbacks` or `trainer.logger`. Empty for other keys."""
    name = key.rpartition("trainer.")[2]
    if name not in _PACKAGES:
        return []
    package, registry = _package(name)
    registered = {registry.get(short) for short in registry}
    # `EarlyStopping` as well as `early_stopping` is accepted. Messages list the names of the classes.
    return sorted(each for each in class_names(name) if getattr(package, each) in registered)


def _package(key: str) -> tuple[Any, Any]:
    """Return the package and the registry of a key. The registry is empty if it is not used here."""
    module, registry_name = _PACKAGES[key]
    package = import_module(module)
    if registry_name is None:
        return package, {}
    return package, getattr(package, registry_name)


def _expand(key: str, item: object) -> Any:
    """Return an item with a class path instead of its short name, or the item unchanged: "EarlyStopping" becomes
    {"class_path": "trainwright.callbacks.early_stopping.EarlyStopping"}.
    """
    spec = item if isinstance(item, dict) else {"class_path": item}
    name = spec.get("class_path")
    path = class_path(key, name) if isinstance(name, str) else None
    if path is None:
        return item
    return {**spec, "class_path": path}
