"""One source makes an engine's configuration; whatever is said twice and differs fails, naming both origins."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from trainwright.core.errors import ConfigurationError
from trainwright.strategies.deepspeed.config import EngineConfig, RunFacts
from trainwright.strategies.deepspeed.options import ZeroOptions
from trainwright.strategies.deepspeed.strategy import DeepSpeedStrategy

ZERO2: dict[str, Any] = {"zero_optimization": {"stage": 2}}


def facts(**others: Any) -> RunFacts:
    """Return what a run of 4 samples × 2 micro-batches × 2 processes says."""
    known: dict[str, Any] = {
        "world_size": 2, "micro_batch_size": 4, "accumulate": 2, "hidden_size": 10, "hyperparameters": None,
        "total_steps": 100, "warmup_steps": 5,
    }  # fmt: skip
    return RunFacts(**{**known, **others})


@pytest.mark.parametrize(
    ("config", "arguments", "said"),
    [
        (ZERO2, {"stage": 3}, ("zero_optimization.stage=2", "DeepSpeedStrategy(stage=3)")),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}},
            {"offload_optimizer": True},
            ("zero_optimization.offload_optimizer.device='none'", "DeepSpeedStrategy(offload_optimizer=True)"),
        ),
    ],
)
def test_a_config_and_an_argument_that_differ_fail_naming_both(
    config: dict[str, Any], arguments: dict[str, Any], said: tuple[str, str]
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        DeepSpeedStrategy(config, **arguments)
    assert all(text in str(raised.value) for text in said)


@pytest.mark.parametrize(
    ("config", "arguments", "said"),
    [
        ({"gradient_accumulation_steps": 4}, {}, ("gradient_accumulation_steps=4", "accumulate_grad_batches=1")),
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, ("gradient_clipping=1.0", "gradient_clip_val=0.5")),
        ({"bf16": {"enabled": True}}, {}, ("bf16.enabled=True", "precision='32-true'")),
        ({"fp16": {"enabled": True}}, {"precision": "bf16-mixed"}, ("fp16.enabled=True", "precision='bf16-mixed'")),
    ],
)
def test_a_config_and_the_trainer_that_differ_fail_naming_both(
    config: dict[str, Any], arguments: dict[str, Any], said: tuple[str, str]
) -> None:
    with pytest.raises(ConfigurationError) as raised:
        quiet_trainer(strategy=DeepSpeedStrategy({**ZERO2, **config}), **arguments)
    assert all(text in str(raised.value) for text in said)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, ("train_micro_batch_size_per_gpu=8", "batch_size=4")),
        ({"train_batch_size": 8}, ("train_batch_size=8", "(=16)")),
    ],
)
def test_a_batch_size_that_is_not_the_loaders_fails_naming_both(config: dict[str, Any], said: tuple[str, str]) -> None:
    source = EngineConfig({**ZERO2, **config}, ZeroOptions())
    with pytest.raises(ConfigurationError) as raised:
        source.resolved(facts())
    assert all(text in str(raised.value) for text in said)


def test_auto_takes_what_arguments_model_and_data_say() -> None:
    config = {
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": "auto", "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": "auto",
            "stage3_max_live_parameters": "auto",
        },
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto",
            },
        },
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    }  # fmt: skip
    trainer = quiet_trainer(
        strategy=DeepSpeedStrategy(config, stage=3, offload_optimizer=True), accumulate_grad_batches=2,
        gradient_clip_val=0.5, precision="bf16-mixed",
    )  # fmt: skip
    values = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}
    found = trainer.strategy.config.resolved(facts(hyperparameters=values))
    assert found["bf16"]["enabled"] is True
    assert not trainer.strategy.autocasts  # the engine computes with weights in bf16
    assert found["fp16"]["enabled"] is False
    assert found["zero_optimization"] == {
        "stage": 3, "offload_optimizer": {"device": "cpu", "nvme_path": "/local_nvme"}, "reduce_bucket_size": 100,
        "stage3_prefetch_bucket_size": 90, "stage3_param_persistence_threshold": 100,
        "stage3_gather_16bit_weights_on_model_save": True, "stage3_max_live_parameters": 10**9,
    }  # fmt: skip
    assert found["optimizer"]["params"] == {**values, "betas": [0.9, 0.99]}
    assert found["scheduler"]["params"] == {
        "warmup_min_lr": 0, "warmup_max_lr": 0.1, "warmup_num_steps": 5, "total_num_steps": 100,
    }  # fmt: skip
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (16, 4)
    assert found["gradient_accumulation_steps"] == 2


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}, "hidden_size"),
        ({**ZERO2, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "DummyOptim"),
        ({**ZERO2, "scheduler": {"params": {"total_num_steps": "auto"}}}, "scheduler.params.total_num_steps"),
        ({**ZERO2, "wall_clock_breakdown": "auto"}, "wall_clock_breakdown"),
    ],
)
def test_auto_without_anything_to_take_says_what_is_missing(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        EngineConfig(config, ZeroOptions()).resolved(facts(hidden_size=None, total_steps=float("inf")))
