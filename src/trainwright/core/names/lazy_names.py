"""Lazy import of a package's public names (PEP 562), which are listed only in its `__init__.pyi`.

Editors and type checkers read this stub. The package reads it when a name is accessed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# One line for each name, as type checkers require for re-exports in a stub.
_LINE = re.compile(r"^from (\S+) import \(?\s*(\w+) as \2,?\s*\)?$", re.MULTILINE)
_ALL = re.compile(r"^from (\S+) import \*$", re.MULTILINE)  # all names of another stub in the same folder


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of the package `package`, whose `__init__.py` is `file`, from its stub.

    For an unknown name, `__getattr__` raises the error of `foreign_names.missing`.
    """

    modules_by_name = cache(partial(listed_names, file))  # reads the stub at the first call

    def get(name: str) -> Any:
        if name == "__all__":
            value: Any = sorted(modules_by_name())
        elif name in modules_by_name():
            module = modules_by_name()[name]
            # The line `from package import name as name` names a sub-module of the package.
            value = import_module(f"{package}.{name}") if module == package else getattr(import_module(module), name)
        elif name.startswith("__"):  # that Python and tools look up in every module
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        elif is_module(name):
            value = import_module(f"{package}.{name}")
        else:
            from trainwright.core.names.foreign_names import missing

            # Call it directly in this function: it inspects the frame of this function's caller.
            raise missing(package, name, modules_by_name())
        setattr(sys.modules[package], name, value)  # the next access does not call this function
        return value

    def is_module(name: str) -> bool:
        is_package = hasattr(sys.modules[package], "__path__")
        return is_package and name.isidentifier() and find_spec(f"{package}.{name}") is not None

    def names() -> list[str]:
        special = [name for name in vars(sys.modules[package]) if name.startswith("__")]
        return sorted({*modules_by_name(), *special})

    return get, names


def listed_names(file: str) -> dict[str, str]:
    """Return a dict from each name in the stub of `file` (the path with the suffix `.pyi`) to its module."""
    text = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    modules_by_name = {name: module for module, name in _LINE.findall(text)}
    for module in _ALL.findall(text):
        other = Path(file).with_name(module.rpartition(".")[2])
        modules_by_name |= listed_names(str(other / "__init__" if other.is_dir() else other))
    return modules_by_name
