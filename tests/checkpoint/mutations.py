"""Seeded damage: bytes that a disk or a network changes, and JSON and pickles as a forger would change them."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

_STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 2**64, 10**30, 1.5, 1e308, "", "a/b", "../x", "/etc", "\ud800", "\0", "nan", "x" * 5000,
    [], {}, [[[[[[]]]]]], [0] * 100,
    {"$": "tensor", "v": "x"}, {"$": "ndarray", "dtype": "<f8", "shape": [2**40]},
    {"$": "ndarray", "dtype": "(9,9)f4,O", "shape": [2]}, {"$": "npscalar", "dtype": "|V99999", "v": ""},
    {"$": "datetime", "v": "2026-01-01", "fold": 0, "zone": "../Europe"}, {"$": "device", "v": "cuda:9999999999"},
    {"$": "size", "v": [2**70]}, {"$": "timedelta", "v": [1e300]}, {"$": "set", "v": [[1]]}, {"$": "int", "v": "0x"},
    {"$": "dict", "v": [[[1], 2]]}, {"$": "dtype", "v": "save"}, {"$": "duration", "v": [1, "eons"]}, {"$": []},
    {"$": "pieces", "v": "w", "shape": [2**62, 2**62], "dtype": "F32"},
)  # fmt: skip
_OPCODES = b"(.012FIJKLMNPQRSTUVXabcd}eghijl]opqrst)uGBC" + bytes([0x80, 0x81, 0x82, *range(0x85, 0x98)])


def mutated_bytes(data: bytes, numbers: random.Random) -> bytes:
    """Return `data` with some of it changed, cut off, left out or put in; never equal to it."""
    while True:
        changed = bytearray(data)
        for _ in range(numbers.choice([1, 1, 1, 2, 5])):
            place = numbers.randrange(len(changed) + 1)
            end = place + numbers.choice([1, 1, 4, 8, 64])
            kind = numbers.randrange(6)
            if kind == 0:
                changed[place : place + 1] = numbers.randbytes(1)
            elif kind == 1:
                del changed[place:]
            elif kind == 2:
                del changed[place:end]
            elif kind == 3:
                changed[place:place] = numbers.randbytes(end - place)
            elif kind == 4:
                changed[place:place] = changed[place:end] * numbers.choice([1, 2, 50])
            else:
                changed[place : place + 8] = numbers.choice([0, 1, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")
        if changed != data:
            return bytes(changed)


def mutated_pickle(data: bytes, numbers: random.Random) -> bytes:
    """Return a pickle with some opcodes put into it or in the place of others, or bytes changed."""
    if numbers.random() < 0.3:
        return mutated_bytes(data, numbers)
    place = numbers.randrange(len(data) + 1)
    codes = bytes(numbers.choices(_OPCODES, k=numbers.choice([1, 2, 6])))
    return data[:place] + codes + data[place + numbers.choice([0, 1]) :]


def mutated_json(data: bytes, numbers: random.Random) -> bytes:
    """Return JSON that is as well-formed as before, with some values changed, left out, or put in others' places."""
    tree = json.loads(data)
    for _ in range(numbers.choice([1, 1, 1, 2, 4])):
        places = list(_places(tree))
        if not places:
            return b"[]"
        container, key = numbers.choice(places)
        other, place = numbers.choice(places)
        kind = numbers.randrange(6)
        if kind == 0:
            del container[key]
        elif kind == 1:
            container[key] = copy.deepcopy(other[place])
        elif kind == 2:
            for _ in range(numbers.choice([1, 10, 180])):
                container[key] = [container[key]]
        else:
            container[key] = copy.deepcopy(numbers.choice(_STRANGE))
    return json.dumps(tree).encode()


def _places(tree: Any) -> Any:
    """Yield each value's container and its key or index there."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)
