"""Parsing pickles into inert data: nothing is imported, called or built, whatever the file says.

`pickle.Unpickler` cannot be made safe by overriding `find_class` alone: a few bytes have it allocate gigabytes for its
memo, and it hashes a tuple that holds itself many times over in time that doubles with each level. This parser knows
the same opcodes (protocols 0 to 5), keeps its work within bounds that go by the length of the pickle, and yields
containers, numbers, text and two kinds of stand-ins: `Named` for what the pickle would import, and `Node` for what it
would call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainwright.core.errors import CheckpointError

# Operations in one pickle. A state dict takes some forty for each tensor.
MAX_OPERATIONS = 5_000_000
_NEWEST_PROTOCOL = 5
_MAX_KEY_BITS = 64  # of an integer: larger ones can be chosen so that a dict of them takes quadratic time
_MAX_KEY_PARTS = 1000  # of a tuple that is a key: hashing one that shares its parts takes exponential time

_MAX_DIMS = 64

Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Named:
    """What a pickle would import: a class or a function, by its module and its name."""

    name: Name


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


@dataclass(frozen=True, slots=True)
class Unknown:
    """Stands where a file holds something outside the closed list; `name` is its `module.name`."""

    name: str


STORAGE: Name = ("", "storage")


class _Mark:
    """What begins a run of values on the stack."""


_MARK = _Mark()


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
        self._data = data
        self._end = min(len(data), start + limit)
        self._is_cut = self._end < len(data)
        self._limit = limit
        self._origin = origin
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def parse(self) -> Any:
        """Return what the pickle holds.

        Raises:
            CheckpointError: it is longer or takes more operations than allowed. Other errors say that it is damaged:
                any `Exception` may come.
        """
        for _ in range(MAX_OPERATIONS):
            code = self._take(1)[0]
            if code == 0x2E:  # STOP
                return self._stack.pop()
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise ValueError(f"the opcode {code:#04x} at byte {self.position - 1} is not that of a pickle")
            operation(self)
        raise CheckpointError(f"{self._origin}: its pickle has more than {MAX_OPERATIONS} operations, which are read.")

    # Reading

    def _take(self, count: int) -> bytes:
        begin, end = self.position, self.position + count
        if end > self._end:
            if self._is_cut:
                raise CheckpointError(f"{self._origin}: its pickle has more than {self._limit} bytes, which are read.")
            raise EOFError("the pickle is cut short")
        self.position = end
        taken: bytes = self._data[begin:end]
        return taken

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self.position, self._end)
        if end < 0:
            raise EOFError("the pickle is cut short")
        return self._take(end + 1 - self.position)[:-1]

    def _text(self, count: int) -> str:
        return self._take(count).decode("utf-8", "surrogatepass")

    def _protocol(self, number: int) -> None:
        if number > _NEWEST_PROTOCOL:
            raise ValueError(f"protocol {number} is not known")

    # The stack

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop_to_mark(self) -> list[Any]:
        """Take everything above the last mark, and the mark, from the stack."""
        stack = self._stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is _MARK:
                taken = stack[index + 1 :]
                del stack[index:]
                return taken
        raise ValueError("the pickle has no mark where one is needed")

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("the pickle has a mark where a value is needed")
        return value

    def _top(self) -> Any:
        return self._stack[-1]

    # Memory

    def _remember(self, index: int) -> None:
        self._memo[index] = self._top()

    def _recall(self, index: int) -> None:
        self._push(self._memo[index])

    # Containers

    def _append(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is list:
            target.extend(values)
        elif type(target) is Node:
            target.values.extend(values)
        else:
            raise TypeError(f"values are appended to a {type(target).__name__}")

    def _set_items(self, values: list[Any]) -> None:
        target = self._top()
        pairs = zip(values[::2], values[1::2], strict=True)
        if type(target) is Node:
            target.pairs.extend(pairs)
        elif type(target) is dict:
            for key, value in pairs:
                target[checked_key(key)] = value
        else:
            raise TypeError(f"items are set in a {type(target).__name__}")

    def _add_items(self, values: list[Any]) -> None:
        target = self._top()
        if type(target) is Node:
            target.values.extend(values)
        elif type(target) is set:
            target.update(map(checked_key, values))
        else:
            raise TypeError(f"members are added to a {type(target).__name__}")

    def _dict_of(self, values: list[Any]) -> None:
        self._push({})
        self._set_items(values)

    # Stand-ins

    def _call(self, target: Any, args: Any) -> None:
        if type(target) is not Named or type(args) is not tuple:
            raise TypeError(f"a {type(target).__name__} is called with a {type(args).__name__}")
        self._push(Node(target.name, args))

    def _global(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise TypeError("a name in the pickle is not text")
        self._push(Named((module, name)))

    def _instance(self) -> None:
        module, name = self._line().decode(), self._line().decode()
        self._push(Node((module, name), tuple(self._pop_to_mark())))

    def _object(self) -> None:
        target, *args = self._pop_to_mark()
        self._call(target, tuple(args))

    def _reduce(self) -> None:
        args = self._pop()
        self._call(self._pop(), args)

    def _new_with_keywords(self) -> None:
        if self._pop() != {}:
            raise TypeError("an object is made with keywords")
        self._reduce()

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        if type(target) is not Node:
            raise TypeError(f"a {type(target).__name__} is given a state")
        target.state = state

    def _storage(self, key: Any) -> None:
        node = Node(STORAGE, (key,))
        self.storages.append(node)
        self._push(node)

    def _stack_global(self) -> None:
        name = self._pop()
        self._global(self._pop(), name)

    def _integer_line(self) -> None:
        line = self._line()
        self._push({b"00": False, b"01": True}.get(line) if line in (b"00", b"01") else int(line, 0))

    def _quoted_line(self) -> None:
        line = self._line()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b'"', b"'"):
            raise ValueError("text in the pickle has no quotes")
        self._push(line[1:-1].decode("unicode_escape").encode("latin-1").decode("utf-8"))


def checked_key(key: Any) -> Any:
    """Return what is going to be hashed, if that does not take long.

    Raises:
        ValueError: it is a tuple of too many parts, those of tuples in it counted each time that they occur, or an
            integer that is too large.
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


def _tuple_of(parser: PickleParser, count: int) -> None:
    stack = parser._stack
    if len(stack) < count or any(value is _MARK for value in stack[-count:]):
        raise ValueError("the pickle's stack is too short")
    values = tuple(stack[-count:])
    del stack[-count:]
    parser._push(values)


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_BYTE, _SHORT, _INT, _UNSIGNED, _LONG, _DOUBLE = (struct.Struct(form) for form in ("B", "<H", "<i", "<I", "<Q", ">d"))

_Operation = Callable[[PickleParser], Any]
# By the opcodes of `pickletools`, with their names.
_BY_CHARACTER: dict[str, _Operation] = {
    "(": lambda p: p._push(_MARK),  # MARK
    "0": lambda p: p._stack.pop(),  # POP
    "1": lambda p: p._pop_to_mark(),  # POP_MARK
    "2": lambda p: p._push(p._top()),  # DUP
    "F": lambda p: p._push(float(p._line())),  # FLOAT
    "I": lambda p: p._integer_line(),  # INT
    "J": lambda p: p._push(p._number(_INT)),  # BININT
    "K": lambda p: p._push(p._number(_BYTE)),  # BININT1
    "L": lambda p: p._push(int(p._line().removesuffix(b"L"), 0)),  # LONG
    "M": lambda p: p._push(p._number(_SHORT)),  # BININT2
    "N": lambda p: p._push(None),  # NONE
    "P": lambda p: p._storage(p._line().decode("ascii")),  # PERSID
    "Q": lambda p: p._storage(p._pop()),  # BINPERSID
    "R": lambda p: p._reduce(),  # REDUCE
    "S": lambda p: p._quoted_line(),  # STRING
    "T": lambda p: p._push(p._take(_counted(p._number(_INT))).decode("utf-8")),  # BINSTRING
    "U": lambda p: p._push(p._take(p._number(_BYTE)).decode("utf-8")),  # SHORT_BINSTRING
    "V": lambda p: p._push(p._line().decode("raw-unicode-escape")),  # UNICODE
    "X": lambda p: p._push(p._text(p._number(_UNSIGNED))),  # BINUNICODE
    "a": lambda p: p._append([p._pop()]),  # APPEND
    "b": lambda p: p._build(),  # BUILD
    "c": lambda p: p._global(p._line().decode(), p._line().decode()),  # GLOBAL
    "d": lambda p: p._dict_of(p._pop_to_mark()),  # DICT
    "}": lambda p: p._push({}),  # EMPTY_DICT
    "e": lambda p: p._append(p._pop_to_mark()),  # APPENDS
    "g": lambda p: p._recall(int(p._line())),  # GET
    "h": lambda p: p._recall(p._number(_BYTE)),  # BINGET
    "i": lambda p: p._instance(),  # INST
    "j": lambda p: p._recall(p._number(_UNSIGNED)),  # LONG_BINGET
    "l": lambda p: p._push(p._pop_to_mark()),  # LIST
    "]": lambda p: p._push([]),  # EMPTY_LIST
    "o": lambda p: p._object(),  # OBJ
    "p": lambda p: p._remember(int(p._line())),  # PUT
    "q": lambda p: p._remember(p._number(_BYTE)),  # BINPUT
    "r": lambda p: p._remember(p._number(_UNSIGNED)),  # LONG_BINPUT
    "s": lambda p: p._set_items([p._pop(), p._pop()][::-1]),  # SETITEM
    "t": lambda p: p._push(tuple(p._pop_to_mark())),  # TUPLE
    ")": lambda p: p._push(()),  # EMPTY_TUPLE
    "u": lambda p: p._set_items(p._pop_to_mark()),  # SETITEMS
    "G": lambda p: p._push(p._number(_DOUBLE)),  # BINFLOAT
    "B": lambda p: p._push(p._take(p._number(_UNSIGNED))),  # BINBYTES
    "C": lambda p: p._push(p._take(p._number(_BYTE))),  # SHORT_BINBYTES
    "\x80": lambda p: p._protocol(p._number(_BYTE)),  # PROTO
    "\x81": lambda p: p._reduce(),  # NEWOBJ
    "\x85": lambda p: _tuple_of(p, 1),  # TUPLE1
    "\x86": lambda p: _tuple_of(p, 2),  # TUPLE2
    "\x87": lambda p: _tuple_of(p, 3),  # TUPLE3
    "\x88": lambda p: p._push(True),  # NEWTRUE
    "\x89": lambda p: p._push(False),  # NEWFALSE
    "\x8a": lambda p: p._push(_signed(p._take(p._number(_BYTE)))),  # LONG1
    "\x8b": lambda p: p._push(_signed(p._take(_counted(p._number(_INT))))),  # LONG4
    "\x8c": lambda p: p._push(p._text(p._number(_BYTE))),  # SHORT_BINUNICODE
    "\x8d": lambda p: p._push(p._text(p._number(_LONG))),  # BINUNICODE8
    "\x8e": lambda p: p._push(p._take(p._number(_LONG))),  # BINBYTES8
    "\x8f": lambda p: p._push(set()),  # EMPTY_SET
    "\x90": lambda p: p._add_items(p._pop_to_mark()),  # ADDITEMS
    "\x91": lambda p: p._push(frozenset(map(checked_key, p._pop_to_mark()))),  # FROZENSET
    "\x92": lambda p: p._new_with_keywords(),  # NEWOBJ_EX
    "\x93": lambda p: p._stack_global(),  # STACK_GLOBAL
    "\x94": lambda p: p._remember(len(p._memo)),  # MEMOIZE
    "\x95": lambda p: p._take(8),  # FRAME
    "\x96": lambda p: p._push(bytearray(p._take(p._number(_LONG)))),  # BYTEARRAY8
}  # fmt: skip
_OPERATIONS = {ord(character): operation for character, operation in _BY_CHARACTER.items()}


def _counted(count: int) -> int:
    if count < 0:
        raise ValueError("a length in the pickle is negative")
    return count
