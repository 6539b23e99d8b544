"""Hooks around a module's forward: what they see, in which order, and that nothing of them stays behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.bigmodels.nets import TOKENS, make_net
from trainwright.bigmodels.dispatch.align import AlignDevicesHook, align_module_device
from trainwright.bigmodels.dispatch.attach import attach_execution_device_hook
from trainwright.bigmodels.dispatch.dispatch import cpu_offload, cpu_offload_with_hook
from trainwright.bigmodels.dispatch.model_hooks import (
    ModelHook,
    add_hook_to_module,
    attach_layerwise_casting_hooks,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from trainwright.bigmodels.weights.slots import move_tensor


class Recorder(ModelHook):
    """Adds to the input, multiplies the output, and writes down what is called and whether gradients are recorded."""

    def __init__(self, name: str, log: list[str], add: float = 0.0, times: float = 1.0) -> None:
        self.name, self.log, self.add, self.times = name, log, add, times
        self.recorded: list[bool] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.log.append(f"{self.name} init")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.log.append(f"{self.name} pre")
        return (args[0] + self.add, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.log.append(f"{self.name} post")
        self.recorded.append(torch.is_grad_enabled())
        return output * self.times

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.log.append(f"{self.name} detach")
        return module


def test_a_hook_changes_what_goes_in_and_out_until_a_second_one_takes_its_place() -> None:
    layer, inputs, log = nn.Linear(3, 3), torch.randn(2, 3), list[str]()
    expected = layer(inputs + 1) * 2
    add_hook_to_module(layer, Recorder("a", log, add=1.0, times=2.0))
    assert torch.equal(layer(inputs), expected)
    add_hook_to_module(layer, Recorder("b", log))
    layer(inputs)
    assert log == ["a init", "a pre", "a post", "a detach", "b init", "b pre", "b post"]


def test_no_grad_can_be_changed_and_applies_to_sequences_of_hooks() -> None:
    class WithoutGradients(ModelHook):
        no_grad = True

    layer, first, second = nn.Linear(3, 3), Recorder("a", []), WithoutGradients()

    def is_recorded() -> bool:
        found: bool = layer(torch.ones(1, 3)).requires_grad
        assert torch.is_grad_enabled()
        return found

    add_hook_to_module(layer, first)
    assert is_recorded()
    first.no_grad = True
    assert not is_recorded()
    with pytest.raises(TypeError):
        layer(None)
    assert torch.is_grad_enabled()
    assert first.recorded == [True, True]  # post_forward runs as the caller does
    first.no_grad = False
    add_hook_to_module(layer, second, append=True)
    assert not is_recorded()
    second.no_grad = False
    assert is_recorded()
    layer._hf_hook.no_grad = True  # type: ignore[union-attr]
    assert not is_recorded()
    remove_hook_from_module(layer)
    assert is_recorded()


def test_taking_hooks_off_leaves_a_module_as_it_was() -> None:
    net = make_net()
    before = {name: vars(module).keys() for name, module in net.named_modules()}
    parameters = dict(net.named_parameters(remove_duplicate=False))
    cpu_offload(net, "cpu")
    net(TOKENS)
    remove_hook_from_submodules(net)
    assert {name: vars(module).keys() for name, module in net.named_modules()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    after = dict(net.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in parameters.items())


def test_weights_are_away_between_forwards_and_there_during_one() -> None:
    net = make_net()
    expected = net(TOKENS)
    seen = []
    cpu_offload(net, "cpu")
    with pytest.raises(IndexError):
        net(TOKENS + 100)
    net.embed.register_forward_pre_hook(lambda module, args: seen.append(module.weight.device.type))
    assert {parameter.device.type for parameter in net.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in net.buffers()} == {"cpu"}
    assert torch.equal(net(TOKENS), expected)
    assert seen == ["cpu"]
    assert {parameter.device.type for parameter in net.parameters()} == {"meta"}


def test_inputs_follow_the_module_and_the_output_goes_back() -> None:
    layer = nn.Linear(3, 3)
    add_hook_to_module(layer, AlignDevicesHook("meta", io_same_device=True))
    output = layer.to("meta")(torch.ones(2, 3, device="meta"))
    assert output.device.type == "meta"
    hook = AlignDevicesHook("meta", io_same_device=True, skip_keys="cache")
    args, kwargs = hook.pre_forward(layer, torch.ones(2), cache=torch.ones(1), other=[torch.ones(1)])
    assert args[0].is_meta
    assert kwargs["other"][0].is_meta
    assert kwargs["cache"].device.type == "cpu"


def test_a_module_s_own_weights_can_be_brought_for_a_block_of_code() -> None:
    net = make_net()
    expected = net.embed.weight.detach().clone()
    cpu_offload(net, "cpu")
    with align_module_device(net.embed):
        assert torch.equal(net.embed.weight, expected)
        net(TOKENS)
        assert torch.equal(net.embed.weight, expected)
    assert net.embed.weight.is_meta
    with pytest.raises(KeyError), align_module_device(net.embed):
        raise KeyError
    assert net.embed.weight.is_meta


def test_a_pipeline_s_former_model_leaves_when_the_next_one_runs() -> None:
    first, hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    offloaded = []
    hook.hook.init_hook = lambda module: offloaded.append(module) or module  # type: ignore[method-assign,func-returns-value]
    second, second_hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=hook)
    first(torch.zeros(1, 2))
    assert offloaded == []
    second(torch.zeros(1, 2))
    assert offloaded == [first]
    hook.offload()
    assert offloaded == [first, first]
    second_hook.remove()
    second(torch.zeros(1, 2))
    assert offloaded == [first, first]
    moving, _ = cpu_offload_with_hook(nn.Linear(2, 2), "meta")
    assert moving(torch.zeros(1, 2)).is_meta


def test_layerwise_casting_stores_narrow_and_computes_wide() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    expected = nn.Sequential(*copy.deepcopy(list(net)))
    for layer in (expected[0], expected[2]):
        layer.to(torch.bfloat16).to(torch.float32)
    seen = []
    attach_layerwise_casting_hooks(net, torch.bfloat16, torch.float32, skip_modules_classes=(nn.LayerNorm,))
    net[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    assert [next(layer.parameters()).dtype for layer in net] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert torch.equal(net(torch.ones(1, 4)), expected(torch.ones(1, 4)))
    assert seen == [torch.float32]
    assert net[0].weight.dtype is torch.bfloat16
    remove_hook_from_submodules(net)
    torch.testing.assert_close(net[0].weight, expected[0].weight, rtol=0, atol=0)


def test_weights_that_are_not_offloaded_are_moved_and_moved_back() -> None:
    layer = nn.Linear(2, 2)
    with align_module_device(layer):
        assert layer.weight.device.type == "cpu"
    with align_module_device(layer, "cpu"):
        layer.weight.data.zero_()
    assert not layer.weight.any()


def test_execution_hooks_go_on_every_module_with_weights_and_spare_those_that_have_one() -> None:
    net = make_net()
    own = add_hook_to_module(net.embed, ModelHook())._hf_hook
    attach_execution_device_hook(net, "cpu")
    assert net.embed._hf_hook is own
    hooked = {name for name, module in net.named_modules() if "_hf_hook" in vars(module)}
    assert hooked == {name for name, module in net.named_modules() if list(module.parameters())}


def test_a_buffer_is_replaced_only_where_it_is_on_another_device() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2))
    mean = net[0].running_mean
    move_tensor(net, "0.running_mean", mean, torch.device("cpu"))
    assert net[0].running_mean is mean
    move_tensor(net, "0.running_mean", mean, torch.device("meta"))
    assert net[0].running_mean.is_meta
    assert not mean.is_meta
