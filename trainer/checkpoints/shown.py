"""The checkpoint as hooks see it: a dict with Lightning's keys, of which some are read-only."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from types import MappingProxyType
from typing import Any

from trainwright.core.errors import ConfigurationError


class ShownCheckpoint(dict[str, Any]):
    """A dict whose `"state_dict"` and own entries may be changed; all else can only be read.

    Args:
        hook: that is called with it.
        own: entries that `on_save_checkpoint` added.
        weights: `"state_dict"`: what is loaded or saved is what stands here after the hooks.
        read: name → reads an entry, at the first access.
        advice: completes "Change checkpoint['state_dict'], or", in the error for a change of another entry.
    """

    def __init__(
        self,
        hook: str,
        own: Mapping[str, Any],
        weights: object,
        read: Mapping[str, Callable[[], Any]],
        *,
        advice: str,
    ) -> None:
        self._hook, self._advice = hook, advice
        self._unread = {name: make for name, make in read.items() if name not in own}
        self._fixed = frozenset(self._unread)
        super().__init__({**dict.fromkeys(self._unread), **own, "state_dict": weights})

    def __getitem__(self, name: str) -> Any:
        if name in self._unread:
            super().__setitem__(name, _frozen(self._unread.pop(name)()))
        return super().__getitem__(name)

    @property
    def own(self) -> dict[str, Any]:
        """Entries of the hooks."""
        return {name: self[name] for name in self if name not in self._fixed and name != "state_dict"}

    def __setitem__(self, name: str, value: object) -> None:
        self._refuse(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._refuse(name)
        super().__delitem__(name)

    def __iter__(self) -> Iterator[str]:  # with an iterator of its own, dict(self) and {**self} read the entries
        return super().__iter__()

    def get(self, name: str, default: object = None) -> Any:
        """Return an entry, or `default`."""
        try:
            return self[name]
        except KeyError:
            return default

    def pop(self, name: str, *default: object) -> Any:
        """Take an own entry out and return it."""
        self._refuse(name)
        return super().pop(name, *default)

    def update(self, *others: object, **entries: object) -> None:
        """Change own entries."""
        for name, value in dict(*others, **entries).items():
            self[name] = value

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # as for `values`
        """Return all entries, read."""
        self._read_all()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]  # typeshed's dict_values cannot be named
        """Return the values of all entries, read."""
        self._read_all()
        return super().values()

    def _read_all(self) -> None:
        for name in list(self._unread):
            self[name]

    def _refuse(self, name: str) -> None:
        if name in self._fixed:
            raise ConfigurationError(
                f"{self._hook} cannot change checkpoint[{name!r}]: a change would have no effect. Change "
                f"checkpoint['state_dict'], or {self._advice}."
            )


def _frozen(tree: object) -> Any:
    """Return containers that cannot be changed, since a change would be lost; tensors are the reader's own copies."""
    if isinstance(tree, Mapping):
        return MappingProxyType({key: _frozen(value) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        return tuple(_frozen(value) for value in tree)
    return tree
