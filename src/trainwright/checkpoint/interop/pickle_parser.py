"""Parsing of pickles into inert data, without importing or calling anything.

Python's own unpickler reads the opcodes, and each import becomes a `Placeholder`. For example, the pickle of
`OrderedDict(a=1)` becomes `Placeholder("collections.OrderedDict", args=())` with `pairs=[("a", 1)]`.

The unpickler is the one in pure Python, because a pickle of 9 bytes makes the C unpickler allocate 2 GB for its memo.
`torch.load(weights_only=True)` is not used either: torch 2.13 returns a list that contains itself, and a tensor of 3 GB
from a storage of 4 bytes. The C unpickler and `torch.load` take exponential time to hash a key that is a nested tuple
with shared parts.
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
_MAX_DIMS = 64  # of a tensor

STORAGE = ".storage"  # name of the placeholders for storages, which are stored outside the pickle


class Placeholder:
    """A placeholder for an import in a pickle, or for the result of a call of it. Nothing was imported or called.

    The unpickler calls the methods, which only store their arguments.

    Attributes:
        name: module and name of the import, with a dot between them. `STORAGE` for a storage.
        args: the arguments of the call, which may be or contain placeholders. None for an import that was not called.
            For a storage, a tuple with its persistent id.
        state: the state for the result's `__setstate__`. None if the pickle sets no state.
        pairs: the items that the pickle sets in the result, as in `result[key] = value`.
    """

    __slots__ = ("args", "name", "pairs", "state")

    def __init__(self, name: str, args: tuple[Any, ...] | None = None) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.pairs: list[tuple[Any, Any]] = []

    def __setstate__(self, state: object) -> None:
        """Store the state."""
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        """Store an item."""
        self.pairs.append((key, value))

    def extend(self, values: list[Any]) -> None:
        """Skip the values of a subclass of list, which is not supported."""

    append = extend  # the unpickler calls `append` with one value


def parse_pickle(data: Any, start: int = 0, *, limit: int, origin: str) -> tuple[Any, int, list[Placeholder]]:
    """Parse one pickle.

    Args:
        data: bytes that contain the pickle, such as a mapped file.
        start: offset of the pickle. Default: 0.
        limit: maximum length of the pickle in bytes.
        origin: name of the file in error messages.

    Returns:
        The content, the offset after the pickle, and the placeholders of the storages that it refers to, in order.

    Raises:
        CheckpointError: the pickle exceeds `limit` or `MAX_OPERATIONS`.
        Exception: any other error means that the pickle is damaged. Damaged pickles raise errors of many classes.
    """
    file = io.BytesIO(data[start : start + limit])
    unpickler = _InertUnpickler(file, origin)
    try:
        content = unpickler.load()
    except (EOFError, pickle.UnpicklingError):
        # The pickle is truncated: by the limit, or in the file itself.
        if start + limit >= len(data):
            raise
        raise CheckpointError(f"{origin}: its pickle is longer than the limit of {limit} bytes.") from None
    return content, start + file.tell(), unpickler.storages


class _InertUnpickler(pickle._Unpickler):
    """An unpickler that builds containers, numbers, text and placeholders only.

    Inherited operations append to the objects of a pickle and set their states. These objects are placeholders or
    built-in containers, so that nothing from the pickle runs. The operations below replace the inherited ones that
    call objects of the pickle, hash keys without a limit, or allocate memory before they read.

    Attributes:
        storages: placeholders of the storages so far, in the order of the pickle.
    """

    # Attributes of Python's unpickler. A mark begins the items of a container: `pop_mark` returns the items after the
    # last mark, and then `stack` and `append` are those before the mark.
    stack: list[Any]
    append: Callable[[Any], None]  # appends to the stack
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], bytes]

    def __init__(self, file: io.BytesIO, origin: str) -> None:
        # For the 8-bit text of Python 2. `torch.load` has the same default.
        super().__init__(file, encoding="utf-8")
        # Replaces the class's table of operations.
        self.dispatch = _Operations(origin)  # type: ignore[misc]  # per instance
        self.storages: list[Placeholder] = []

    def find_class(self, module: str, name: str) -> Placeholder:
        """Return a placeholder for an import."""
        return Placeholder(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Return a placeholder for a storage outside the pickle, or for a class.

        `pid` is what torch stores instead of the object: `("storage", ...)` or, before torch 1.6,
        `("module", class, source file, source code)`.
        """
        if type(pid) is tuple and pid[0] == "module":
            return pid[1]
        storage = Placeholder(STORAGE, (pid,))
        self.storages.append(storage)
        return storage

    def load_reduce(self) -> None:
        """Replace a call by a placeholder. Only an import can be called, and not the result of another call."""
        args = self.stack.pop()
        target = self.stack.pop()
        if type(target) is not Placeholder or target.args is not None or type(args) is not tuple:
            raise TypeError(f"a call of a {type(target).__name__} with a {type(args).__name__}")
        self.append(Placeholder(target.name, args))

    def _instantiate(self, target: object, args: list[Any]) -> None:
        """Replace a call in the form of pickle protocol 0 by a placeholder. Inherited operations call this method."""
        self.append(target)
        self.append(tuple(args))
        self.load_reduce()

    def load_newobj_ex(self) -> None:
        """Replace a call without keyword arguments by a placeholder. Other calls are not supported."""
        # The stack has the class, the positional arguments and the keyword arguments.
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
        members = self.pop_mark()  # before `self.append` is read, because it changes `append`
        self.append(frozenset(map(checked_key, members)))


# These opcodes refer to objects outside the file, and raise a KeyError.
_UNUSED = (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)
# The unpickler finds operations by opcode, not by the name of a method. A method that replaces an inherited one must
# therefore be listed here.
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
        self._remaining = MAX_OPERATIONS

    def __getitem__(self, code: int) -> Callable[..., None]:
        self._remaining -= 1
        if self._remaining < 0:
            raise CheckpointError(f"{self._origin}: its pickle exceeds {MAX_OPERATIONS} operations, the limit.")
        return super().__getitem__(code)


def checked_key(key: Any) -> Any:
    """Return a dict key or set member if it can be hashed quickly.

    Raise a `ValueError` for a large integer, or a tuple or frozenset with many items, including items of nested ones.
    """
    if type(key) is str:
        return key
    unchecked = [key]
    count = 0
    while unchecked:
        part = unchecked.pop()
        count += 1
        if type(part) in (tuple, frozenset):
            # The items also count here, so that a long tuple is refused before it is copied.
            count += len(part)
            if count > _MAX_KEY_PARTS:
                raise ValueError(f"a key has more than {_MAX_KEY_PARTS} parts")
            unchecked.extend(part)
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
