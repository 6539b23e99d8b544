"""Environment variables of Accelerate's launcher."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from trainwright import Accelerator, GradientAccumulationPlugin, PartialState
from trainwright.core.errors import ConfigurationError, TrainwrightWarning

pytestmark = pytest.mark.usefixtures("fresh_state")


def _warnings_of(**arguments: Any) -> tuple[Accelerator, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator = Accelerator(cpu=True, **arguments)
    found = [str(one.message) for one in caught if one.category is TrainwrightWarning]
    return accelerator, [text for text in found if "has an Accelerator with" not in text]  # those of other tests


def test_the_launcher_sets_precision_and_accumulation_unless_the_script_does(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("ACCELERATE_USE_IPEX", "true", "torch includes its optimizations"),
        ("ACCELERATE_TORCH_DEVICE", "cuda:1", "CUDA_VISIBLE_DEVICES"),
        ("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", "DATA_PARALLEL", "submit the job with `trainwright launch`"),
        ("ACCELERATE_SOMETHING_NEW", "x", "not read"),
        ("MIXED_PRECISION", "fp16", "Set ACCELERATE_MIXED_PRECISION=fp16"),
        ("XLA_USE_BF16", "1", "XLAStrategy(downcast_bf16=True)"),
    ],
)
def test_unsupported_variables_are_warnings(name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    _, found = _warnings_of()
    assert len(found) == 1
    assert found[0].startswith(f"{name}={value}")
    assert text in found[0]
    PartialState._reset_state()
    assert _warnings_of()[1] == found  # in each script, not once for a process


def test_a_variable_with_a_wrong_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto ")
    with pytest.raises(ConfigurationError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS='auto '"):
        Accelerator(cpu=True)
