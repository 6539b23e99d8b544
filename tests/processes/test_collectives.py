"""Operations across processes: nested structures, all kinds of tensors, and errors that every process gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from tests.helpers.distributed import run_distributed
from trainwright import (
    ConfigurationError,
    PartialState,
    broadcast,
    broadcast_object_list,
    concatenate,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    send_to_device,
    wait_for_everyone,
)


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize("operation", [reduce, pad_across_processes])
def test_what_is_no_tensor_is_refused_by_name(operation: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=f"{operation.__name__} got a value of type str"):
        operation({"a": [torch.ones(1), "text"]})


def test_tensors_are_sent_and_skipped_keys_stay() -> None:
    data = {"a": torch.ones(1), "b": [{"cache": torch.ones(1)}, Pair(torch.ones(1), "text")], "cache": torch.ones(1)}
    found = send_to_device(data, "meta", skip_keys="cache")
    assert (found["a"].device.type, found["b"][1].left.device.type) == ("meta", "meta")
    assert (found["cache"].device.type, found["b"][0]["cache"].device.type) == ("cpu", "cpu")
    everything = send_to_device(data, torch.device("meta"), non_blocking=True)
    assert everything["b"][0]["cache"].device.type == "meta"


class _Graph:
    place = "here"

    def to(self, device: torch.device) -> _Graph:
        self.place = str(device)
        return self


def test_structures_are_concatenated_leaf_by_leaf() -> None:
    parts = [{"a": Pair(torch.tensor([[n]]), [torch.tensor([n])])} for n in (1, 2)]
    found = concatenate(parts)
    assert found["a"].left.tolist() == [[1], [2]]
    assert found["a"].right[0].tolist() == [1, 2]
    assert concatenate([torch.ones(2, 1), torch.ones(2, 2)], dim=1).shape == (2, 3)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], ConfigurationError, "nothing to concatenate"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], ConfigurationError, "different keys"),
        ([[torch.ones(1)], []], ConfigurationError, "different lengths"),
        (["a", "b"], TypeError, "type str"),
    ],
)
def test_what_cannot_be_concatenated_is_refused(data: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        concatenate(data)


def _raised(call: Callable[[], Any]) -> str:
    with pytest.raises((ConfigurationError, TypeError)) as caught:
        call()
    return str(caught.value)


def _exchange() -> dict[str, Any]:
    state = PartialState(cpu=True)
    rank = state.process_index
    mine = torch.tensor([1.0 + rank, 2.0])
    transposed = (torch.arange(4.0) + 10 * rank).view(2, 2).t()
    weight = torch.nn.Parameter(torch.full((2, 2), float(rank)).t())
    objects = [rank, {"rank": rank}]
    found: dict[str, Any] = {
        "gathered": gather({"a": torch.tensor(rank), "b": Pair(mine, [torch.tensor([rank > 0])])}),
        "transposed": gather(transposed),
        "empty": gather(torch.ones(0, 3)).shape,
        "with gradient": gather(weight).requires_grad,
        "objects": gather_object(["a"] * (rank + 1)),
        "sum": reduce([mine], "sum"),
        "mean": reduce({"loss": mine}),
        "scaled": reduce(mine, "sum", scale=0.5),
        "none": reduce(mine, "none"),
        "count": reduce(torch.tensor(rank + 1), "sum"),
        "kept": mine,
        "same list": broadcast_object_list(objects, from_process=1) is objects,
        "list": objects,
        "padded": pad_across_processes({"x": torch.ones(2 + rank, 2), "y": torch.tensor(1), "z": torch.ones(3, 1)}),
        "padded in front": pad_across_processes(torch.ones(1, 2 - rank), dim=-1, pad_index=9, pad_first=True),
        "no such dimension": pad_across_processes(torch.ones(1 + rank), dim=1),
    }
    found["same tensor"] = broadcast([weight], from_process=1)[0] is weight
    with torch.no_grad():
        found["weight"] = weight.clone()
    found["errors"] = [
        _raised(lambda: gather([torch.ones(1), "text"])),
        _raised(lambda: gather_object("text")),
        _raised(lambda: broadcast(mine, from_process=2)),
        _raised(lambda: broadcast_object_list([1], from_process=-1)),
        _raised(lambda: reduce(torch.tensor(1))),
    ]
    found["different"] = [_raised(lambda each=each: each(torch.ones(2 + rank))) for each in (gather, broadcast, reduce)]
    found["another operation"] = _raised(lambda: (gather, reduce)[rank](mine))
    state.debug = True
    found["right in debug mode"] = gather(pad_across_processes(torch.ones(1 + rank))).tolist()
    wait_for_everyone()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed(_exchange, 2, init=False, timeout=120)


@pytest.mark.distributed
def test_every_tensor_of_a_structure_is_gathered_in_the_order_of_the_processes(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        gathered = found["gathered"]
        assert gathered["a"].tolist() == [0, 1]
        assert gathered["b"].left.tolist() == [1, 2, 2, 2]
        assert gathered["b"].right[0].tolist() == [False, True]
        assert found["transposed"].tolist() == [[0, 2], [1, 3], [10, 12], [11, 13]]
        assert (found["empty"], found["with gradient"]) == ((0, 3), False)


@pytest.mark.distributed
def test_lists_of_any_length_are_gathered_into_one(ranks: list[dict[str, Any]]) -> None:
    assert [found["objects"] for found in ranks] == [["a"] * 3] * 2


@pytest.mark.distributed
def test_tensors_are_reduced_and_stay_as_they_were(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert found["sum"][0].tolist() == [3, 4]
        assert found["mean"]["loss"].tolist() == [1.5, 2]
        assert found["scaled"].tolist() == [1.5, 2]
        assert found["none"].tolist() == found["kept"].tolist() == [1 + rank, 2]
        assert found["count"].item() == 3


@pytest.mark.distributed
def test_one_process_s_values_overwrite_those_of_the_others_in_place(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["same list"]
        assert found["list"] == [1, {"rank": 1}]
        assert found["same tensor"]
        assert found["weight"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.distributed
def test_tensors_are_filled_up_to_the_longest(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert found["padded"]["x"].tolist() == [[1, 1], [1, 1], [rank, rank]]
        assert (found["padded"]["y"].shape, found["padded"]["z"].shape) == ((), (3, 1))
        assert found["padded in front"].tolist() == [[[1, 1]], [[9, 1]]][rank]
        assert found["no such dimension"].shape == (1 + rank,)


@pytest.mark.distributed
def test_wrong_calls_are_refused_before_anything_is_sent(ranks: list[dict[str, Any]]) -> None:
    words = [
        "gather got a value of type str",
        "gather_object takes a list",
        "from_process=2",
        "from_process=-1",
        "mean",
    ]
    for found in ranks:
        for word, message in zip(words, found["errors"], strict=True):
            assert word in message


@pytest.mark.distributed
def test_every_process_is_told_of_different_shapes(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for name, message in zip(("gather", "broadcast(…, 0)", "reduce(…, 'mean')"), found["different"], strict=True):
            assert f"process 0: {name} of [((2,), 'float32')]" in message
            assert f"process 1: {name} of [((3,), 'float32')]" in message
        assert "process 1: reduce(…, 'mean') of" in found["another operation"]
        assert found["right in debug mode"] == [1, 0, 1, 1]


def test_objects_that_can_move_are_moved_as_a_whole() -> None:
    packed = send_to_device([pack_sequence([torch.ones(2), torch.ones(1)])], "cpu")[0]
    assert isinstance(packed, PackedSequence)
    assert send_to_device({"graph": _Graph()}, "meta", non_blocking=True)["graph"].place == "meta"
