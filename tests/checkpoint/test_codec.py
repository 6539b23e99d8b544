"""The codec: exact both ways, and closed to everything that it does not know."""

from __future__ import annotations

import datetime
import enum
import json
import math
import pathlib
import zoneinfo
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.snapshots import same
from trainwright.checkpoint import decode, encode
from trainwright.checkpoint.disk.untrusted import dump_json, load_json
from trainwright.core.duration import Duration
from trainwright.core.errors import CheckpointError
from trainwright.core.metric_value import MetricValue

_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32, torch.complex64,
    torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.bool,
]  # fmt: skip

_text = st.text(st.characters(codec=None, exclude_categories=()))
_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats()
    | st.complex_numbers()
    | _text
    | st.binary()
    | st.datetimes(timezones=st.none() | st.timezones())
    | st.dates()
    | st.timedeltas()
)
_hashable = _scalars | st.tuples(_scalars, _scalars) | st.frozensets(_scalars, max_size=3)
_trees = st.recursive(
    _scalars | st.sampled_from([torch.Size([1, 2]), torch.bfloat16, torch.device("cuda", 1), pathlib.Path("a/b")]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_hashable, inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$", "v", "a.b", "a", ""]), inner, max_size=4)
        | st.sets(_hashable, max_size=4)
        | st.dictionaries(_text, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(_text, st.integers(), max_size=3).map(Counter)
        | st.dictionaries(_text, inner, max_size=3).map(lambda value: defaultdict(list, value))
    ),
    max_leaves=20,
)


def round_trip(tree: Any) -> Any:
    value, tensors = encode(tree)
    return decode(load_json(dump_json(value).encode(), "test"), tensors)


class Colour(enum.IntEnum):
    RED = 1


@given(_trees)
def test_a_tree_of_plain_values_comes_back_with_the_same_types_order_and_bits(tree: Any) -> None:
    assert same(round_trip(tree), tree)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 2**63, 2**64, -(2**63) - 1, -(10**5000), complex(-0.0, math.nan),
     "\ud800", "\ud800\udc00", "\U00010000", "\0", b"\xff\0", {"$": "tuple", "v": []}, {1: 2, "1": 3, None: 4, 1.5: 5},
     {(1, frozenset({b"a"})): True}, [], (), {}, set(), frozenset(), defaultdict(None, {1: 2})],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_that_plain_json_would_change_come_back_as_they_were(value: Any) -> None:
    assert same(round_trip({"x": [value]})["x"][0], value)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4)], ids=str)
def test_a_tensor_of_every_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape)) * dtype.itemsize
    if dtype is torch.bool:
        tensor = torch.rand(shape) > 0.5
    else:
        tensor = torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)
    assert same(round_trip({"x": tensor})["x"], tensor)


def test_non_contiguous_conjugated_and_overlapping_tensors_come_back_by_value() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tree = [base.t(), base[:, ::2], base[0], torch.complex(base, base).conj(), torch.ones(1).expand(5)]
    assert same(round_trip(tree), tree)


def test_one_tensor_in_two_places_is_stored_once_and_comes_back_as_one() -> None:
    tensor = torch.ones(3)
    _, tensors = encode({"a": tensor, "b": [tensor]})
    back = round_trip({"a": tensor, "b": [tensor]})
    assert len(tensors) == 1
    assert back["a"] is back["b"][0]


def test_tensors_are_named_after_their_place_and_names_never_collide() -> None:
    tree = {
        "a.b": torch.zeros(1),
        "a": {"b": torch.ones(1)},
        "__metadata__": torch.full((1,), 2.0),
        "\ud800": torch.ones(1),
    }
    _, tensors = encode(tree)
    assert {"a.b", "a.b#2", "__metadata__#2"} < set(tensors)
    assert same(round_trip(tree), tree)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(["a", "bcd", ""]),
        np.array([b"x", b""]),
        np.array(["2020-01-01", "NaT"], dtype="datetime64[s]"),
        np.array([1, 2], dtype=">i4"),
        np.array([1 + 2j]),
        np.zeros((0, 3), np.float32),
        np.array(5.0),
        np.longdouble(1) / np.arange(1, 4, dtype=np.longdouble),
        np.zeros(2, "U0"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_a_numpy_array_comes_back_with_its_dtype_and_bytes(array: np.ndarray[Any, Any]) -> None:
    back = round_trip([array])[0]
    assert same(back, array)
    assert back.flags.writeable


@pytest.mark.parametrize(
    "value",
    [np.float64(-0.0), np.float32("nan"), np.int8(-3), np.bool_(True), np.str_("ä\ud800"), np.str_(""), np.bytes_(b"a"),
     np.datetime64("2020-01-01T00:00:01"), np.complex64(1j)],
    ids=repr,
)  # fmt: skip
def test_a_numpy_scalar_keeps_its_type(value: Any) -> None:
    assert same(round_trip({"x": value})["x"], value)


def test_durations_and_zoned_times_come_back_equal() -> None:
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    tree = {
        "every": Duration("0.25 epoch"),
        "late": datetime.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=zone),
        "fixed": datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=-3, seconds=7))),
    }
    back = round_trip(tree)
    assert back == tree
    assert back["late"].utcoffset() == datetime.timedelta(hours=1)


def test_a_defaultdict_keeps_a_builtin_factory_and_others_are_refused() -> None:
    back = round_trip(defaultdict(int, {"a": 1}))
    assert back["new"] == 0
    with pytest.raises(CheckpointError, match=r"stats\.by_name.*factory|stats\.by_name: a defaultdict"):
        encode({"stats": {"by_name": defaultdict(lambda: 3)}})


@pytest.mark.parametrize(
    "value",
    [object(), Colour.RED, Pair(1, 2), len, Exception("x"), np.array([object()]), np.zeros(1, "i4,f4"),
     torch.zeros(1, device="meta"), torch.zeros(2).to_sparse(), type("Text", (str,), {})("a"), torch.Generator()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_cannot_come_back_exactly_is_refused_by_its_place_in_the_tree(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"callbacks\.EarlyStopping\.best\[1\]"):
        encode({"callbacks": {"EarlyStopping": {"best": [0, value]}}})


def test_a_tree_that_contains_itself_is_refused_and_one_list_twice_is_not() -> None:
    tree: dict[str, Any] = {"a": []}
    tree["a"].append(tree)
    with pytest.raises(CheckpointError, match=r"a\[0\] contains itself"):
        encode(tree)
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


def test_nesting_beyond_reason_is_refused_when_written_and_when_read() -> None:
    tree: list[Any] = []
    for _ in range(1000):
        tree = [tree]
    with pytest.raises(CheckpointError, match="nested more than 150 deep"):
        encode(tree)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        decode(tree, {})


def test_a_missing_tensor_is_an_error_that_names_it() -> None:
    value, tensors = encode({"mean": torch.ones(2)})
    del tensors["mean"]
    with pytest.raises(CheckpointError, match="'mean' of the saved state is missing"):
        decode(value, tensors)


@pytest.mark.parametrize(
    "node",
    [
        {"$": "os.system", "v": "x"}, {"$": ["list"]}, {"$": "tuple"}, {"$": "tuple", "v": 3},
        {"$": "dict", "v": [[1]]}, {"$": "dict", "v": [[[], 1]]}, {"$": "set", "v": [[]]}, {"$": "dtype", "v": "load"},
        {"$": "device", "v": "nowhere"},
        {"$": "float", "v": "1e3"}, {"$": "int", "v": "zz"}, {"$": "bytes", "v": "0"}, {"$": "tensor", "v": ["a"]},
        {"$": "tensor", "v": "t", "dtype": "torch.load"}, {"$": "tensor", "v": "t", "dtype": "torch.complex64"},
        {"$": "ndarray", "dtype": "O", "shape": [1], "v": "t"}, {"$": "ndarray", "dtype": "<f8", "shape": [10**15]},
        {"$": "ndarray", "dtype": "<f8", "shape": [2], "v": "t"}, {"$": "npscalar", "dtype": "O", "v": "00" * 8},
        {"$": "npscalar", "dtype": "<f8", "v": "00"}, {"$": "defaultdict", "factory": "eval", "v": []},
        {"$": "duration", "v": [-1, "steps"]}, {"$": "datetime", "v": "x", "fold": 0},
        {"$": "timedelta", "v": [10**12]},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_a_value_that_was_not_written_by_encode_is_a_checkpoint_error(node: Any) -> None:
    with pytest.raises(CheckpointError):
        decode({"a": [node]}, {"t": torch.zeros(3)})


def test_a_metric_is_stored_as_a_number() -> None:
    tree, tensors = encode({"best": MetricValue(0.5), "none yet": MetricValue(float("inf"))})
    assert decode(load_json(dump_json(tree).encode(), "test"), tensors) == {"best": 0.5, "none yet": float("inf")}
