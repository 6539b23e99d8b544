"""An empty model that is spread over places finds all its values in a state dict or a folder, or says what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.bigmodels.nets import ALL_DISK, MIXED, TOKENS, empty_net, make_net
from trainwright.bigmodels.dispatch.dispatch import cpu_offload, disk_offload, dispatch_model
from trainwright.bigmodels.weights.weights_map import offload_state_dict
from trainwright.core.errors import CheckpointError

EXPECTED = make_net()(TOKENS)
STATE = make_net().state_dict()

Spread = Callable[[nn.Module, Mapping[str, torch.Tensor], Path], nn.Module]


def _to(places: dict[str, str], *, force_hooks: bool = False) -> Spread:
    return lambda net, state, folder: dispatch_model(
        net, places, state_dict=state, offload_dir=folder, force_hooks=force_hooks
    )


WAYS: dict[str, Spread] = {
    "cpu_offload": lambda net, state, folder: cpu_offload(net, "cpu", state_dict=state),
    "cpu_offload with buffers": lambda net, state, folder: cpu_offload(net, "cpu", True, state_dict=state),
    "one device": _to({"": "cpu"}),
    "one device with hooks": _to({"": "cpu"}, force_hooks=True),
    "mixed": _to(MIXED),
    "disk": _to(ALL_DISK),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_model_takes_what_stays_at_hand_from_the_state_dict_too(way: str, tmp_path: Path) -> None:
    net = WAYS[way](empty_net(), STATE, tmp_path)
    assert torch.equal(net(TOKENS), EXPECTED)


@pytest.mark.parametrize("way", WAYS)
def test_what_neither_the_model_nor_the_state_dict_has_is_named_before_anything_changes(
    way: str, tmp_path: Path
) -> None:
    net = empty_net()
    net.blocks[0][1].register_buffer("scale", torch.ones(8, device="meta"), persistent=False)
    before = {name: id(tensor) for name, tensor in (*net.named_parameters(), *net.named_buffers())}
    with pytest.raises(CheckpointError, match=r"blocks\.0\.1\.scale"):
        WAYS[way](net, STATE, tmp_path)
    assert {name: id(tensor) for name, tensor in (*net.named_parameters(), *net.named_buffers())} == before
    assert not any("_hf_hook" in vars(module) for module in net.modules())


def test_a_value_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"running_mean.*\(3,\).*\(8,\)"):
        cpu_offload(empty_net(), "cpu", state_dict={**STATE, "blocks.0.1.running_mean": torch.ones(3)})


def test_tied_parameters_stay_tied_where_a_state_dict_fills_them() -> None:
    state = {name: tensor for name, tensor in STATE.items() if name != "head.weight"}
    net = dispatch_model(empty_net(), {"": "cpu"}, state_dict=state)
    assert net.head.weight is net.embed.weight
    assert torch.equal(net(TOKENS), EXPECTED)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("left_out", ["head.weight", "embed.weight"])
def test_a_tied_weight_is_found_by_any_of_its_names(way: str, left_out: str, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in STATE.items() if name != left_out}  # as files of safetensors have it
    net = WAYS[way](empty_net(), state, tmp_path)
    assert torch.equal(net(TOKENS), EXPECTED)


def test_values_that_the_model_has_are_not_replaced() -> None:
    net = make_net()
    other = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    assert torch.equal(dispatch_model(net, {"": "cpu"}, state_dict=other)(TOKENS), EXPECTED)


@pytest.mark.parametrize("how", ["disk_offload", "dispatch_model"])
def test_buffers_that_stay_at_hand_come_from_the_folder(how: str, tmp_path: Path) -> None:
    offload_state_dict(tmp_path, STATE)
    net = empty_net()
    if how == "disk_offload":
        disk_offload(net, tmp_path, "cpu")
    else:
        dispatch_model(net, ALL_DISK, offload_dir=tmp_path)
    assert torch.equal(net(TOKENS), EXPECTED)
