"""Read configuration files that were written for Lightning: its class paths, and its unused arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.foreign_names import LIBRARIES, RENAMED, answer, own_module

# Arguments of Lightning's Trainer that a saved configuration holds, with the default that means "not used".
UNUSED = {"plugins": None, "model_registry": None, "enable_autolog_hparams": True}


def public_names(module: str) -> Iterable[str]:
    """Return the public names of one of our packages; none if there is no such package."""
    try:
        found: Iterable[str] = import_module(module).__all__
    except ImportError:
        return ()
    return found


def own_name(path: str) -> str | None:
    """Return the full name of the counterpart of a dotted `path` in Lightning or Accelerate; None without one."""
    module, _, name = path.rpartition(".")
    library = LIBRARIES[path.partition(".")[0]]
    if name in RENAMED[library]:
        return RENAMED[library][name]
    own = own_module(module)
    if own is None:
        return None
    return f"{own}.{name}" if name in public_names(own) else None


def is_unused(name: str, text: str) -> bool:
    """Return whether this text as an argument of Lightning's Trainer means "not used"."""
    return name in UNUSED and str(UNUSED[name]) == text


def translate_config(config: dict[str, Any]) -> None:
    """Replace class paths of Lightning by ours, in place, and remove unused arguments of its Trainer."""
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
            raise ConfigurationError(f"{place}.class_path={path}: {told or 'there is no such class here.'}")
        node["class_path"] = own
    for key, item in node.items():
        _translate(item, f"{place}.{key}" if place else str(key))
