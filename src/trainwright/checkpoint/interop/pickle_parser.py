"""Parsing pickles into inert data: nothing is imported, called or built, whatever the file says.

Python's own unpickler reads the opcodes. Names and calls become two kinds of stand-ins: `Named` for what the pickle
would import, and `Node` for what it would call. It is the unpickler that is written in Python: a few bytes have the one
in C allocate gigabytes for its memo. Work is bounded by the number of operations, and what is hashed is checked first:
hashing a tuple that holds itself many times over takes time that doubles with each level.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainwright.core.errors import CheckpointError

# Operations in one pickle. A state dict takes some forty for each tensor.
MAX_OPERATIONS = 5_000_000
_MAX_KEY_BITS = 64  # of an integer: larger ones can be chosen so that a dict of them takes quadratic time
_MAX_KEY_PARTS = 1000  # of a tuple that is a key: hashing one that shares its parts takes exponential time

_MAX_DIMS = 64

Name = tuple[str, str]


class Node:
    """A call in a pickle that was not made: what would be called, with what, and what would be put into the result.

    Attributes:
        name: of what would be called.
        args: what with.
        state: what the result would be given to restore itself from.
        values: what would be appended to it, or added.
        pairs: the items that would be set in it.
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
    """What a pickle would import: a class or a function, by its module and its name."""

    name: Name


@dataclass(frozen=True, slots=True)
class Unknown:
    """Stands where a file holds something outside the closed list; `name` is its `module.name`."""

    name: str


STORAGE: Name = ("", "storage")


class PickleParser:
    """Parses one pickle.

    Args:
        data: bytes in which the pickle begins; a mapped file is one.
        start: where it begins.
        limit: of its length in bytes.
        origin: names the file in messages.

    Attributes:
        position: behind the pickle, once it has been parsed.
        storages: the nodes of what lies beside the pickle, in order.
    """

    def __init__(self, data: Any, start: int = 0, *, limit: int, origin: str) -> None:
        self.position = start
        self.storages: list[Node] = []
        self._file = io.BytesIO(data[start : start + limit])
        self._cut_at = limit if start + limit < len(data) else None
        self._origin = origin

    def parse(self) -> Any:
        """Return the content of the pickle. Its limits are a `CheckpointError`; any other `Exception` means that it is
        damaged.
        """
        reader = _Reader(self._file, f"{self._origin}: its pickle has more than {MAX_OPERATIONS} operations")
        try:
            found = reader.load()
        except (EOFError, pickle.UnpicklingError):
            if self._cut_at is None:
                raise
            raise CheckpointError(
                f"{self._origin}: its pickle has more than {self._cut_at} bytes, which are read."
            ) from None
        self.position += self._file.tell()
        self.storages = reader.storages
        return found


class _Operations(dict[int, Callable[..., None]]):
    """The functions of the unpickler by their opcodes, which counts how often they are asked for."""

    def __init__(self, too_many: str) -> None:
        super().__init__(_OPERATIONS)
        self._too_many = too_many
        self._left = MAX_OPERATIONS

    def __getitem__(self, code: int) -> Callable[..., None]:
        self._left -= 1
        if self._left < 0:
            raise CheckpointError(f"{self._too_many}, which are read.")
        return super().__getitem__(code)


class _Reader(pickle._Unpickler):
    """Builds containers, numbers, text and stand-ins."""

    stack: list[Any]
    append: Callable[[Any], None]  # to the stack

    def __init__(self, file: io.BytesIO, too_many: str) -> None:
        super().__init__(file, encoding="utf-8")
        self.dispatch = _Operations(too_many)  # type: ignore[misc]  # of this one alone
        self.storages: list[Node] = []

    def find_class(self, module: str, name: str) -> Named:
        """Return a stand-in for what the pickle names."""
        return Named((module, name))

    def persistent_load(self, pid: Any) -> Node:
        """Return a stand-in for a storage beside the pickle."""
        self.storages.append(Node(STORAGE, (pid,)))
        return self.storages[-1]

    def call(self) -> None:
        """Replace a call by another node."""
        args, target = self.stack.pop(), self.stack.pop()
        if type(target) is not Named or type(args) is not tuple:
            raise TypeError(f"a {type(target).__name__} is called with a {type(args).__name__}")
        self.append(Node(target.name, args))

    def call_with_keywords(self) -> None:
        """Do the same for a call with keywords, of which there must be none."""
        if self.stack.pop() != {}:
            raise TypeError("an object is made with keywords")
        self.call()

    def _instantiate(self, target: Any, args: list[Any]) -> None:
        """Do the same for the calls of protocol 0."""
        self.append(target)
        self.append(tuple(args))
        self.call()

    def build(self) -> None:
        """Keep the state that an object would get."""
        state = self.stack.pop()
        if type(self.stack[-1]) is not Node:
            raise TypeError(f"a {type(self.stack[-1]).__name__} is given a state")
        self.stack[-1].state = state

    def add(self, values: list[Any]) -> None:
        """Append values to a list, or add them to a set."""
        target = self.stack[-1]
        if type(target) is Node:
            target.values.extend(values)
        elif type(target) is set:
            target.update(map(checked_key, values))
        elif type(target) is list:
            target.extend(values)
        else:
            raise TypeError(f"values are added to a {type(target).__name__}")

    def set_items(self, values: list[Any]) -> None:
        """Set items, given as keys and values in turn."""
        target = self.stack[-1]
        pairs = zip(values[::2], values[1::2], strict=True)
        if type(target) is Node:
            target.pairs.extend(pairs)
        elif type(target) is dict:
            target.update((checked_key(key), value) for key, value in pairs)
        else:
            raise TypeError(f"items are set in a {type(target).__name__}")

    def dict_of(self, values: list[Any]) -> None:
        """Make a dict, given as keys and values in turn."""
        self.append({})
        self.set_items(values)


# These refer to what lies outside the file.
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
    pickle.DICT[0]: lambda reader: reader.dict_of(reader.pop_mark()),
    pickle.FROZENSET[0]: lambda reader: reader.append(frozenset(map(checked_key, reader.pop_mark()))),
    pickle.BYTEARRAY8[0]: lambda reader: reader.append(
        bytearray(reader.read(int.from_bytes(reader.read(8), "little")))
    ),
}


def _size(data: bytes) -> int:
    return int.from_bytes(data, "little")


def checked_key(key: Any) -> Any:
    """Return a value that is hashed in a short time. A tuple of too many parts (nested ones counted each time that they
    occur) and an integer that is too large are a `ValueError`.
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
            raise ValueError(f"an integer of {part.bit_length()} bits is a key")
    return key


def checked_size(number: Any) -> int:
    """Return a number of a pickle if it can be a size; otherwise raise a ValueError."""
    if type(number) is not int or not 0 <= number < 2**62:
        raise ValueError(f"a {type(number).__name__} that is not a size where one was expected")
    return number


def checked_sizes(numbers: Any) -> list[int]:
    """Return numbers of a pickle if they can be a shape; otherwise raise a ValueError."""
    if not isinstance(numbers, (list, tuple)) or len(numbers) > _MAX_DIMS:
        raise ValueError(f"a {type(numbers).__name__} that is not a shape where one was expected")
    return [checked_size(number) for number in numbers]


def length_of(value: Any) -> int:
    """Return how long a plain value is; 0 for a number of ordinary size."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    return value.bit_length() // 8 if type(value) is int else 0
