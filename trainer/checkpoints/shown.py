"""The checkpoint dict that hooks receive, with Lightning's keys. Some of them are read-only."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from functools import partial
from typing import Any, Self

from trainwright.core.errors import ConfigurationError


class ShownCheckpoint(dict[str, Any]):
    """A dict in which only `"state_dict"` and the entries added by hooks can be changed.

    Args:
        hook: name of the hook that receives it.
        own: entries that `on_save_checkpoint` added.
        weights: initial value of `"state_dict"`. Its value after the hooks is loaded or saved.
        read: functions that read the other entries at first access, by name. An entry of `own` with the same name
            replaces it, and can be changed.
        advice: end of the error message for changes of read-only entries.
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
        self._hook = hook
        self._advice = advice
        self._unread = {name: make for name, make in read.items() if name not in own}
        self._fixed = frozenset(self._unread)
        super().__init__({**dict.fromkeys(self._unread), **own, "state_dict": weights})

    def __getitem__(self, name: str) -> Any:
        if name in self._unread:
            super().__setitem__(name, _frozen(self._unread.pop(name)(), partial(self._refuse, name)))
        return super().__getitem__(name)

    @property
    def own(self) -> dict[str, Any]:
        """Entries that hooks have added."""
        return {name: self[name] for name in self if name not in self._fixed and name != "state_dict"}

    def __setitem__(self, name: str, value: object) -> None:
        self._refuse(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self._refuse(name)
        super().__delitem__(name)

    def __iter__(self) -> Iterator[str]:  # overridden so that dict(self) and {**self} call __getitem__
        return super().__iter__()

    def get(self, name: str, default: object = None) -> Any:
        """Return the value of `name`, or `default` if it is missing."""
        try:
            return self[name]
        except KeyError:
            return default

    def pop(self, name: str, *default: object) -> Any:
        """Remove an added entry and return it."""
        self._refuse(name)
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Any]:
        """Remove the last entry and return it with its name. An empty dict raises a KeyError."""
        if not self:
            raise KeyError("popitem(): the checkpoint is empty")
        name = next(reversed(self))
        return name, self.pop(name)

    def clear(self) -> None:
        """Remove all entries. Raise a ConfigurationError if one is read-only."""
        for name in list(self):
            del self[name]

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return the value of `name`. If it is missing, add it with the value `default`."""
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *others: object, **entries: object) -> None:
        """Change added entries or `"state_dict"`."""
        for name, value in dict(*others, **entries).items():
            self[name] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[override, misc]  # typeshed has overloads
        self.update(other)
        return self

    def __eq__(self, other: object) -> bool:
        self._read_all()
        return super().__eq__(other)

    __hash__ = None  # as of dict

    def __repr__(self) -> str:
        self._read_all()
        return super().__repr__()

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        """Copies and pickles are plain dicts, which can be changed."""
        return dict, (dict(self),)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # as for `values`
        """Return all entries with their values."""
        self._read_all()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]  # typeshed's dict_values cannot be named
        """Return the values of all entries."""
        self._read_all()
        return super().values()

    def _read_all(self) -> None:
        for name in list(self._unread):
            self[name]  # reads and stores the value

    def _refuse(self, name: str) -> None:
        if name in self._fixed:
            raise ConfigurationError(
                f"{self._hook} cannot change checkpoint[{name!r}], because the change would have no effect. Change "
                f"checkpoint['state_dict'], or {self._advice}."
            )


class _FixedDict(dict[Any, Any]):
    """A dict that calls `refuse`, which raises an error, if it is to be changed. Its copies are plain dicts."""

    def __init__(self, entries: Mapping[Any, Any], refuse: Callable[[], None]) -> None:
        super().__init__(entries)
        self._refuse = refuse

    def _change(self, *args: object, **entries: object) -> Any:
        self._refuse()

    # All methods that change a dict.
    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _change

    def __reduce__(self) -> tuple[type, tuple[dict[Any, Any]]]:
        return dict, (dict(self),)


def _frozen(tree: object, refuse: Callable[[], None]) -> Any:
    """Return `tree` with containers that cannot be changed, because changes to them would have no effect."""
    if isinstance(tree, Mapping):
        return _FixedDict({key: _frozen(value, refuse) for key, value in tree.items()}, refuse)
    if isinstance(tree, (list, tuple)):
        return tuple(_frozen(value, refuse) for value in tree)
    return tree
