"""Weights that a module uses without calling the one that they belong to come along, or are named."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from trainwright import (
    ConfigurationError,
    TaskModule,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
)
from trainwright.strategies.units import find_units

TOKENS = torch.tensor([[1, 4, 2], [0, 5, 5]])


class TiedByHand(nn.Module):
    """A head that uses the embedding's weight, as many language models have it."""

    def __init__(self, use: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight.T) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.middle = nn.Linear(8, 8)
        self.use = use

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.middle(self.embed(tokens)) @ self.use(self.embed.weight)
        return found


def from_file(model: nn.Module, folder: Path) -> nn.Module:
    save_file(model.state_dict(), folder / "model.safetensors")
    with init_empty_weights():
        empty = TiedByHand()
    return load_checkpoint_and_dispatch(empty, folder, device_map={"": "disk"})


OFFLOADS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "cpu_offload": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "disk_offload": lambda model, folder: disk_offload(model, folder, execution_device="cpu"),
    "dispatch_model": lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
    "load_checkpoint_and_dispatch": from_file,
}


@pytest.mark.parametrize("way", OFFLOADS)
def test_a_weight_that_is_used_while_it_is_away_is_named(way: str, tmp_path: Path) -> None:
    model = OFFLOADS[way](TiedByHand(), tmp_path)
    for _ in range(2):  # not at the first forward alone
        with torch.no_grad(), pytest.raises(ConfigurationError, match=r"'weight' of Embedding is offloaded.*preload"):
            model(TOKENS)


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight.t(),
        lambda weight: weight.to(torch.float32).mT,
        lambda weight: weight[:3].transpose(0, 1),
        lambda weight: torch.cat(weight.chunk(2), 0).T * 2.0,
        lambda weight: weight.double().float().T.contiguous(),
    ],
)
def test_so_is_what_was_made_of_it(use: Any) -> None:
    model = cpu_offload(TiedByHand(use), execution_device="cpu")
    with pytest.raises(ConfigurationError, match="'weight' of Embedding is offloaded"):
        model(TOKENS)


def test_so_is_one_that_is_handed_to_another_module() -> None:
    class Positions(nn.Module):
        """Normalizes an embedding's weight itself, as DeBERTa does with relative positions."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 8)
            self.norm = nn.LayerNorm(8)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.norm(self.embed.weight)[tokens]
            return found

    model = cpu_offload(Positions(), execution_device="cpu")
    with pytest.raises(ConfigurationError, match="'weight' of Embedding is offloaded"):
        model(TOKENS)


def test_it_comes_with_the_module_that_uses_it_on_request(tmp_path: Path) -> None:
    model = TiedByHand()
    wanted = model(TOKENS)
    disk_offload(model, tmp_path, execution_device="cpu", preload_module_classes=["TiedByHand"])
    assert torch.equal(model(TOKENS), wanted)


@pytest.mark.parametrize("way", [name for name in OFFLOADS if name != "load_checkpoint_and_dispatch"])
def test_torchs_attention_needs_no_request(way: str, tmp_path: Path) -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True).eval()
    source, target = torch.randn(2, 3, 8), torch.randn(2, 4, 8)
    wanted = model(source, target)
    model = OFFLOADS[way](model, tmp_path)
    for _ in range(2):
        assert torch.equal(model(source, target), wanted)
    assert model.encoder.layers[0].self_attn.out_proj.weight.is_meta


def test_what_is_left_afterwards_are_ordinary_tensors(tmp_path: Path) -> None:
    save_file(TiedByHand().state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        model = TiedByHand()
    load_checkpoint_and_dispatch(model, tmp_path, device_map={"": "disk"})
    assert {type(value) for value in model.state_dict().values()} == {torch.Tensor}
    assert type(nn.Parameter(model.embed.weight.data)) is nn.Parameter
    remove_hook_from_submodules(model)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    again = cpu_offload(TiedByHand(), execution_device="cpu")
    dispatch_model(again, {"": "cpu"})
    assert {type(parameter) for parameter in again.parameters()} == {nn.Parameter}


def test_copies_and_pickles_of_what_stands_there_are_ordinary(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(3)
    disk_offload(model, tmp_path, execution_device="cpu", offload_buffers=True)
    twin = copy.deepcopy(model)
    inputs = torch.randn(4, 3)
    assert torch.equal(twin.eval()(inputs), model.eval()(inputs))
    buffer = io.BytesIO()
    torch.save(model.running_mean, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=True)) is torch.Tensor


def test_a_memory_format_comes_back_from_the_disk(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    strides = model.weight.stride()
    disk_offload(model, tmp_path, execution_device="cpu")
    remove_hook_from_submodules(model)
    assert model.weight.stride() == strides


class Attention(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.last = nn.Linear(8, 8)


@pytest.mark.parametrize("options", [(nn.Linear, None), (None, 60)])
def test_no_unit_is_made_of_a_layer_that_is_never_called(options: Any) -> None:
    task = Attention()
    units = find_units(task, *options)
    assert task.attention.out_proj not in units
    assert task.last in units
