"""What a module shows of a weight that is away is the truth: how it comes back, and what becomes of its gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from trainwright.bigmodels.dispatch.align import AlignDevicesHook, align_module_device
from trainwright.bigmodels.dispatch.attach import attach_align_device_hook
from trainwright.bigmodels.dispatch.dispatch import cpu_offload, disk_offload, dispatch_model
from trainwright.bigmodels.dispatch.model_hooks import add_hook_to_module, remove_hook_from_submodules
from trainwright.bigmodels.weights.weights_map import OffloadedWeightsLoader, offload_state_dict
from trainwright.core.errors import ConfigurationError

Offload = Callable[[nn.Module], nn.Module]


@pytest.fixture(params=["cpu", "cpu by a state dict", "disk", "some on disk"])
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> Offload:
    """Return what offloads a Sequential of layers with weights, in one of the ways."""

    def apply(model: nn.Module) -> nn.Module:
        if request.param == "cpu":
            return cpu_offload(model, "cpu")
        if request.param == "cpu by a state dict":
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            return cpu_offload(model, "cpu", state_dict=state)
        if request.param == "disk":
            return disk_offload(model, tmp_path / "away", "cpu")
        return dispatch_model(model, {"0": "disk", "1": "cpu", "2": "cpu"}, offload_dir=tmp_path / "away")

    return apply


def _net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()


def _inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()


def test_weights_that_are_frozen_while_they_are_away_are_used_and_given_back_frozen(offload: Offload) -> None:
    net = offload(_net())
    net(_inputs())
    net.requires_grad_(False)
    seen: list[bool] = []
    net[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.requires_grad))
    inputs = _inputs()
    net(inputs).sum().backward()
    assert inputs.grad is not None
    assert seen == [False]
    remove_hook_from_submodules(net)
    assert not any(parameter.requires_grad for parameter in net.parameters())


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, lambda net: net.to(torch.bfloat16)])
def test_a_model_whose_weights_are_away_can_be_converted(
    convert: Callable[[nn.Module], nn.Module], offload: Offload
) -> None:
    plain, own = convert(_net()), _net()
    own(_inputs()).sum().backward()
    net = offload(own)
    net(_inputs())
    assert convert(net) is net
    inputs = _inputs().detach().to(plain[0].weight.dtype)  # type: ignore[index]
    for _ in range(2):
        assert torch.equal(net(inputs), plain(inputs))
    remove_hook_from_submodules(net)
    assert {name: tensor.dtype for name, tensor in net.state_dict().items()} == {
        name: tensor.dtype for name, tensor in plain.state_dict().items()
    }
    assert torch.equal(net(inputs), plain(inputs))
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in net.parameters())


def test_a_model_whose_weights_are_away_is_not_moved(offload: Offload) -> None:
    net = offload(_net())
    expected = net(_inputs())
    for move in (lambda: net.to("cpu"), lambda: net.to(torch.ones(1)), lambda: net.to_empty(device="cpu"), net.cuda):
        with pytest.raises(ConfigurationError, match="offloaded"):
            move()
    assert torch.equal(net(_inputs()), expected)
    remove_hook_from_submodules(net)
    net.to("cpu")


def test_an_optimizer_made_before_steps_the_weights_that_the_model_has_after(offload: Offload) -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = list(net.parameters())
    offload(net)
    net(_inputs())
    remove_hook_from_submodules(net)
    assert all(now is then for now, then in zip(net.parameters(), before, strict=True))
    net(_inputs()).sum().backward()
    expected = net[0].weight.detach() - 0.1 * net[0].weight.grad
    optimizer.step()
    torch.testing.assert_close(net[0].weight.detach(), expected)


def test_a_deep_copy_of_weights_on_the_disk_has_values_of_its_own(tmp_path: Path) -> None:
    net = disk_offload(_net(), tmp_path, "cpu", offload_buffers=True)
    twin = copy.deepcopy(net)
    expected = net(_inputs())
    assert torch.equal(twin(_inputs()), expected)
    with align_module_device(twin[0]), torch.no_grad():
        twin[0].weight.zero_()
    assert torch.equal(net(_inputs()), expected)
    with align_module_device(net[2]), torch.no_grad():
        net[2].weight.zero_()
    with align_module_device(twin[2]):
        assert torch.equal(twin[2].weight, _net()[2].weight)


def test_a_deep_copy_of_a_loader_has_values_of_its_own(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.ones(3000), "b": torch.ones(2)})
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert loader["a"][0] == 1.0
    twin = copy.deepcopy(loader)
    twin["a"].zero_()
    assert loader["a"][0] == 1.0
    assert twin.locate("a") is not None


def test_weights_are_offloaded_without_a_device_and_run_where_they_were() -> None:
    layer = nn.Linear(4, 4)
    expected = layer(_inputs())
    add_hook_to_module(layer, AlignDevicesHook(offload=True))
    assert layer.weight.is_meta
    assert torch.equal(layer(_inputs()), expected)
    net, plain = _net(), _net()
    attach_align_device_hook(net, offload=True)
    assert net[0].weight.is_meta
    assert torch.equal(net(_inputs()), plain(_inputs()))
