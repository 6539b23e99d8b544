"""Device maps: the assignment as a pure function, maps of models, and what is said about bad ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.bigmodels.models import Block, TiedModel, layer, layers
from trainwright import (
    ConfigurationError,
    check_device_map,
    clean_device_map,
    explain_device_map,
    get_balanced_memory,
    infer_auto_device_map,
)
from trainwright.bigmodels.maps.device_assignment import (
    DeviceAssignment,
    Outline,
    assign_devices,
    is_accelerator,
    outermost,
)
from trainwright.bigmodels.maps.device_map import resolve_device_map
from trainwright.core.errors import TrainwrightWarning

Tree = int | list["Tree"]


def _outline(tree: Tree, tied: list[tuple[int, int]]) -> Outline:
    """Return a tree of sizes as an outline; `tied` are pairs of places among its leaves."""
    names, sizes, ends, whole = list[str](), list[int](), list[int](), list[bool]()

    def read(name: str, node: Tree) -> int:
        index = len(names)
        names.append(name)
        sizes.append(0)
        ends.append(0)
        whole.append(isinstance(node, int))
        inner = enumerate([] if isinstance(node, int) else node)
        size = node if isinstance(node, int) else sum(read(f"{name}.{i}", child) for i, child in inner)
        sizes[index], ends[index] = size, len(names)
        return size

    read("", tree)
    leaves = [index for index, is_layer in enumerate(whole) if is_layer]
    groups = {tuple(sorted({leaves[a % len(leaves)], leaves[b % len(leaves)]})) for a, b in tied}
    return Outline(names, sizes, ends, whole, [group for group in groups if len(group) > 1])


_TREES = st.recursive(st.integers(0, 60), lambda inner: st.lists(inner, min_size=1, max_size=5), max_leaves=25)
_TIES = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3)
_BUDGETS = st.tuples(st.lists(st.integers(0, 400), max_size=3), st.none() | st.integers(0, 800))
_LAW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def _placed(draw: st.DrawFn) -> tuple[Outline, dict[int | str, int | None], DeviceAssignment]:
    outline = _outline(draw(_TREES), draw(_TIES))
    accelerators, host = draw(_BUDGETS)
    budgets: dict[int | str, int | None] = dict(enumerate(accelerators))
    if host is not None:
        budgets["cpu"] = host
    largest = max(size for size, is_layer in zip(outline.sizes_bytes, outline.is_layer, strict=True) if is_layer)
    if all(budget is not None and budget < largest for budget in budgets.values()):
        budgets["cpu"] = largest
    budgets["disk"] = None
    return outline, budgets, assign_devices(outline, budgets, fallback=draw(st.booleans()))


def _device_of_layers(outline: Outline, assignment: DeviceAssignment) -> dict[int, int | str]:
    found = {}
    for part, device in outermost(outline, assignment.device_of).items():
        found.update({i: device for i in range(part, outline.ends[part]) if outline.is_layer[i]})
    return found


@pytest.mark.slow
@given(_placed())
@_LAW
def test_everything_is_placed_within_the_budgets_and_ties_lie_together(case: Any) -> None:
    outline, budgets, assignment = case
    device_of = _device_of_layers(outline, assignment)
    assert set(device_of) == {index for index, is_layer in enumerate(outline.is_layer) if is_layer}
    used = dict.fromkeys(budgets, 0)
    for part, device in device_of.items():
        used[device] += outline.sizes_bytes[part]
    assert used == assignment.used_bytes
    assert all(budget is None or used[device] <= budget for device, budget in budgets.items())
    assert all(len({device_of[part] for part in group}) == 1 for group in outline.tied)
    # The device that computes has room for whatever lies elsewhere.
    first = next((d for d, used in assignment.used_bytes.items() if used and is_accelerator(d)), None)
    if first is not None and assignment.offloads:
        assert first == assignment.runs_on
        elsewhere = [outline.sizes_bytes[part] for part, device in device_of.items() if not is_accelerator(device)]
        assert budgets[first] - assignment.used_bytes[first] >= max(elsewhere)


_WITHOUT_MEMORY = nn.Sequential(nn.Dropout(), layer(25), nn.ReLU(), layer(25), nn.Dropout())
MAPS: dict[str, tuple[nn.Module, dict[Any, int], dict[str, Any], dict[str, Any]]] = {
    "devices are filled one after the other": (
        layers(25, 25, 25, 25, 25, 25), {0: 300, 1: 200, "cpu": 10_000}, {},
        {"0": 0, "1": 0, "2": 1, "3": 1, "4": "cpu", "5": "cpu"},
    ),
    "a model that fits has one entry": (layers(25, 25), {0: 200}, {}, {"": 0}),
    "a model that fits has one entry, uncleaned": (layers(25, 25), {0: 200}, {"clean_result": False}, {"": 0}),
    "what does not fit goes to the disk": (
        layers(25, 25, 25), {"cpu": 200}, {}, {"0": "cpu", "1": "disk", "2": "disk"}
    ),
    "all of it goes to the disk": (layers(25, 25, 25), {"cpu": 0}, {}, {"": "disk"}),
    "room for the largest layer is kept": (
        layers(25, 25, 25), {0: 250, "cpu": 1000}, {}, {"0": 0, "1": "cpu", "2": "cpu"}
    ),
    "none is kept where nothing is offloaded": (
        layers(25, 25, 25, 25), {0: 250, 1: 250, "cpu": 1000}, {}, {"0": 0, "1": 0, "2": 1, "3": 1}
    ),
    "modules that share a tensor lie together": (
        TiedModel(), {0: 300, 1: 1000, "cpu": 1000}, {"clean_result": False},
        {"embed": 0, "blocks.0.a": 0, "blocks.0.b": 1, "blocks.1": 1, "head": 0},
    ),
    "a smaller dtype lets more fit": (layers(25, 25), {0: 100, "cpu": 200}, {"dtype": torch.float16}, {"": 0}),
    "so does one of a single tensor": (
        layers(25, 25), {0: 150, "cpu": 200}, {"special_dtypes": {"1.weight": "float16"}}, {"": 0}
    ),
    "modules without memory lie with their neighbours": (
        _WITHOUT_MEMORY, {0: 100, 1: 100}, {}, {"0": 0, "1": 0, "2": 0, "3": 1, "4": 1}
    ),
    "an accelerator that stays empty keeps no room": (
        layers(50, 25, 25, 25, 25, 25), {0: 250, 1: 400, "cpu": 1000}, {},
        {"0": 1, "1": 1, "2": "cpu", "3": "cpu", "4": "cpu", "5": "cpu"},
    ),
    "a model without memory lies on the first device": (nn.Sequential(nn.Dropout()), {0: 10, 1: 10}, {}, {"": 0}),
    "a device too small for the next module has the first that fits": (
        layers(50, 30, 25, 10, 25), {0: 100, 1: 600}, {"fallback_allocation": True},
        {"0": 1, "1": 1, "2": 0, "3": 1, "4": 1},
    ),
    "without fallback_allocation it stays empty": (layers(50, 30, 25, 10, 25), {0: 100, 1: 600}, {}, {"": 1}),
    "a device that has modules gets no later ones": (
        layers(25, 50, 25), {0: 200, 1: 300}, {"fallback_allocation": True}, {"0": 0, "1": 1, "2": 1},
    ),
    "a module is divided after those beside it": (
        nn.Sequential(layer(50), Block(), layer(5)), {0: 110, 1: 500}, {"fallback_allocation": True},
        {"0": 1, "1": 1, "2": 0},
    ),
    "a module of which a part is elsewhere is divided": (
        nn.Sequential(layer(50), layers(25, 10)), {0: 60, 1: 140, 2: 500}, {"fallback_allocation": True},
        {"0": 2, "1.0": 1, "1.1": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MAPS)
def test_a_map_is_inferred_for_the_budgets(case: str) -> None:
    model, budgets, options, expected = MAPS[case]
    assert infer_auto_device_map(model, budgets, **options) == expected


def test_a_block_is_divided_unless_its_class_is_named() -> None:
    model = nn.Sequential(Block(), Block())
    budgets: dict[int | str, int | str] = {0: 250, 1: 150, 2: 250}
    assert infer_auto_device_map(model, budgets) == {"0.a": 0, "0.b": 1, "1": 2}
    assert infer_auto_device_map(model, budgets, no_split_module_classes=["Block"]) == {"0": 0, "1": 2}
    assert infer_auto_device_map(model, budgets, no_split_module_classes="Block") == {"0": 0, "1": 2}


def test_an_accelerator_too_small_for_the_largest_layer_is_left_out_with_a_warning() -> None:
    with pytest.warns(TrainwrightWarning, match="nothing is placed on {0: 50 B}.* needs 100 B"):
        assert infer_auto_device_map(layers(25, 25), {0: 50, "cpu": 500}) == {"": "cpu"}


def test_budgets_that_are_used_up_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match="no room for '0'"):
        infer_auto_device_map(layers(25, 25), {0: 150, "disk": 0})


def test_balanced_budgets_are_a_share_and_a_quarter_more_than_a_block() -> None:
    model = layers(25, 25, 25, 25)
    assert get_balanced_memory(model, {0: 1000, 1: 1000}) == {0: 325, 1: 1000}
    assert get_balanced_memory(model, {0: 1000, 1: 1000, 2: 1000}, low_zero=True) == {0: 0, 1: 325, 2: 1000}
    assert get_balanced_memory(model, {0: 1000, "cpu": 7}) == {0: 1000, "cpu": 7}
    # A device without a budget is not one of those that share the model.
    assert get_balanced_memory(model, {0: 1000, 1: 1000, 2: 0}) == {0: 325, 1: 1000, 2: 0}
    assert get_balanced_memory(model, {0: 0, 1: 1000, 2: 1000}, low_zero=True) == {0: 0, 1: 325, 2: 1000}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("auto", {"0": 0, "1": 0, "2": 1, "3": 1}),
        ("balanced", {"0": 0, "1": 0, "2": 1, "3": 1}),
        ("balanced_low_0", {"": 1}),
        ("sequential", {"": 0}),
    ],
)
def test_a_word_stands_for_a_map(word: str, expected: dict[str, int]) -> None:
    assert resolve_device_map(layers(25, 25, 25, 25), word, max_memory={0: 1000, 1: 1000}) == expected


def test_a_name_that_is_no_module_is_warned_of() -> None:
    with pytest.warns(TrainwrightWarning, match=r"\['2'\]"):
        check_device_map(layers(1, 1), {"0": 0, "1": 0, "2": 0})


def test_a_module_of_two_names_needs_a_device_for_both() -> None:
    tied = nn.ModuleDict(dict.fromkeys("ab", layer(1)))
    with pytest.raises(ConfigurationError, match=r"parameters: b\.weight\."):
        check_device_map(tied, {"a": 0})


def test_a_map_is_cleaned_in_place() -> None:
    device_map: dict[str, Any] = {"a.b": 0, "a.c.d": 0, "a.c.e": 0, "f.g": 0, "f.h": 1}
    assert clean_device_map(device_map) is device_map
    assert device_map == {"a": 0, "f.g": 0, "f.h": 1}
    assert clean_device_map({"a.b": 0, "c": 0}) == {"": 0}
    assert clean_device_map({"a.b": 0, "a.c": 0, "d.e": 0, "d.f": 0}, "a") == {"a": 0, "d.e": 0, "d.f": 0}


def test_a_map_is_explained() -> None:
    report = explain_device_map(TiedModel(), {0: 250, "cpu": 1000})
    assert report.total_bytes == 500
    assert [(share.device, share.used_bytes) for share in report.shares] == [(0, 100), ("cpu", 400), ("disk", 0)]
    text = str(report)
    assert "Device 0 computes the layers on the host and on disk" in text
    assert " 1, 2, 3\n" in str(explain_device_map(layers(*[25] * 4), {0: 200, "cpu": 1000}))
    assert "1 … 5 (5 modules)" in str(explain_device_map(layers(*[25] * 6), {0: 200, "cpu": 1000}))
    assert "Device 0 has no room for 'blocks.0.a', which needs 100 B: 150 B are free, of which 100 B are" in text
    assert "'head' is on device 0 because it shares a tensor" in text
    assert "With 250 B more on the last accelerator, nothing would be offloaded." in text


def test_with_what_is_missing_all_lies_on_accelerators() -> None:
    report = explain_device_map(TiedModel(), {0: 250, 1: 100, "cpu": 1000})
    missing = report.missing_bytes
    assert set(infer_auto_device_map(TiedModel(), {0: 250, 1: 100 + missing, "cpu": 1000}).values()) == {0, 1}
    assert "cpu" in infer_auto_device_map(TiedModel(), {0: 250, 1: 99 + missing, "cpu": 1000}).values()


class _BlockWithMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(100, 100, device="meta"))
        self.register_buffer("mask", torch.empty(1000, device="meta"))


def test_buffers_that_do_not_fit_beside_the_largest_offloaded_weight_are_a_warning() -> None:
    model = nn.Sequential(*[_BlockWithMask() for _ in range(5)])
    # One block is on the device (44,000 bytes). The weights of four are offloaded (40,000 each), 16,000 are buffers.
    fitting = {"no_split_module_classes": ["_BlockWithMask"], "max_memory": {0: 44_000 + 40_000 + 16_000, "cpu": 10**9}}
    infer_auto_device_map(model, **fitting)
    too_small = {**fitting, "max_memory": {0: 44_000 + 40_000 + 15_999, "cpu": 10**9}}
    with pytest.warns(TrainwrightWarning, match=r"take 15.6 KiB .* device 0, .* 15.6 KiB free .*\(39.1 KiB\)"):
        infer_auto_device_map(model, **too_small)
    # Without offloaded buffers, and on no accelerator, there is nothing to warn of.
    infer_auto_device_map(layers(25, 25, 25), {0: 200, "cpu": 1000})
    infer_auto_device_map(model, {"cpu": 50_000}, no_split_module_classes=["_BlockWithMask"])
    infer_auto_device_map(model, **too_small, offload_buffers=True)


def test_a_large_buffer_is_not_among_the_weights_that_need_room_beside_the_buffers() -> None:
    model = nn.ModuleList()
    for _ in range(3):
        model.append(nn.Sequential(layer(25)))
        model[-1].register_buffer("mask", torch.empty(100, device="meta"))  # 400 bytes; that of module 1 is an entry
    with pytest.warns(TrainwrightWarning, match=r"take 800 B .* 300 B free .*\(100 B\)"):
        infer_auto_device_map(model, {0: 1000, "cpu": 10_000})


def test_verbose_prints_the_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(layers(25, 25), {0: 200}, verbose=True)
    assert "(the whole model)" in capsys.readouterr().out


def test_the_missing_memory_is_that_of_the_same_fallback_allocation() -> None:
    model = nn.Sequential(nn.Linear(10, 1, bias=False), nn.Linear(3, 1, bias=False))
    budgets = {0: 16, 1: 36, "cpu": 1000}
    assert explain_device_map(model, budgets, fallback_allocation=True).missing_bytes == 4
    assert explain_device_map(model, budgets).missing_bytes == 16
