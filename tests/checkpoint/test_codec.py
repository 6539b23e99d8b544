from __future__ import annotations

import enum
import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.every_kind import every_value
from tests.checkpoint.snapshots import same
from trainwright.checkpoint import decode, encode
from trainwright.checkpoint.disk.untrusted import dump_json, load_json
from trainwright.core.errors import CheckpointError


def round_trip(tree: Any) -> Any:
    value, tensors = encode(tree)
    return decode(load_json(dump_json(value).encode(), "test"), tensors)


class Colour(enum.IntEnum):
    RED = 1


def test_every_kind_of_value_comes_back_with_its_type_order_and_bits() -> None:
    tree = every_value()
    assert same(round_trip(tree), tree)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e8m0fnu], ids=str)
def test_a_tensor_of_a_dtype_that_is_stored_as_another_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(12, dtype=torch.uint8).view(dtype)
    assert same(round_trip({"x": tensor})["x"], tensor)


def test_one_tensor_in_two_places_is_stored_once_and_comes_back_as_one() -> None:
    tensor = torch.ones(3)
    _, tensors = encode({"a": tensor, "b": [tensor]})
    back = round_trip({"a": tensor, "b": [tensor]})
    assert len(tensors) == 1
    assert back["a"] is back["b"][0]


def test_a_defaultdict_keeps_a_builtin_factory_and_others_are_refused() -> None:
    back = round_trip(defaultdict(int, {"a": 1}))
    assert back["new"] == 0
    with pytest.raises(CheckpointError, match=r"stats\.by_name"):
        encode({"stats": {"by_name": defaultdict(lambda: 3)}})


@pytest.mark.parametrize(
    "value",
    [object(), Colour.RED, len, Exception("x"), np.array([object()]), np.zeros(1, "i4,f4"),
     torch.zeros(1, device="meta"), torch.zeros(2).to_sparse(), type("Text", (str,), {})("a"), torch.Generator()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_cannot_come_back_exactly_is_refused_by_its_place_in_the_tree(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"callbacks\.EarlyStopping\.best\[1\]"):
        encode({"callbacks": {"EarlyStopping": {"best": [0, value]}}})
    with pytest.raises(CheckpointError, match=r"^rates\[0\]\.high"):
        encode({"rates": {0: {"high": value}}})


def test_a_tree_that_contains_itself_is_refused_and_one_list_twice_is_not() -> None:
    tree: dict[str, Any] = {"a": []}
    tree["a"].append(tree)
    with pytest.raises(CheckpointError, match=r"a\[0\] contains itself"):
        encode(tree)
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


@pytest.mark.parametrize(
    "node",
    [
        {"$": "os.system", "v": "x"}, {"$": "tuple", "v": 3}, {"$": "dict", "v": [[1]]}, {"$": "set", "v": [[]]},
        {"$": "dtype", "v": "load"}, {"$": "device", "v": "nowhere"},
        {"$": "int", "v": "zz"}, {"$": "bytes", "v": "0"}, {"$": "tensor", "v": ["a"]},
        {"$": "tensor", "v": "t", "dtype": "torch.complex64"}, {"$": "ndarray", "dtype": "O", "shape": [1], "v": "t"},
        {"$": "ndarray", "dtype": "<f8", "shape": [10**15]}, {"$": "npscalar", "dtype": "<f8", "v": "00"},
        {"$": "defaultdict", "factory": "eval", "v": []}, {"$": "duration", "v": [-1, "steps"]},
        {"$": "timedelta", "v": [10**12]},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_a_value_that_was_not_written_by_encode_is_a_checkpoint_error(node: Any) -> None:
    with pytest.raises(CheckpointError):
        decode({"a": [node]}, {"t": torch.zeros(3)})
