"""Weights that no hook brings are named before anything is computed with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from trainwright import ConfigurationError, cpu_offload, disk_offload, dispatch_model, remove_hook_from_submodules

INPUTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))

OFFLOADS: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "cpu_offload": lambda model, folder: cpu_offload(model, "cpu"),
    "disk_offload": lambda model, folder: disk_offload(model, folder, "cpu"),
    "dispatch_model": lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder),
}
offloads = pytest.mark.parametrize("offload", OFFLOADS.values(), ids=list(OFFLOADS))


class Adapter(nn.Module):
    """A layer and a narrow way beside it, moved to where the layer's weights seem to be."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(4, 2, bias=False).to(base.weight.device)
        self.up = nn.Linear(2, 4, bias=False).to(base.weight.device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(inputs) + self.up(self.down(inputs))
        return result


class Block(nn.Module):
    """A layer in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(inputs)
        return result


def _with_adapter(model: nn.Sequential) -> nn.Sequential:
    block = model[0]
    assert isinstance(block, Block)
    assert isinstance(block.layer, nn.Linear)
    block.layer = Adapter(block.layer)
    return model


@offloads
def test_an_adapter_that_is_put_into_an_offloaded_model_is_refused_at_the_first_forward(
    offload: Callable[[nn.Module, Path], nn.Module], tmp_path: Path
) -> None:
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    offload(model, tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"2 weights in .*'0\.layer\.down\.weight' first.*before dispatch_model"
    ):
        _with_adapter(model)(INPUTS)
    with pytest.raises(ConfigurationError, match=r"'layer\.down\.weight' first"):
        model[0](INPUTS)  # as wrappers that call parts of a model do


@offloads
def test_an_adapter_that_is_there_first_is_offloaded_with_its_layer(
    offload: Callable[[nn.Module, Path], nn.Module], tmp_path: Path
) -> None:
    model = _with_adapter(nn.Sequential(Block(), nn.Linear(4, 4)))
    wanted = model(INPUTS)
    assert torch.equal(offload(model, tmp_path)(INPUTS), wanted)


@offloads
def test_looking_for_such_weights_leaves_nothing_behind(
    offload: Callable[[nn.Module, Path], nn.Module], tmp_path: Path
) -> None:
    before = nn.Sequential(Block(), nn.Linear(4, 4))
    model = offload(copy.deepcopy(before), tmp_path)
    looking = [len(module._forward_pre_hooks) for module in model.modules()]
    model(INPUTS)
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == sum(looking) - 2
    assert torch.equal(copy.deepcopy(model)(INPUTS), before(INPUTS))
    again = offload(copy.deepcopy(before), tmp_path / "again")
    remove_hook_from_submodules(again)
    assert not any(module._forward_pre_hooks for module in again.modules())


class User(nn.Module):
    """A module that uses weights which lie in a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        weights = [torch.randn(4, 4), torch.randn(4, 4)]
        self.held: nn.Module = nn.ParameterList(weights)
        if kind == "dict":
            self.held = nn.ParameterDict({str(number): weight for number, weight in enumerate(weights)})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(inputs)
        for weight in self.held.parameters():
            hidden = hidden @ weight
        return hidden


@offloads
@pytest.mark.parametrize("kind", ["list", "dict"])
def test_a_container_of_weights_that_is_offloaded_alone_is_refused_with_the_way_out(
    kind: str, offload: Callable[[nn.Module, Path], nn.Module], tmp_path: Path
) -> None:
    model = nn.Sequential(User(kind), nn.Linear(4, 4))
    wanted = model(INPUTS)
    offloaded = offload(copy.deepcopy(model), tmp_path / "a")
    with pytest.raises(ConfigurationError, match=r"'0' of Parameter\w+ is offloaded.*preload_module_classes"):
        offloaded(INPUTS)
    whole = dispatch_model(model, {"": "disk"}, offload_dir=tmp_path / "b", preload_module_classes=["User"])
    assert torch.equal(whole(INPUTS), wanted)
