"""Class names in configuration files: Lightning's paths, and short names such as `early_stopping`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.foreign_names import LIBRARIES, RENAMED, answer, own_module

# Arguments of Lightning's Trainer that a saved configuration holds, with the default that means "not used".
UNUSED = {"plugins": None, "model_registry": None, "enable_autolog_hparams": True}
# Key of `trainer:` → the package of its classes, and the name of that package's registry.
_PACKAGES = {
    "callbacks": ("trainwright.callbacks", "CALLBACKS"),
    "logger": ("trainwright.loggers", "LOGGERS"),
}


def public_names(module: str) -> Iterable[str]:
    """Return the public names of a package of Trainwright. Empty if there is no such package."""
    try:
        found: Iterable[str] = getattr(import_module(module), "__all__", ())
    except ImportError:
        return ()
    return found


def own_name(path: str) -> str | None:
    """Return Trainwright's class path for a class `path` of Lightning or Accelerate. None: there is no such class."""
    module, _, name = path.rpartition(".")
    library = LIBRARIES[path.partition(".")[0]]
    if name in RENAMED[library]:
        return RENAMED[library][name]
    own = own_module(module)
    if own is None:
        return None
    return f"{own}.{name}" if name in public_names(own) else None


def is_unused(name: str, text: str) -> bool:
    """Return whether the argument `name` of Lightning's Trainer has no effect if its source text is `text`."""
    return name in UNUSED and str(UNUSED[name]) == text


def translate_config(config: dict[str, Any]) -> None:
    """Replace class paths of Lightning and Accelerate, and remove unused arguments of Lightning's Trainer, in place."""
    from trainwright import Trainer

    _translate(config, "")
    settings = config.get("trainer")
    if isinstance(settings, dict):
        ours = inspect.signature(Trainer).parameters
        for name, value in UNUSED.items():
            if name not in ours and settings.get(name, ...) == value:
                del settings[name]


def _translate(node: object, place: str) -> None:
    for index, item in enumerate(node if isinstance(node, list) else ()):
        _translate(item, f"{place}[{index}]")
    if not isinstance(node, dict):
        return
    path = node.get("class_path")
    if isinstance(path, str) and path.partition(".")[0] in LIBRARIES:
        own = own_name(path)
        if own is None:
            told = answer(path.rpartition(".")[2], LIBRARIES[path.partition(".")[0]])
            raise ConfigurationError(f"{place}.class_path={path}: {told or 'Trainwright has no such class.'}")
        node["class_path"] = own
    for key, item in node.items():
        _translate(item, f"{place}.{key}" if place else str(key))


def expand_config(config: dict[str, Any]) -> None:
    """Replace short names in `trainer.callbacks` and `trainer.logger` by class paths, in place.

    An item is a name, or a mapping whose `class_path` is a name. Unknown names are not changed.
    """
    settings = config.get("trainer")
    if not isinstance(settings, dict):
        return
    for key in _PACKAGES.keys() & settings.keys():
        value = settings[key]
        settings[key] = [_expand(key, item) for item in value] if isinstance(value, list) else _expand(key, value)


def expand_assignments(assignments: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Replace short names in assignments, such as `trainer.callbacks+=EarlyStopping`; see `expand_config`."""
    expanded = []
    for key, text in assignments:
        match = re.fullmatch(r"trainer\.(\w+)\+?(\.class_path)?", key)
        path = class_path(match[1], text) if match is not None and match[1] in _PACKAGES else None
        expanded.append((key, text if path is None else path))
    return expanded


def class_path(key: str, name: str) -> str | None:
    """Return the class path for a short name under `trainer.<key>`, or None for an unknown name."""
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
    """Return the short names for the key `trainer.callbacks` or `trainer.logger`. Empty for other keys."""
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
