from __future__ import annotations

import warnings
from typing import Any

import pytest

from trainwright import ConfigurationError, DDPStrategy, Trainer
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.planning.setting_sources import planned_settings


def _settings(**arguments: Any) -> Settings:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(**quiet, **arguments).settings


def test_variables_are_the_defaults_of_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_DYNAMO_BACKEND": "EAGER",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    }.items():
        monkeypatch.setenv(name, value)
    found = _settings()
    settings = found.selection.settings
    assert type(found.selection.strategy).__name__ == "FSDPStrategy"
    assert settings.precision.name == "bf16-mixed"
    assert (settings.accumulate_grad_batches, found.accumulate_grad_batches) == (3, 3)
    assert (settings.device_type, settings.compile_options) == ("cpu", {"backend": "eager"})


@pytest.mark.parametrize(
    ("variables", "arguments", "text"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {"precision": "32-true"}, "is overridden by precision='32-true'"),
        ({"ACCELERATE_USE_FSDP": "true"}, {"strategy": DDPStrategy()}, "is overridden by strategy=DDPStrategy()"),
        ({"FSDP_VERSION": "2"}, {}, "not used, because ACCELERATE_USE_FSDP is not set"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSIONS": "2"}, {}, "Did you mean 'FSDP_VERSION'?"),
        ({"ACCELERATE_LAUNCH_DELAY": "2"}, {}, "ACCELERATE_LAUNCH_DELAY=2 is not read by Trainwright"),
    ],
)
def test_what_is_not_used_is_told(
    variables: dict[str, str], arguments: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _settings(**arguments)
    assert len(seen) == 1
    assert text in str(seen[0].message)
    assert seen[0].filename == __file__


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_an_argument_equal_to_its_variable_overrides_nothing(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert _settings(precision=precision).selection.settings.precision.name == "bf16-mixed"  # warnings are errors


def test_a_value_that_cannot_be_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp61")
    with pytest.raises(ConfigurationError, match="expected 'no', 'fp16', 'bf16' or 'fp8'"):
        _settings()


def test_a_step_keeps_its_size_after_machines_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_ALL_PROCESSES", "3")
    settings = _settings(accumulate_grad_batches=2)
    assert settings.accumulate_grad_batches == 6
    assert planned_settings(settings)["accumulate_grad_batches"].source == "TRAINWRIGHT_ALL_PROCESSES"
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="6 micro-batches of a step cannot be divided"):
        _settings(accumulate_grad_batches=2)
