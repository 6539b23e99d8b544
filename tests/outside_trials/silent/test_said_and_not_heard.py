"""Attributes and variables that say something are honoured, or warned of by their names."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import Accelerator, AcceleratorState, GradientAccumulationPlugin, PartialState
from trainwright.bigmodels.dispatch.model_hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from trainwright.core.errors import ConfigurationError, TrainwrightWarning

pytestmark = pytest.mark.usefixtures("fresh_state")


class Records(nn.Module):
    """Returns whether gradients are recorded in its forward, as a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one or zero."""
        return x * int(torch.is_grad_enabled())


class Silent(ModelHook):
    """A hook whose class says no."""

    no_grad = True


class After(ModelHook):
    """Notes whether gradients are recorded after the forward."""

    def __init__(self) -> None:
        self.recorded: list[bool] = []

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Note it."""
        self.recorded.append(torch.is_grad_enabled())
        return output


def _recorded(module: nn.Module) -> bool:
    found = bool(module(torch.ones(())))
    assert torch.is_grad_enabled()
    return found


def test_no_grad_may_be_assigned_after_the_hook_was_added() -> None:
    module, hook = Records(), After()
    add_hook_to_module(module, hook)
    assert _recorded(module)
    hook.no_grad = True
    assert not _recorded(module)
    hook.no_grad = False
    assert _recorded(module)
    assert hook.recorded == [True] * 3  # post_forward runs as the caller does
    hook.no_grad = True
    other = copy.deepcopy(module)
    other._hf_hook.no_grad = False  # type: ignore[union-attr]
    assert (_recorded(module), _recorded(other)) == (False, True)
    other._hf_hook.no_grad = True  # type: ignore[union-attr]
    assert not _recorded(other)
    remove_hook_from_module(module)
    hook.no_grad = True
    assert _recorded(module)
    assert not module._forward_pre_hooks
    assert not module._forward_hooks


def test_no_grad_of_a_class_and_of_hooks_in_a_sequence_counts() -> None:
    module, first, second = Records(), ModelHook(), Silent()
    assert (ModelHook.no_grad, Silent.no_grad, first.no_grad, second.no_grad) == (False, True, False, True)
    add_hook_to_module(module, first)
    add_hook_to_module(module, second, append=True)
    assert not _recorded(module)
    second.no_grad = False
    assert _recorded(module)
    first.no_grad = True
    assert not _recorded(module)
    sequence = module._hf_hook
    assert isinstance(sequence, SequentialHook)
    sequence.no_grad = False
    assert _recorded(module)


def _warnings_of(**arguments: Any) -> tuple[Accelerator, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator = Accelerator(cpu=True, **arguments)
    found = [str(one.message) for one in caught if one.category is TrainwrightWarning]
    return accelerator, [text for text in found if "has an Accelerator with" not in text]  # those of other tests


def test_the_launcher_s_precision_and_steps_count_where_the_script_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    accelerator, found = _warnings_of()
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps, found) == ("bf16", 4, [])
    for arguments in (
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_plugin": GradientAccumulationPlugin(2)},
    ):
        accelerator, found = _warnings_of(mixed_precision="no", **arguments)
        assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("no", 2)
        assert sorted(text.split("=")[0] for text in found) == [
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            "ACCELERATE_MIXED_PRECISION",
        ]
    accelerator, found = _warnings_of(mixed_precision="bf16", gradient_accumulation_steps=4)
    assert found == []


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("ACCELERATE_USE_IPEX", "true", "its work is in torch"),
        ("ACCELERATE_TORCH_DEVICE", "cuda:1", "CUDA_VISIBLE_DEVICES"),
        ("ACCELERATE_SOMETHING_NEW", "x", "not read"),
    ],
)
def test_variables_that_are_not_served_are_warned_of_by_name(
    name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    _, found = _warnings_of()
    assert len(found) == 1
    assert found[0].startswith(f"{name}={value}")
    assert text in found[0]
    PartialState._reset_state()
    assert _warnings_of()[1] == found  # in each script, not once for a process


def test_what_a_launcher_sets_by_default_is_not_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ACCELERATE_USE_CPU": "False",
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        "ACCELERATE_DEBUG_MODE": "true",
        "ACCELERATE_USE_FSDP": "false",
    }.items():
        monkeypatch.setenv(name, value)
    accelerator, found = _warnings_of(gradient_accumulation_steps=4, mixed_precision="bf16")
    assert found == []
    assert (accelerator.gradient_accumulation_steps, accelerator.mixed_precision) == (4, "bf16")


def test_a_variable_with_a_wrong_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto ")
    with pytest.raises(ConfigurationError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS='auto '"):
        Accelerator(cpu=True)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp61")
    with pytest.raises(ConfigurationError, match="ACCELERATE_MIXED_PRECISION='fp61'"):
        Accelerator(cpu=True)


def test_the_cpu_is_used_where_the_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setattr("trainwright.accelerator.accelerator.AcceleratorState", _Cpu)
    with pytest.raises(_Asked, match="True"):
        Accelerator()


class _Asked(Exception):
    pass


class _Cpu(AcceleratorState):
    def __init__(self, cpu: bool = False, **kwargs: object) -> None:
        raise _Asked(str(cpu))
