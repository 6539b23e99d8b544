"""Loading into a model that is spread or offloaded already: its next forward has the new weights, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.bigmodels.nets import ALL_DISK, MIXED, TOKENS, Net, empty_net, make_net, plain_state
from trainwright import (
    CheckpointError,
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    remove_hook_from_submodules,
    save_model,
)

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
    "cpu_offload with buffers": lambda folder: cpu_offload(make_net(), "cpu", offload_buffers=True),
    "disk_offload": lambda folder: disk_offload(make_net(), folder, "cpu"),
    "of a checkpoint": lambda folder: _loaded(folder, ALL_DISK),
    "of a checkpoint, mixed": lambda folder: _loaded(folder, MIXED),
}


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("places", [None, {"": "cpu"}, ALL_DISK], ids=["no map", "cpu", "disk"])
@pytest.mark.parametrize("kind", SPREAD)
@torch.no_grad()
def test_a_model_that_is_spread_runs_with_the_weights_that_are_loaded_into_it(
    kind: str, places: Places, suffix: str, tmp_path: Path
) -> None:
    net = SPREAD[kind](tmp_path)
    assert torch.equal(net(TOKENS), OLD_SCORES)
    load_checkpoint_in_model(net, _checkpoint(tmp_path, suffix), places, offload_folder=tmp_path, strict=True)
    if not (places == ALL_DISK and kind in ("mixed", "of a checkpoint, mixed")):  # else parts of it are not spread yet
        for _ in range(3):
            assert torch.equal(net(TOKENS), NEW_SCORES)
    save_model(net, tmp_path / "saved")
    again = empty_net()
    load_checkpoint_in_model(again, tmp_path / "saved", {"": "cpu"}, strict=True)
    assert torch.equal(again(TOKENS), NEW_SCORES)


@pytest.mark.parametrize("kind", SPREAD)
@torch.no_grad()
def test_hooks_taken_off_give_back_the_weights_that_were_loaded_last(kind: str, tmp_path: Path) -> None:
    net = SPREAD[kind](tmp_path)
    load_checkpoint_in_model(net, _checkpoint(tmp_path, "safetensors"), {"": "cpu"})
    remove_hook_from_submodules(net)
    assert torch.equal(net(TOKENS), NEW_SCORES)
    assert net.head.weight is net.embed.weight


@torch.no_grad()
def test_weights_that_are_kept_in_memory_are_written_over_there(tmp_path: Path) -> None:
    net = make_net()
    before = dict(net.named_parameters())
    addresses = {name: parameter.data_ptr() for name, parameter in before.items()}
    cpu_offload(net, "cpu")
    load_checkpoint_in_model(net, _checkpoint(tmp_path, "safetensors"))
    remove_hook_from_submodules(net)
    for name, parameter in net.named_parameters():
        assert parameter is before[name]
        assert parameter.data_ptr() == addresses[name]
    assert torch.equal(net(TOKENS), NEW_SCORES)


@pytest.mark.parametrize("kind", ["on the disk", "cpu_offload"])
@torch.no_grad()
def test_a_dtype_is_that_of_the_next_forward(kind: str, tmp_path: Path) -> None:
    net = SPREAD[kind](tmp_path)
    load_checkpoint_in_model(net, _checkpoint(tmp_path, "safetensors"), dtype="bfloat16")
    assert torch.equal(net(TOKENS), _other().bfloat16()(TOKENS))


@torch.no_grad()
def test_a_part_that_a_checkpoint_lacks_stays_on_the_disk_with_its_values(tmp_path: Path) -> None:
    net = _loaded(tmp_path, ALL_DISK)
    save_file({"blocks.0.0.weight": NEW["blocks.0.0.weight"]}, tmp_path / "part.safetensors")
    with pytest.warns(UserWarning, match="missing in the checkpoint"):
        load_checkpoint_in_model(net, tmp_path / "part.safetensors", ALL_DISK)
    with pytest.warns(UserWarning, match="missing in the checkpoint"):
        load_checkpoint_and_dispatch(net, tmp_path / "part.safetensors", ALL_DISK)
    expected = make_net()
    expected.blocks[0][0].weight.copy_(NEW["blocks.0.0.weight"])
    assert torch.equal(net(TOKENS), expected(TOKENS))


@torch.no_grad()
def test_a_load_that_fails_after_hooks_were_told_leaves_them_with_the_former_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise CheckpointError("in the middle")

    net = SPREAD["on the disk"](tmp_path)
    monkeypatch.setattr("trainwright.bigmodels.dispatch.loading.dispatch_model", fail)
    with pytest.raises(CheckpointError, match="in the middle"):
        load_checkpoint_and_dispatch(net, _checkpoint(tmp_path, "safetensors"), ALL_DISK, dtype="bfloat16")
    assert torch.equal(net(TOKENS), OLD_SCORES)


@pytest.mark.parametrize("places", [{"": "cpu"}, ALL_DISK], ids=["cpu", "disk"])
@torch.no_grad()
def test_floating_buffers_take_the_dtype_and_others_do_not(places: dict[str, str], tmp_path: Path) -> None:
    """As in Accelerate: a module that multiplies weights and buffers computes in one dtype."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.register_buffer("scale", torch.full((4,), 2.0))
            self.register_buffer("count", torch.tensor(3))
            self.register_buffer("table", torch.ones(4), persistent=False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.inner(inputs * self.scale)
            return scores

    model = nn.Sequential(Scaled(), Scaled())
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    load_checkpoint_and_dispatch(
        model, tmp_path / "m.safetensors", places, dtype=torch.bfloat16, keep_in_fp32_modules=["1"]
    )
    assert model[0](torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert model[0].scale.dtype is torch.bfloat16
    assert (model[0].count.dtype, model[0].table.dtype) == (torch.int64, torch.float32)
    assert model[1].scale.dtype is torch.float32
