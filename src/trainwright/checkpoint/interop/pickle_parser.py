"""Parsing of pickles into inert data, without importing or calling anything.

Python's own unpickler reads the opcodes, and each import becomes a `Placeholder`. It is the pure-Python unpickler,
because a pickle of 9 bytes makes the C unpickler allocate 2 GB for its memo. `torch.load(weights_only=True)` (torch
2.13) returns a list that contains itself, and a tensor of 3 GB from a storage of 4 bytes. Both take exponential time to
hash a key that is a nested tuple with shared parts.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from trainwright.core.errors import CheckpointError

# Operations in one pickle. A state dict needs about 40 per tensor.
MAX_OPERATIONS = 5_000_000
_MAX_KEY_BITS = 64  # of an integer: crafted larger ones make dict operations take quadratic time
_MAX_KEY_PARTS = 1000  # of a tuple: hashing one that shares its parts takes exponential time
_MAX_DIMS = 64

STORAGE = ".storage"  # name of the placeholders for storages, which are stored outside the pickle


class Placeholder:
    """A placeholder for an import in a pickle, or for the result of a call of it. Nothing was imported or called.

    The unpickler calls the methods, which only record.

    Attributes:
        name: module and name of the import, with a dot between them.
        args: the arguments of the call. None for an import that was not called.
        state: the state for the result's `__setstate__`.
        pairs: the items that the pickle sets in the result.
    """

    __slots__ = ("args", "name", "pairs", "state")

    def __init__(self, name: str, args: tuple[Any, ...] | None = None) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.pairs: list[tuple[Any, Any]] = []

    def __setstate__(self, state: object) -> None:
        """Record the state."""
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        """Record an item."""
        self.pairs.append((key, value))

    def extend(self, values: list[Any]) -> None:
        """Skip the values of a subclass of list, which is not supported."""

    append = extend


def parse_pickle(data: Any, start: int = 0, *, limit: int, origin: str) -> tuple[Any, int, list[Placeholder]]:
    """Parse one pickle.

    Args:
        data: bytes that contain the pickle, such as a mapped file.
        start: offset of the pickle.
        limit: maximum length of the pickle in bytes.
        origin: name of the file in error messages.

    Returns:
        The content, the offset after the pickle, and the placeholders of the storages that it refers to, in order.

    Raises:
        CheckpointError: the pickle exceeds a limit.
        Exception: any other error means that the pickle is damaged.
    """
    file = io.BytesIO(data[start : start + limit])
    unpickler = _InertUnpickler(file, origin)
    try:
        found = unpickler.load()
    except (EOFError, pickle.UnpicklingError):
        if start + limit >= len(data):
            raise
        raise CheckpointError(f"{origin}: its pickle is longer than the limit of {limit} bytes.") from None
    return found, start + file.tell(), unpickler.storages


class _InertUnpickler(pickle._Unpickler):
    """An unpickler that builds containers, numbers, text and placeholders only.

    Inherited operations append to the objects of a pickle and set their states. These objects are placeholders or
    built-in containers, so that nothing from the pickle runs.
    """

    stack: list[Any]
    append: Callable[[Any], None]  # appends to the stack
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]

    def __init__(self, file: io.BytesIO, origin: str) -> None:
        super().__init__(file, encoding="utf-8")
        self.dispatch = _Operations(origin)  # type: ignore[misc]  # per instance
        self.storages: list[Placeholder] = []

    def find_class(self, module: str, name: str) -> Placeholder:
        """Return a placeholder for an import."""
        return Placeholder(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Return a placeholder for a storage outside the pickle, or for a class."""
        if type(pid) is tuple and pid[0] == "module":
            return pid[1]  # torch before 1.6 stored classes of modules with their source code
        self.storages.append(Placeholder(STORAGE, (pid,)))
        return self.storages[-1]

    def load_reduce(self) -> None:
        """Replace a call by a placeholder."""
        args = self.stack.pop()
        target = self.stack.pop()
        if type(target) is not Placeholder or target.args is not None or type(args) is not tuple:
            raise TypeError(f"a call of a {type(target).__name__} with a {type(args).__name__}")
        self.append(Placeholder(target.name, args))

    def _instantiate(self, target: object, args: list[Any]) -> None:
        """Replace a call in the form of pickle protocol 0 by a placeholder."""
        self.append(target)
        self.append(tuple(args))
        self.load_reduce()

    def load_newobj_ex(self) -> None:
        """Replace a call without keyword arguments by a placeholder."""
        if self.stack.pop() != {}:
            raise TypeError("a call with keyword arguments")
        self.load_reduce()

    def load_bytearray8(self) -> None:
        """Read a bytearray. The inherited operation allocates it before it reads it."""
        length = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(length)))

    def load_setitem(self) -> None:
        """Set an item of a dict or a placeholder."""
        value = self.stack.pop()
        key = self.stack.pop()
        self.stack[-1][checked_key(key)] = value

    def load_setitems(self) -> None:
        """Set items of a dict or a placeholder. Keys and values alternate."""
        values = self.pop_mark()
        for key, value in zip(values[::2], values[1::2], strict=True):
            self.stack[-1][checked_key(key)] = value

    def load_dict(self) -> None:
        """Create a dict in the form of pickle protocol 0."""
        values = self.pop_mark()
        self.append(dict(zip(map(checked_key, values[::2]), values[1::2], strict=True)))

    def load_additems(self) -> None:
        """Add members to a set."""
        members = self.pop_mark()
        self.stack[-1].update(map(checked_key, members))

    def load_frozenset(self) -> None:
        """Create a frozenset."""
        members = self.pop_mark()  # changes the stack that `append` refers to
        self.append(frozenset(map(checked_key, members)))


# These opcodes refer to objects outside the file.
_UNUSED = (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)
_OPERATIONS: dict[int, Callable[..., None]] = {
    **{code: operation for code, operation in _InertUnpickler.dispatch.items() if bytes([code]) not in _UNUSED},
    pickle.REDUCE[0]: _InertUnpickler.load_reduce,
    pickle.NEWOBJ[0]: _InertUnpickler.load_reduce,
    pickle.NEWOBJ_EX[0]: _InertUnpickler.load_newobj_ex,
    pickle.BYTEARRAY8[0]: _InertUnpickler.load_bytearray8,
    pickle.SETITEM[0]: _InertUnpickler.load_setitem,
    pickle.SETITEMS[0]: _InertUnpickler.load_setitems,
    pickle.DICT[0]: _InertUnpickler.load_dict,
    pickle.ADDITEMS[0]: _InertUnpickler.load_additems,
    pickle.FROZENSET[0]: _InertUnpickler.load_frozenset,
}


class _Operations(dict[int, Callable[..., None]]):
    """The unpickler's functions by opcode. Each look-up counts as an operation, whose number is limited."""

    def __init__(self, origin: str) -> None:
        super().__init__(_OPERATIONS)
        self._origin = origin
        self._left = MAX_OPERATIONS

    def __getitem__(self, code: int) -> Callable[..., None]:
        self._left -= 1
        if self._left < 0:
            raise CheckpointError(f"{self._origin}: its pickle exceeds {MAX_OPERATIONS} operations, the limit.")
        return super().__getitem__(code)


def checked_key(key: Any) -> Any:
    """Return a dict key or set member if it can be hashed quickly.

    Raise a `ValueError` for a large integer, or a tuple with many items, including items of nested tuples.
    """
    if type(key) is str:
        return key
    left = [key]
    count = 0
    while left:
        part = left.pop()
        count += 1
        if type(part) in (tuple, frozenset):
            count += len(part)
            if count > _MAX_KEY_PARTS:
                raise ValueError(f"a key has more than {_MAX_KEY_PARTS} parts")
            left.extend(part)
        elif type(part) is int and part.bit_length() > _MAX_KEY_BITS:
            raise ValueError(f"a key is an integer of {part.bit_length()} bits")
    return key


def checked_size(number: object) -> int:
    """Return a number from a pickle if it can be a size; otherwise raise a ValueError."""
    if type(number) is not int or not 0 <= number < 2**62:
        raise ValueError(f"expected a size, got a {type(number).__name__} that is not one")
    return number


def checked_sizes(numbers: object) -> list[int]:
    """Return numbers from a pickle if they can be a shape; otherwise raise a ValueError."""
    if not isinstance(numbers, (list, tuple)) or len(numbers) > _MAX_DIMS:
        raise ValueError(f"expected a shape, got a {type(numbers).__name__} that is not one")
    return [checked_size(number) for number in numbers]
