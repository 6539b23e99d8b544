"""Registries of short names for objects that are imported on first use.

A registry maps a short name, such as `"ddp"` or `"csv"`, to a class or to a text `"module:attribute"`, which is
imported at the first look-up.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from trainwright.core.errors import ConfigurationError, nearest

T = TypeVar("T")


def import_object(path: str) -> Any:
    """Import `"package.module:attribute"` and return the attribute."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Registry(Generic[T]):
    """Table from short names to objects, imported on first use.

    Args:
        kind: what the entries are, in the singular, for error messages: `"strategy"`.
        entries: objects, or texts `"module:attribute"`, by name. Default: None.
    """

    def __init__(self, kind: str, entries: dict[str, T | str] | None = None) -> None:
        self.kind = kind
        self._entries: dict[str, T | str] = dict(entries or {})

    def register(self, name: str, entry: T | str, *, overwrite: bool = False) -> None:
        """Add one entry. An existing name raises a ConfigurationError, or is replaced with `overwrite=True`."""
        if name in self._entries and not overwrite:
            raise ConfigurationError(
                f"{self.kind} {name!r} is already registered. Choose another name or pass overwrite=True."
            )
        self._entries[name] = entry

    def get(self, name: str) -> T:
        """Return the object of `name`, which is imported on first use. An unknown name raises a ConfigurationError."""
        if name not in self._entries:
            known = ", ".join(sorted(self._entries)) or "none"
            raise ConfigurationError(f"unknown {self.kind} {name!r}.{nearest(name, self._entries)} Known: {known}.")
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = import_object(entry)
            self._entries[name] = entry
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)
