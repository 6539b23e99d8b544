"""Bytes of modules, in any dtype; tied parameters; amounts of memory as people write them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.bigmodels.models import Block, Buffered, TiedModel, layer, layers
from trainwright import (
    ConfigurationError,
    CustomDtype,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    find_tied_parameters,
    get_max_layer_size,
    get_max_memory,
    retie_parameters,
)
from trainwright.bigmodels.maps.sizes import calculate_maximum_sizes, named_module_tensors
from trainwright.core.host.memory import available_host_memory_bytes


def test_every_module_and_tensor_has_a_size() -> None:
    assert dict(compute_module_sizes(nn.Sequential(Block(), layer(5)))) == {
        "": 220, "0": 200, "0.a": 100, "0.a.weight": 100, "0.b": 100, "0.b.weight": 100, "1": 20, "1.weight": 20,
    }  # fmt: skip


def test_buffers_count_and_can_be_counted_alone() -> None:
    assert compute_module_sizes(Buffered())[""] == 100 + 40 + 80
    assert dict(compute_module_sizes(Buffered(), buffers_only=True)) == {"": 120, "saved": 40, "unsaved": 80}
    assert compute_module_total_buffer_size(Buffered()) == 120
    model = nn.Sequential(Buffered())
    for options, names in (
        ({}, ["0.layer.weight", "0.saved", "0.unsaved"]),
        ({"remove_non_persistent": True}, ["0.layer.weight", "0.saved"]),
        ({"include_buffers": False}, ["0.layer.weight"]),
    ):
        assert [name for name, _ in named_module_tensors(model, recurse=True, **options)] == names
    assert [name for name, _ in named_module_tensors(model[0], remove_non_persistent=True)] == ["saved"]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float16", 50), (torch.bfloat16, 50), ("float64", 100), ("int8", 25), ("int4", 13), (CustomDtype.INT4, 13)],
)
def test_another_dtype_makes_floating_tensors_smaller_and_never_larger(dtype: object, size: int) -> None:
    sizes = compute_module_sizes(Buffered(), dtype=dtype)  # type: ignore[arg-type]  # a parameter of the test
    assert sizes["layer.weight"] == size
    assert sizes["unsaved"] == 80


def test_the_largest_layer_is_found_with_all_its_equals() -> None:
    model = nn.Sequential(layer(10), Block(), layer(25))
    sizes = compute_module_sizes(model)
    assert get_max_layer_size(list(model.named_children()), sizes, []) == (100, ["1.a", "1.b", "2"])
    assert get_max_layer_size(list(model.named_children()), sizes, ["Block"]) == (200, ["1"])
    assert calculate_maximum_sizes(model) == (340, (100, ["1.a", "1.b", "2"]))
    model._no_split_modules = ["Block"]  # type: ignore[assignment]  # as in transformers
    assert calculate_maximum_sizes(model) == (340, (200, ["1"]))


def test_tied_parameters_are_found_by_all_their_names() -> None:
    model = TiedModel()
    model.blocks[1].a = model.blocks[0].a
    assert find_tied_parameters(model) == [["blocks.0.a.weight", "blocks.1.a.weight"], ["embed.weight", "head.weight"]]
    assert find_tied_parameters(layers(1, 1)) == []


def test_parameters_are_tied_again_to_the_one_that_was_loaded() -> None:
    model = TiedModel()
    tied = find_tied_parameters(model)
    model.head.weight = nn.Parameter(torch.ones(1, 25))
    retie_parameters(model, tied)
    assert model.embed.weight is model.head.weight
    assert model.embed.weight.sum() == 25


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *((12, 12), (0, 0), ("10GiB", 10 * 2**30), ("10GB", 10**10), ("1.5 GB", 1_500_000_000), ("7KIB", 7168)),
        *(("1gib", 2**30), ("5MB", 5_000_000), ("10Gb", 1_250_000_000), ("2TiB", 2**41), ("100B", 100)),
    ],
)
def test_a_size_is_written_in_bytes_or_with_a_unit(text: int | str, size: int) -> None:
    assert convert_file_size_to_int(text) == size


def test_budgets_are_sorted_into_the_order_of_filling() -> None:
    given = {"disk": "1GB", "cpu": 50, "mps": 4, 1: 10, "0": "1KB"}
    assert list(get_max_memory(given).items()) == [(0, 1000), (1, 10), ("mps", 4), ("cpu", 50), ("disk", 10**9)]


def test_budgets_are_read_as_transformers_passes_them() -> None:
    given: dict[int | str, float | str] = {"cpu": 1000.75, "disk": "1KB"}
    assert get_max_memory(given) == {"cpu": 1000, "disk": 1000}
    assert given == {"cpu": 1000.75, "disk": 1000}  # transformers compares numbers
    with pytest.raises(ConfigurationError, match="inf"):
        get_max_memory({"cpu": float("inf")})


@pytest.mark.parametrize("given", [{"gpu0": 1}, {-1: 1}, {"": 1}, {0: 1, "0": 1}])
def test_an_unknown_or_doubled_device_is_an_error(given: dict[int | str, int | str]) -> None:
    with pytest.raises(ConfigurationError, match=r"is unknown|twice"):
        get_max_memory(given)


def test_without_budgets_there_is_the_free_memory() -> None:
    found = get_max_memory()
    assert list(found)[-1] == "cpu"
    assert 2**20 < found["cpu"] <= 2 * available_host_memory_bytes()
    assert all(size > 0 for size in found.values())
