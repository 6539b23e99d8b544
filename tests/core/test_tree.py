from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.core.tree import batch_size, iterate_tensors, map_tensors, move

CPU, META = torch.device("cpu"), torch.device("meta")


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Example:
    tokens: torch.Tensor
    name: str


leaves = st.one_of(
    st.integers(-5, 5).map(lambda n: torch.tensor([float(n)])), st.integers(), st.text(max_size=3), st.none()
)
trees = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), children, max_size=3),
        st.tuples(children, children).map(lambda pair: Pair(*pair)),
    ),
    max_leaves=8,
)


def plain(tree: Any) -> Any:
    """Return a tree with its tensors as numbers, so that trees can be compared."""
    return map_tensors(lambda tensor: ("tensor", *tensor.reshape(-1).tolist()), tree)


@given(trees)
def test_mapping_the_identity_changes_nothing_and_makes_new_containers(tree: Any) -> None:
    mapped = map_tensors(lambda tensor: tensor, tree)
    assert plain(mapped) == plain(tree)
    assert [id(tensor) for tensor in iterate_tensors(mapped)] == [id(tensor) for tensor in iterate_tensors(tree)]


def test_moving_changes_the_dtype_of_floating_point_tensors_only() -> None:
    tree = {"x": torch.ones(2), "ids": torch.arange(2), "mask": torch.ones(2, dtype=torch.bool), "n": 3}
    moved = move(tree, CPU, float_dtype=torch.bfloat16)
    assert [moved["x"].dtype, moved["ids"].dtype, moved["mask"].dtype] == [torch.bfloat16, torch.int64, torch.bool]
    assert moved["n"] == 3


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(3, 2), 3),
        ((torch.ones(4, 1), torch.ones(9)), 4),
        ({"n": 3, "x": torch.ones(5)}, 5),
        ({"scale": torch.tensor(2.0), "x": torch.ones(6, 2)}, 6),
        (["a", "b", "c"], 3),
        (Example(torch.ones(2, 8), "x"), 2),
        ([[torch.ones(8)]], 8),
        (torch.tensor(1.0), 1),
        (None, 1),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_batch_size_is_the_leading_length_of_the_first_tensor_that_has_one(batch: Any, size: int) -> None:
    assert batch_size(batch) == size
