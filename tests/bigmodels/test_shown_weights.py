"""What a module shows of a weight that is away is the truth: how it comes back, and what becomes of its gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.bigmodels.nets import TOKENS, make_net
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


def _leaf_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Run forward and backward, and return the gradients that the first layer's own tensors keep, seen in its use."""
    used: list[torch.Tensor] = []
    handle = model[0].register_forward_pre_hook(lambda module, args: used.extend(module.parameters()))  # type: ignore[index,operator,union-attr]
    model(_inputs()).sum().backward()
    handle.remove()
    return [weight.grad for weight in used if weight.grad is not None]


def test_gradients_of_weights_that_are_away_are_kept_nowhere(offload: Offload) -> None:
    net = offload(_net())
    for _ in range(2):
        assert _leaf_gradients(net) == []
    assert net[0].weight.grad is None
    remove_hook_from_submodules(net)
    assert net[0].weight.grad is None


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


def test_weights_that_are_unfrozen_while_they_are_away_are_recorded_in_the_forward(offload: Offload) -> None:
    net = offload(_net().requires_grad_(False))
    with torch.no_grad():
        net(_inputs())
    net.requires_grad_(True)
    assert net(_inputs().detach()).requires_grad
    assert _leaf_gradients(net) == []
    remove_hook_from_submodules(net)
    assert net[0].weight.requires_grad
    assert net[0].weight.grad is None


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, lambda net: net.to(torch.bfloat16)])
def test_a_model_whose_weights_are_away_can_be_converted(
    convert: Callable[[nn.Module], nn.Module], offload: Offload
) -> None:
    plain, net = convert(_net()), offload(_net())
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


def test_a_model_whose_weights_are_away_is_not_moved(offload: Offload) -> None:
    net = offload(_net())
    expected = net(_inputs())
    for move in (lambda: net.to("cpu"), lambda: net.to(torch.ones(1)), lambda: net.to_empty(device="cpu"), net.cuda):
        with pytest.raises(ConfigurationError, match="offloaded"):
            move()
    assert torch.equal(net(_inputs()), expected)
    remove_hook_from_submodules(net)
    net.to("cpu")


def test_a_weight_that_another_module_keeps_in_memory_gets_its_whole_gradient(tmp_path: Path) -> None:
    plain = make_net()
    plain(TOKENS).square().sum().backward()
    net = make_net()
    weight = net.embed.weight
    dispatch_model(net, {"embed": "cpu", "blocks": "cpu", "head": "disk"}, offload_dir=tmp_path)
    for _ in range(2):
        weight.grad = None
        net(TOKENS).square().sum().backward()
        assert plain.embed.weight.grad is not None
        assert weight.grad is not None
        assert torch.equal(weight.grad, plain.embed.weight.grad)


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


def test_values_that_somebody_puts_into_the_module_are_used(offload: Offload) -> None:
    net, plain = offload(_net()), _net()
    before = net(_inputs())
    other = {"0.weight": torch.ones(4, 4, requires_grad=True), "2.bias": torch.ones(4, requires_grad=True)}
    output = functional_call(net, other, (_inputs(),))
    assert torch.equal(output, functional_call(plain, other, (_inputs(),)))
    output.sum().backward()
    assert other["0.weight"].grad is not None
    assert torch.equal(net(_inputs()), before)


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
