"""Parsing of pickles into inert data, without importing or calling anything.

Python's own unpickler reads the opcodes. Imports and calls are replaced by the placeholders `Named` and `Node`. The
unpickler is the pure-Python one, because a few bytes can make the C unpickler allocate gigabytes for its memo. The
number of operations is limited. Dict keys and set members are checked before they are hashed, because hashing nested
tuples that share their parts takes exponential time.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainwright.core.errors import CheckpointError

# Operations in one pickle. A state dict needs about 40 per tensor.
MAX_OPERATIONS = 5_000_000
_MAX_KEY_BITS = 64  # of an integer: crafted larger ones make dict operations take quadratic time
_MAX_KEY_PARTS = 1000  # of a tuple: hashing one that shares its parts takes exponential time
_MAX_DIMS = 64

Name = tuple[str, str]


class Node:
    """A placeholder for a call in a pickle and the operations on the call's result. Nothing was executed.

    Attributes:
        name: module and name of the callable.
        args: the arguments of the call.
        state: the state for the result's `__setstate__`.
        values: the values that the pickle appends or adds to the result.
        pairs: the items that the pickle sets in the result.
    """

    __slots__ = ("args", "name", "pairs", "state", "values")

    def __init__(self, name: Name, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.values: list[Any] = []
        self.pairs: list[tuple[Any, Any]] = []


@dataclass(frozen=True)
class Named:
    """A placeholder for an import in a pickle: a class or a function, by its module and its name."""

    name: Name


@dataclass(frozen=True, slots=True)
class Unknown:
    """A placeholder for an object of a type that is not supported; `name` is its `module.name`."""

    name: str


STORAGE: Name = ("", "storage")


def parse_pickle(data: Any, start: int = 0, *, limit: int, origin: str) -> tuple[Any, int, list[Node]]:
    """Parse one pickle.

    Args:
        data: bytes that contain the pickle, such as a mapped file.
        start: offset of the pickle.
        limit: maximum length of the pickle in bytes.
        origin: name of the file in error messages.

    Returns:
        The content, the offset after the pickle, and a `Node` for each storage that the pickle refers to, in order.

    Raises:
        CheckpointError: the pickle exceeds a limit.
        Exception: any other error means that the pickle is damaged.
    """
    file = io.BytesIO(data[start : start + limit])
    reader = _Reader(file, f"{origin}: its pickle exceeds {MAX_OPERATIONS} operations")
    try:
        found = reader.load()
    except (EOFError, pickle.UnpicklingError):
        if start + limit >= len(data):
            raise
        raise CheckpointError(f"{origin}: its pickle is longer than the limit of {limit} bytes.") from None
    return found, start + file.tell(), reader.storages


class _Operations(dict[int, Callable[..., None]]):
    """The unpickler's functions by opcode. Each look-up counts as an operation, whose number is limited."""

    def __init__(self, too_many: str) -> None:
        super().__init__(_OPERATIONS)
        self._too_many = too_many
        self._left = MAX_OPERATIONS

    def __getitem__(self, code: int) -> Callable[..., None]:
        self._left -= 1
        if self._left < 0:
            raise CheckpointError(f"{self._too_many}, the limit.")
        return super().__getitem__(code)


class _Reader(pickle._Unpickler):
    """An unpickler that builds containers, numbers, text and placeholders only."""

    stack: list[Any]
    append: Callable[[Any], None]  # appends to the stack
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: io.BytesIO, too_many: str) -> None:
        super().__init__(file, encoding="utf-8")
        self.dispatch = _Operations(too_many)  # type: ignore[misc]  # per instance
        self.storages: list[Node] = []

    def find_class(self, module: str, name: str) -> Named:
        """Return a placeholder for an import."""
        return Named((module, name))

    def persistent_load(self, pid: object) -> Node:
        """Return a placeholder for a storage outside the pickle."""
        self.storages.append(Node(STORAGE, (pid,)))
        return self.storages[-1]

    def call(self) -> None:
        """Replace a call by a node."""
        args, target = self.stack.pop(), self.stack.pop()
        if type(target) is not Named or type(args) is not tuple:
            raise TypeError(f"a call of a {type(target).__name__} with a {type(args).__name__}")
        self.append(Node(target.name, args))

    def call_with_keywords(self) -> None:
        """Replace a call with an empty dict of keyword arguments by a node."""
        if self.stack.pop() != {}:
            raise TypeError("a call with keyword arguments")
        self.call()

    def _instantiate(self, target: object, args: list[Any]) -> None:
        """Replace a call in the form of pickle protocol 0 by a node."""
        self.append(target)
        self.append(tuple(args))
        self.call()

    def build(self) -> None:
        """Store the state of an object in its node."""
        state = self.stack.pop()
        if type(self.stack[-1]) is not Node:
            raise TypeError(f"a state for a {type(self.stack[-1]).__name__}")
        self.stack[-1].state = state

    def add(self, values: list[Any]) -> None:
        """Append values to a list or a node, or add them to a set."""
        target = self.stack[-1]
        if type(target) is Node:
            target.values.extend(values)
        elif type(target) is set:
            target.update(map(checked_key, values))
        elif type(target) is list:
            target.extend(values)
        else:
            raise TypeError(f"values for a {type(target).__name__}")

    def set_items(self, values: list[Any]) -> None:
        """Set items of a dict or a node. Keys and values alternate in `values`."""
        target = self.stack[-1]
        pairs = zip(values[::2], values[1::2], strict=True)
        if type(target) is Node:
            target.pairs.extend(pairs)
        elif type(target) is dict:
            target.update((checked_key(key), value) for key, value in pairs)
        else:
            raise TypeError(f"items for a {type(target).__name__}")

    def create_dict(self) -> None:
        """Create a dict of the values since the last mark. Keys and values alternate."""
        values = self.pop_mark()
        self.append({})
        self.set_items(values)


# These opcodes refer to objects outside the file.
_UNUSED = (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)
_OPERATIONS: dict[int, Callable[..., None]] = {
    **{code: operation for code, operation in _Reader.dispatch.items() if bytes([code]) not in _UNUSED},
    pickle.REDUCE[0]: _Reader.call,
    pickle.NEWOBJ[0]: _Reader.call,
    pickle.NEWOBJ_EX[0]: _Reader.call_with_keywords,
    pickle.BUILD[0]: _Reader.build,
    pickle.APPEND[0]: lambda reader: reader.add([reader.stack.pop()]),
    pickle.APPENDS[0]: lambda reader: reader.add(reader.pop_mark()),
    pickle.ADDITEMS[0]: lambda reader: reader.add(reader.pop_mark()),
    pickle.SETITEM[0]: lambda reader: reader.set_items([reader.stack.pop(), reader.stack.pop()][::-1]),
    pickle.SETITEMS[0]: lambda reader: reader.set_items(reader.pop_mark()),
    pickle.DICT[0]: _Reader.create_dict,
    pickle.FROZENSET[0]: lambda reader: reader.append(frozenset(map(checked_key, reader.pop_mark()))),
    pickle.BYTEARRAY8[0]: lambda reader: reader.append(
        bytearray(reader.read(int.from_bytes(reader.read(8), "little")))
    ),
}


def checked_key(key: Any) -> Any:
    """Return a dict key or set member if it can be hashed quickly.

    Raise a `ValueError` for a large integer, or a tuple with many items, including items of nested tuples.
    """
    if type(key) is str:
        return key
    left, count = [key], 0
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


def length_of(value: object) -> int:
    """Return the length of text or bytes, the size of an integer in bytes, or 0 for another value."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    return value.bit_length() // 8 if type(value) is int else 0
