"""Weights that a module uses without calling their owner, or that no hook brings, come along or are named."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from trainwright import ConfigurationError, cpu_offload, disk_offload, dispatch_model

TOKENS = torch.tensor([[1, 4, 2], [0, 5, 5]])


class TiedByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.middle = nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.middle(self.embed(tokens)) @ self.embed.weight.T


OFFLOADS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "cpu_offload": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "disk_offload": lambda model, folder: disk_offload(model, folder, execution_device="cpu"),
    "dispatch_model": lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
}


@pytest.mark.parametrize("way", OFFLOADS)
def test_a_weight_that_is_used_while_it_is_away_is_named(way: str, tmp_path: Path) -> None:
    model = OFFLOADS[way](TiedByHand(), tmp_path)
    for _ in range(2):  # not at the first forward alone
        with torch.no_grad(), pytest.raises(ConfigurationError, match=r"'weight' of Embedding is offloaded.*preload"):
            model(TOKENS)


def test_it_comes_with_the_module_that_uses_it_on_request(tmp_path: Path) -> None:
    model = TiedByHand()
    wanted = model(TOKENS)
    disk_offload(model, tmp_path, execution_device="cpu", preload_module_classes=["TiedByHand"])
    assert torch.equal(model(TOKENS), wanted)


INPUTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))


class Adapter(nn.Module):
    """A layer and a narrow way beside it, moved to where the layer's weights seem to be."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(4, 2, bias=False).to(base.weight.device)
        self.up = nn.Linear(2, 4, bias=False).to(base.weight.device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


class Block(nn.Module):
    """A layer in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)


def _with_adapter(model: nn.Sequential) -> nn.Sequential:
    model[0].layer = Adapter(model[0].layer)
    return model


@pytest.mark.parametrize("way", OFFLOADS)
def test_an_adapter_that_is_put_into_an_offloaded_model_is_refused_at_the_first_forward(
    way: str, tmp_path: Path
) -> None:
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    OFFLOADS[way](model, tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"2 weights in .*'0\.layer\.down\.weight' first.*before dispatch_model"
    ):
        _with_adapter(model)(INPUTS)
    with pytest.raises(ConfigurationError, match=r"'layer\.down\.weight' first"):
        model[0](INPUTS)  # as wrappers that call parts of a model do


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
