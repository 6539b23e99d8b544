"""A model that is spread or offloaded is loaded into or placed again: the former placement leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.bigmodels.nets import ALL_DISK, MIXED, TOKENS, Net, empty_net, make_net, plain_state
from trainwright import (
    ConfigurationError,
    ModelHook,
    TrainwrightWarning,
    add_hook_to_module,
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    remove_hook_from_submodules,
    save_model,
)
from trainwright.bigmodels.dispatch.align import AlignDevicesHook, offloading_hooks
from trainwright.bigmodels.dispatch.model_hooks import hooks_of

Places = dict[str, str] | None


def _other() -> Net:
    net = make_net()
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.mul_(1 + 0.1 * number).add_(0.05)
        for block in net.blocks:
            block[1].running_mean.add_(0.5)
    return net


NEW = plain_state(_other())
OLD_SCORES, NEW_SCORES = make_net()(TOKENS), _other()(TOKENS)


def _checkpoint(folder: Path, suffix: str) -> Path:
    path = folder / f"new.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(NEW, path)
    return path


def _loaded(folder: Path, places: dict[str, str]) -> Net:
    save_file(plain_state(make_net()), folder / "old.safetensors")
    net = empty_net()
    load_checkpoint_and_dispatch(net, folder / "old.safetensors", places)
    return net


SPREAD: dict[str, Callable[[Path], Any]] = {
    "mixed": lambda folder: dispatch_model(make_net(), MIXED, offload_dir=folder),
    "on the disk": lambda folder: dispatch_model(make_net(), ALL_DISK, offload_dir=folder),
    "with buffers": lambda folder: dispatch_model(make_net(), ALL_DISK, offload_dir=folder, offload_buffers=True),
    "cpu_offload": lambda folder: cpu_offload(make_net(), "cpu"),
    "of a checkpoint": lambda folder: _loaded(folder, ALL_DISK),
}


@pytest.mark.slow
@pytest.mark.parametrize(("places", "suffix"), [(None, "bin"), ({"": "cpu"}, "safetensors"), (ALL_DISK, "bin")])
@pytest.mark.parametrize("kind", SPREAD)
@torch.no_grad()
def test_a_model_that_is_spread_runs_with_the_weights_that_are_loaded_into_it(
    kind: str, places: Places, suffix: str, tmp_path: Path
) -> None:
    net = SPREAD[kind](tmp_path)
    assert torch.equal(net(TOKENS), OLD_SCORES)
    load_checkpoint_in_model(net, _checkpoint(tmp_path, suffix), places, offload_folder=tmp_path, strict=True)
    if not (places == ALL_DISK and kind == "mixed"):  # else parts of it are not spread yet
        for _ in range(3):
            assert torch.equal(net(TOKENS), NEW_SCORES)
    save_model(net, tmp_path / "saved")
    again = empty_net()
    load_checkpoint_in_model(again, tmp_path / "saved", {"": "cpu"}, strict=True)
    assert torch.equal(again(TOKENS), NEW_SCORES)


OTHER = {"embed": "disk", "blocks.0": "cpu", "blocks.1": "disk", "head": "cpu"}


FORMER: dict[str, Callable[[Path], Any]] = {
    "with hooks": lambda folder: dispatch_model(make_net(), {"": "cpu"}, force_hooks=True),
    **{kind: SPREAD[kind] for kind in ("mixed", "on the disk", "of a checkpoint")},
}
PLACES: dict[str, Callable[[Net, Path], Any]] = {
    "the cpu": lambda net, folder: dispatch_model(net, {"": "cpu"}),
    "other": lambda net, folder: dispatch_model(net, OTHER, offload_dir=folder / "new"),
    "the disk": lambda net, folder: dispatch_model(net, ALL_DISK, offload_dir=folder / "new"),
    "cpu_offload": lambda net, folder: cpu_offload(net, "cpu"),
    "disk_offload": lambda net, folder: disk_offload(net, folder / "new", "cpu"),
}


def _count(net: nn.Module) -> list[int]:
    return [sum(isinstance(hook, AlignDevicesHook) for hook in hooks_of(module)) for module in net.modules()]


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
    for call in (PLACES["other"], PLACES["disk_offload"]):
        with pytest.raises(RuntimeError, match="in the middle"):
            call(net, tmp_path)
        assert {name: tensor.device for name, tensor in net.state_dict().items()} == devices
        assert _count(net) == count
        assert torch.equal(net(TOKENS), OLD_SCORES)
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
        assert torch.equal(each.to("cpu")(TOKENS), OLD_SCORES)


@torch.no_grad()
def test_a_hook_of_the_user_s_own_stays(tmp_path: Path) -> None:
    class Doubled(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2

    net = FORMER["on the disk"](tmp_path)
    add_hook_to_module(net.head, Doubled(), append=True)
    for places in (MIXED, {"": "cpu"}):
        dispatch_model(net, places)
        assert torch.equal(net(TOKENS), OLD_SCORES * 2)


@torch.no_grad()
def test_weights_on_the_disk_are_found_after_a_conversion_and_in_a_copy(tmp_path: Path) -> None:
    save_file(plain_state(make_net()), tmp_path / "old.safetensors")
    net = empty_net()
    load_checkpoint_in_model(net, tmp_path / "old.safetensors", ALL_DISK, offload_buffers=True)
    twin = copy.deepcopy(net.double())
    for each in (net, twin):
        dispatch_model(each, {"": "cpu"})
        assert torch.equal(each(TOKENS), make_net().double()(TOKENS))


@torch.no_grad()
def test_weights_on_the_disk_count_as_values_for_a_checkpoint_without_them(tmp_path: Path) -> None:
    save_file(plain_state(make_net()), tmp_path / "old.safetensors")
    save_file({"embed.weight": make_net().embed.weight}, tmp_path / "part.safetensors")
    net = empty_net()
    load_checkpoint_in_model(net, tmp_path / "old.safetensors", ALL_DISK, offload_buffers=True)
    with pytest.warns(TrainwrightWarning, match="missing in the checkpoint"):
        load_checkpoint_and_dispatch(net, tmp_path / "part.safetensors", ALL_DISK, offload_buffers=True)
    assert torch.equal(net(TOKENS), OLD_SCORES)


@torch.no_grad()
def test_weights_on_the_disk_of_a_model_without_hooks_are_named_in_a_forward(tmp_path: Path) -> None:
    save_file(plain_state(make_net()), tmp_path / "old.safetensors")
    net = empty_net()
    load_checkpoint_in_model(net, tmp_path / "old.safetensors", ALL_DISK, offload_buffers=True)
    with pytest.raises(ConfigurationError, match=r"weight.* is in a file.*dispatch_model"):
        net(TOKENS)
    dispatch_model(net, ALL_DISK, offload_buffers=True)
    assert torch.equal(net(TOKENS), OLD_SCORES)
    remove_hook_from_submodules(net)
    with pytest.raises(ConfigurationError, match=r"is in a file.*dispatch_model"):
        net(TOKENS)


def test_weights_that_are_loaded_again_count_once_for_prefetching(tmp_path: Path) -> None:
    net = dispatch_model(make_net(), ALL_DISK, offload_dir=tmp_path / "offload")
    save_model(make_net(), tmp_path / "weights")
    prefetcher = offloading_hooks(net.head)[0].prefetcher
    assert prefetcher is not None
    total_bytes = prefetcher.total_bytes
    load_checkpoint_in_model(net, tmp_path / "weights")
    assert prefetcher.total_bytes == total_bytes
    assert torch.equal(net(TOKENS), make_net()(TOKENS))
