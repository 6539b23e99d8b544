"""A model that is spread is spread anew: weights come from where they are, and the former placement leaves nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.bigmodels.nets import ALL_DISK, MIXED, TOKENS, Net, empty_net, make_net, plain_state, tree_of
from trainwright import (
    ConfigurationError,
    ModelHook,
    add_hook_to_module,
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
)
from trainwright.bigmodels.dispatch.align import AlignDevicesHook
from trainwright.bigmodels.dispatch.model_hooks import hooks_of

EXPECTED = make_net()(TOKENS)
OTHER = {"embed": "disk", "blocks.0": "cpu", "blocks.1": "disk", "head": "cpu"}


def _loaded(folder: Path, places: dict[str, str]) -> Net:
    save_file(plain_state(make_net()), folder / "m.safetensors")
    net = empty_net()
    load_checkpoint_and_dispatch(net, folder / "m.safetensors", places)
    return net


FORMER: dict[str, Callable[[Path], Any]] = {
    "mixed": lambda folder: dispatch_model(make_net(), MIXED, offload_dir=folder / "former"),
    "on the disk": lambda folder: dispatch_model(make_net(), ALL_DISK, offload_dir=folder / "former"),
    "with hooks": lambda folder: dispatch_model(make_net(), {"": "cpu"}, force_hooks=True),
    "cpu_offload": lambda folder: cpu_offload(make_net(), "cpu", offload_buffers=True),
    "disk_offload": lambda folder: disk_offload(make_net(), folder / "former", "cpu"),
    "of a checkpoint": lambda folder: _loaded(folder, ALL_DISK),
    "of a checkpoint, mixed": lambda folder: _loaded(folder, MIXED),
}
NEW: dict[str, Callable[[Net, Path], Any]] = {
    "the cpu": lambda net, folder: dispatch_model(net, {"": "cpu"}),
    "mixed": lambda net, folder: dispatch_model(net, MIXED, offload_dir=folder / "new"),
    "other": lambda net, folder: dispatch_model(net, OTHER, offload_dir=folder / "new"),
    "the disk": lambda net, folder: dispatch_model(net, ALL_DISK, offload_dir=folder / "new"),
    "cpu_offload": lambda net, folder: cpu_offload(net, "cpu"),
    "disk_offload": lambda net, folder: disk_offload(net, folder / "new", "cpu"),
}


def _count(net: nn.Module) -> list[int]:
    return [sum(isinstance(hook, AlignDevicesHook) for hook in hooks_of(module)) for module in net.modules()]


@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize("former", FORMER)
@torch.no_grad()
def test_a_model_is_placed_anew_as_if_it_had_not_been_before(former: str, new: str, tmp_path: Path) -> None:
    net = FORMER[former](tmp_path)
    net(TOKENS)
    NEW[new](net, tmp_path)
    for _ in range(3):
        assert torch.equal(net(TOKENS), EXPECTED)
    fresh = NEW[new](make_net(), tmp_path / "fresh")
    assert _count(net) == _count(fresh)
    if "disk" not in new and new != "other":
        fresh_places = {name: tensor.device for name, tensor in fresh.state_dict().items()}
        assert {name: tensor.device for name, tensor in net.state_dict().items()} == fresh_places
    NEW["the cpu"](net, tmp_path)
    assert _count(net) == [0] * len(list(net.modules()))
    assert net.head.weight is net.embed.weight
    assert torch.equal(net.to("cpu")(TOKENS), EXPECTED)


@torch.no_grad()
def test_weights_on_the_disk_are_not_written_again(tmp_path: Path) -> None:
    net = FORMER["on the disk"](tmp_path)
    before = tree_of(tmp_path)
    for places in (ALL_DISK, MIXED):
        dispatch_model(net, places)  # without a folder
        assert torch.equal(net(TOKENS), EXPECTED)
        assert tree_of(tmp_path) == before


@torch.no_grad()
def test_weights_written_to_after_they_came_back_are_those_that_are_offloaded(tmp_path: Path) -> None:
    for former in ("on the disk", "of a checkpoint"):
        folder = tmp_path / former
        folder.mkdir()
        net = FORMER[former](folder)
        dispatch_model(net, {"": "cpu"})
        net.blocks[0][0].weight.add_(1)
        expected = net(TOKENS)
        dispatch_model(net, ALL_DISK, offload_dir=folder / "new")
        assert torch.equal(net(TOKENS), expected)
        assert not torch.equal(expected, EXPECTED)


@pytest.mark.parametrize("new", NEW)
@torch.no_grad()
def test_hooks_that_are_removed_after_a_second_placement_leave_the_weights(new: str, tmp_path: Path) -> None:
    net = FORMER["on the disk"](tmp_path)
    NEW[new](net, tmp_path)
    for each in (copy.deepcopy(net), net):
        remove_hook_from_submodules(each)
        assert {tensor.device.type for tensor in each.state_dict().values()} == {"cpu"}
        assert each.head.weight is each.embed.weight
        assert torch.equal(each(TOKENS), EXPECTED)


def test_an_optimizer_s_parameters_are_the_model_s_again(tmp_path: Path) -> None:
    net = make_net()
    before = dict(net.named_parameters())
    dispatch_model(net, ALL_DISK, offload_dir=tmp_path)
    dispatch_model(net, {"": "cpu"})
    assert all(parameter is before[name] for name, parameter in net.named_parameters())


@torch.no_grad()
def test_a_hook_of_the_user_s_own_stays(tmp_path: Path) -> None:
    class Doubled(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2

    net = FORMER["on the disk"](tmp_path)
    add_hook_to_module(net.head, Doubled(), append=True)
    for places in (MIXED, {"": "cpu"}):
        dispatch_model(net, places)
        assert torch.equal(net(TOKENS), EXPECTED * 2)


@pytest.mark.parametrize("former", FORMER)
@torch.no_grad()
def test_a_placement_that_fails_leaves_the_former_one(
    former: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("in the middle")

    net = FORMER[former](tmp_path)
    devices = {name: tensor.device for name, tensor in net.state_dict().items()}
    count = _count(net)
    monkeypatch.setattr("trainwright.bigmodels.dispatch.dispatch.refuse_moves", fail)
    for call in (NEW["other"], NEW["disk_offload"]):
        with pytest.raises(RuntimeError, match="in the middle"):
            call(net, tmp_path)
        assert {name: tensor.device for name, tensor in net.state_dict().items()} == devices
        assert _count(net) == count
        assert torch.equal(net(TOKENS), EXPECTED)
    if "meta" in {device.type for device in devices.values()}:
        with pytest.raises(ConfigurationError, match="offloaded"):
            net.to("cpu")


@torch.no_grad()
def test_after_the_hooks_are_gone_a_checkpoint_s_weights_on_the_disk_can_be_had(tmp_path: Path) -> None:
    net = FORMER["of a checkpoint"](tmp_path)
    remove_hook_from_submodules(net)
    twin = copy.deepcopy(net)
    for each in (net, twin):
        with pytest.raises(ConfigurationError, match=r"dispatch_model\(model, \{\"\": \"cpu\"\}\)"):
            each.to("cpu")
        with pytest.raises(ConfigurationError, match="offloaded"):
            each.cpu()
        dispatch_model(each, {"": "cpu"})
        assert torch.equal(each.to("cpu")(TOKENS), EXPECTED)


@torch.no_grad()
def test_a_part_left_on_the_disk_may_be_kept_in_memory_instead(tmp_path: Path) -> None:
    net = FORMER["of a checkpoint"](tmp_path)
    remove_hook_from_submodules(net)
    cpu_offload(net, "cpu")
    assert torch.equal(net(TOKENS), EXPECTED)
