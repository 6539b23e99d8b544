"""Seeded damage: bytes that a disk or a network changes, and JSON and pickles as a forger would change them."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

_STRANGE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 1.5, 1e308, -0.0, "", "x", "a/b", "../x",
    "/etc", "\ud800", "\0", "nan", "inf", "0x" + "f" * 50, "é" * 200, "x" * 5000, [], {}, [[]], [[[[[[]]]]]], {"": {}},
    [0] * 100,
    {"$": "tensor", "v": "x"}, {"$": "tuple", "v": [1]}, {"$": "ndarray", "dtype": "<f8", "shape": [2**40]},
    {"$": "ndarray", "dtype": "(9,9)f4,O", "shape": [2]}, {"$": "npscalar", "dtype": "|V99999", "v": ""},
    {"$": "datetime", "v": "2026-01-01", "fold": 0, "zone": "../Europe"}, {"$": "device", "v": "cuda:9999999999"},
    {"$": "size", "v": [2**70]}, {"$": "timedelta", "v": [1e300]}, {"$": "set", "v": [[1]]}, {"$": "int", "v": "0x"},
    {"$": "dict", "v": [[[1], 2]]}, {"$": "dtype", "v": "save"},
    {"$": "pieces", "v": "w", "shape": [2**62, 2**62], "dtype": "F32"},
    {"$": "path", "v": "\0"}, {"$": "duration", "v": [1, "eons"]}, {"$": []}, {"$": None},
)  # fmt: skip
_OPCODES = b"(.012FIJKLMNPQRSTUVXabcd}eghijl]opqrst)uGBC" + bytes([0x80, 0x81, 0x82, *range(0x85, 0x98)])


def mutated_bytes(data: bytes, numbers: random.Random) -> bytes:
    """Return `data` with some of it changed, cut off, left out, repeated or put elsewhere; never equal to it."""
    while True:
        changed = bytearray(data)
        for _ in range(numbers.choice([1, 1, 1, 2, 5])):
            _mutate(changed, numbers)
        if changed != data:
            return bytes(changed)


def _mutate(data: bytearray, numbers: random.Random) -> None:
    place = numbers.randrange(len(data) + 1)
    length = min(numbers.choice([1, 1, 4, 8, 64]), len(data) - place)
    kind = numbers.randrange(8)
    if kind == 0 and place < len(data):
        data[place] ^= 1 << numbers.randrange(8)
    elif kind == 1 and place < len(data):
        data[place] = numbers.randrange(256)
    elif kind == 2:
        del data[place:]
    elif kind == 3:
        del data[place : place + length]
    elif kind == 4:
        data[place:place] = numbers.randbytes(numbers.choice([1, 4, 100]))
    elif kind == 5:
        data[place:place] = data[place : place + length] * numbers.choice([1, 2, 50])
    elif kind == 6:
        data[place : place + length] = b"\xff" * length
    else:
        data[place : place + 8] = numbers.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]).to_bytes(8, "little")


def mutated_pickle(data: bytes, numbers: random.Random) -> bytes:
    """Return a pickle with some bytes changed to opcodes, or some opcodes put into it."""
    changed = bytearray(data)
    for _ in range(numbers.choice([1, 1, 2, 4])):
        place = numbers.randrange(len(changed) + 1)
        if numbers.random() < 0.3 and place < len(changed):
            changed[place] = numbers.choice(_OPCODES)
        elif numbers.random() < 0.5:
            changed[place:place] = bytes(numbers.choices(_OPCODES, k=numbers.choice([1, 2, 6])))
        else:
            _mutate(changed, numbers)
    return bytes(changed)


def mutated_json(data: bytes, numbers: random.Random) -> bytes:
    """Return JSON that is as well-formed as before, with some values changed, left out, or put in others' places."""
    tree = json.loads(data)
    for _ in range(numbers.choice([1, 1, 1, 2, 4])):
        tree = _with_change(tree, numbers)
    return json.dumps(tree).encode()


def _with_change(tree: Any, numbers: random.Random) -> Any:
    places = list(_places(tree))
    if not places:
        return numbers.choice(_STRANGE)
    container, key = numbers.choice(places)
    kind = numbers.randrange(10)
    if kind == 0:
        del container[key]
    elif kind == 1:
        other, place = numbers.choice(places)
        container[key] = copy.deepcopy(other[place])
    elif kind == 2 and isinstance(container, dict):
        container[numbers.choice(["x", "$", "../y", "\ud800"])] = container.pop(key)
    elif kind == 3:
        for _ in range(numbers.choice([1, 10, 180])):
            container[key] = [container[key]]
    elif kind == 4 and isinstance(container[key], list):
        container[key] = container[key] * numbers.choice([0, 2, 30])
    else:
        container[key] = copy.deepcopy(numbers.choice(_STRANGE))
    return tree


def _places(tree: Any) -> Any:
    """Yield each value's container and its key or index there."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)
