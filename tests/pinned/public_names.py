"""Every public name with its signature.

    python -m tests.pinned.public_names

writes the list anew; the difference is what a change does to users, and belongs into the changelog.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trainwright

FILE = Path(__file__).parent / "public_names.json"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PACKAGES = (
    "",
    "accelerator",
    "callbacks",
    "checkpoint",
    "core",
    "data",
    "loggers",
    "strategies",
    "trainer",
    "utilities",
)


def _signature(value: Any) -> str:
    try:
        return _ADDRESS.sub("", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return type(value).__name__


def _members(cls: type) -> dict[str, str]:
    """Return the public members that the project defines, those of bases too: where one is defined may change."""
    found = {}
    for name in sorted(dir(cls)):
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if name.startswith("_") or owner is None or not owner.__module__.startswith("trainwright"):
            continue
        value = inspect.getattr_static(cls, name)
        function = getattr(value, "__func__", value)
        kind = "property" if inspect.isdatadescriptor(value) else type(value).__name__  # of whatever class
        found[name] = _signature(function) if inspect.isfunction(function) else kind
    return found


def _entry(value: Any) -> Any:
    if inspect.isclass(value):
        return {"()": _signature(value), **_members(value)}
    return _signature(value) if callable(value) else type(value).__name__


def public_modules() -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the module of each public package."""
    for package in _PACKAGES:
        module = getattr(trainwright, package) if package else trainwright
        if hasattr(module, "__all__"):
            yield f"trainwright.{package}".rstrip("."), module


def public_names() -> dict[str, Any]:
    """Return each public name of each public package, with what a caller sees of it."""
    found: dict[str, Any] = {}
    first: dict[int, str] = {}  # an object → the name under which it came first
    for path, module in public_modules():
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if inspect.ismodule(value) or name == "__version__":
                continue
            home = first.setdefault(id(value), f"{path}.{name}")
            found[f"{path}.{name}"] = _entry(value) if home == f"{path}.{name}" else f"is {home}"
    return found


if __name__ == "__main__":
    FILE.write_text(json.dumps(public_names(), indent=1) + "\n")
