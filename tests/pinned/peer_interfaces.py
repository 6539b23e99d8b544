"""The interfaces of Lightning and Hugging Face Accelerate: their public names, members, arguments and defaults.

    python -m tests.pinned.peer_interfaces

writes `peer_interfaces.json` again where both are installed (`pip install -e ".[bench]"`). The list contains
only names, arguments and defaults, so that the tests need neither of them.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "peer_interfaces.json"
# Their module → ours, which has the same names.
MODULES = {
    "accelerate": "trainwright",
    "accelerate.utils": "trainwright.utils",
    "accelerate.state": "trainwright.state",
    "accelerate.logging": "trainwright.logging",
    "accelerate.tracking": "trainwright.tracking",
    "accelerate.data_loader": "trainwright.data_loader",
    "accelerate.optimizer": "trainwright.optimizer",
    "accelerate.scheduler": "trainwright.scheduler",
    "accelerate.big_modeling": "trainwright.big_modeling",
    "accelerate.hooks": "trainwright.hooks",
    "accelerate.local_sgd": "trainwright.local_sgd",
    "accelerate.launchers": "trainwright.launchers",
    "accelerate.parallelism_config": "trainwright.parallelism_config",
    "lightning.pytorch": "trainwright",
    "lightning.pytorch.callbacks": "trainwright.callbacks",
    "lightning.pytorch.loggers": "trainwright.loggers",
    "lightning.pytorch.profilers": "trainwright.profilers",
    "lightning.pytorch.strategies": "trainwright.strategies",
    "lightning.pytorch.utilities": "trainwright.utilities",
    "lightning.pytorch.utilities.types": "trainwright.utilities.types",
    "lightning.pytorch.utilities.model_summary": "trainwright.utilities.model_summary",
    "lightning.pytorch.tuner": "trainwright.tuner",
    "accelerate.inference": "trainwright.inference",
}
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def parameters(function: Any) -> dict[str, str] | None:
    """Return the parameters of a function or class with their defaults, or None if they are unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    found: dict[str, str] = {}
    for name, parameter in signature.parameters.items():
        if name in ("self", "cls"):
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            found[f"*{name}"] = ""
        elif parameter.kind is parameter.VAR_KEYWORD:
            found[f"**{name}"] = ""
        else:
            found[name] = "required" if parameter.default is parameter.empty else _shown(parameter.default)
    return found


def _shown(value: object) -> str:
    if isinstance(value, enum.Enum):
        return repr(value.value)
    if inspect.isclass(value) or inspect.isfunction(value):
        return value.__name__
    if type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
        return "a new object"
    return _ADDRESS.sub("", repr(value)).replace(str(Path.home()), "~")


def _is_frozen(cls: type) -> bool:
    settings = getattr(cls, "__dataclass_params__", None)
    return settings is not None and settings.frozen


def _is_public(cls: type) -> bool:
    """Return whether a class has an entry of its own in one of the modules."""
    return any(getattr(importlib.import_module(path), cls.__name__, None) is cls for path in MODULES)


def described(value: Any, package: str, *, inherited: bool) -> dict[str, Any]:
    """Return what a user of a class or function sees: arguments, and members that `package` defines.

    Args:
        value: The class or function.
        package: Name of the package.
        inherited: Include members of bases that are public themselves.
    """
    if not inspect.isclass(value):
        return {"arguments": parameters(value)}
    members: dict[str, Any] = {}
    for name in dir(value):
        owner = next((base for base in value.__mro__ if name in vars(base)), None)
        if name.startswith("_") or owner is None or not owner.__module__.startswith(package):
            continue
        if owner is not value and not inherited and _is_public(owner):
            continue
        member = inspect.getattr_static(value, name)
        function = getattr(member, "__func__", member)
        members[name] = parameters(function) if inspect.isfunction(function) else None
    for name in getattr(value, "__dataclass_fields__", {}):
        members.setdefault(name, None)
    return {"arguments": parameters(value), "frozen": _is_frozen(value), "members": members}


def public(module: Any, package: str) -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions of a module that `package` defines."""
    for name in sorted(getattr(module, "__all__", None) or vars(module)):
        value = getattr(module, name, None)
        home = getattr(value, "__module__", None) or ""
        if name.startswith("_") or inspect.ismodule(value) or not home.startswith(package):
            continue
        if inspect.isclass(value) or inspect.isfunction(value):
            yield name, value


def peer_interfaces() -> dict[str, dict[str, Any]]:
    """Return each module of the peers with its names. A name that an earlier module has is left out."""
    found: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()
    for path in MODULES:
        package = path.partition(".")[0]
        entries: dict[str, Any] = {}
        for name, value in public(importlib.import_module(path), package):
            if id(value) not in seen:
                seen.add(id(value))
                entries[name] = described(value, package, inherited=False)
        found[path] = entries
    return found


def _line_per_name(interfaces: dict[str, dict[str, Any]]) -> str:
    modules: list[str] = []
    for path, entries in interfaces.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
        modules.append(f" {json.dumps(path)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(modules) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(_line_per_name(peer_interfaces()))
