"""What may be said to DeepSpeed, and what is refused before anything is touched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from trainwright.core.errors import ConfigurationError
from trainwright.strategies import STRATEGIES
from trainwright.strategies.deepspeed.config import for_building, for_engine
from trainwright.strategies.deepspeed.placeholders import DummyOptim, DummyScheduler
from trainwright.strategies.deepspeed.strategy import DeepSpeedStrategy
from trainwright.strategies.deepspeed.zero_model import connect_schedule


def test_defaults_are_lightnings() -> None:
    strategy = DeepSpeedStrategy()
    assert strategy.stage == 2
    assert strategy.config.content == {
        "zero_optimization": {
            "stage": 2, "sub_group_size": 10**12, "contiguous_gradients": True, "overlap_comm": True,
            "allgather_partitions": True, "reduce_scatter": True, "allgather_bucket_size": 200_000_000,
            "reduce_bucket_size": 200_000_000,
        },
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "stage", "optimizer", "parameters"),
    [("deepspeed_stage_1_offload", 1, "cpu", "none"), ("deepspeed_stage_3_offload_nvme", 3, "nvme", "nvme")],
)
def test_names_mean_what_they_say(name: str, stage: int, optimizer: str, parameters: str) -> None:
    config = STRATEGIES.get(name)().config
    found = (config.stage, config.offload("offload_optimizer"), config.offload("offload_param"))
    assert found == (stage, optimizer, parameters)


def test_an_engine_gets_no_groups_and_no_clipping() -> None:
    config = for_engine({"train_batch_size": 16, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0})
    assert config == {"steps_per_print": None, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}


def test_a_model_is_built_without_what_is_still_open() -> None:
    config = for_building({"train_batch_size": "auto", "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}})
    assert config["zero_optimization"] == {"stage": 3}
    assert config["train_micro_batch_size_per_gpu"] == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"stage": 4}, "write 0, 1, 2 or 3"),
        ({"stage": 2, "zero_optimization": False}, "contradict"),
        ({"load_full_weights": "auto"}, "every strategy loads full weights"),
        ({"offload_optimizer_device": "disk"}, "'cpu' or 'nvme'"),
        ({"stage": 2, "offload_optimizer": True, "offload_optimizer_device": "nvme"}, "only at stage 3. Use stage=3"),
        ({"stage": 2, "offload_parameters": True}, "only at stage 3. Use stage=3"),
        ({"stage": 0, "offload_optimizer": True}, "Use stage=1, 2 or 3"),
        ({"config": "/nowhere/zero.json"}, "cannot be read"),
    ],
)
def test_what_there_is_not_is_refused_at_construction(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        DeepSpeedStrategy(**arguments)


@pytest.mark.parametrize(
    ("config", "arguments", "complaint"),
    [
        ({}, {"precision": "16-mixed"}, "no float16 on the CPU. Use 'bf16-mixed'"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, {}, "needs CUDA"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, {}, "does not divide"),
        ({"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}, {}, "Use stage=2"),
        ({"zero_optimization": {"stage": 1}}, {"compile": True}, "compile="),
        ({"torch_autocast": {"enabled": True}, "zero_optimization": {"stage": 1}}, {}, "bf16-mixed"),
    ],
)
def test_what_this_machine_or_engine_cannot_do_is_refused_by_the_trainer(
    config: dict[str, Any], arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        quiet_trainer(strategy=DeepSpeedStrategy(config or None), **arguments)


def test_accelerates_names_are_understood() -> None:
    strategy = DeepSpeedStrategy.from_config(
        {
            "zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none",
            "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "zero3_init_flag": True,
            "zero3_save_16bit_model": True, "deepspeed_moe_layer_cls_names": "Experts, Router",
        }
    )  # fmt: skip
    assert strategy.stage == 3
    assert strategy.config.offload("offload_optimizer") == "cpu"
    assert strategy.config.clipping == 1.0
    assert strategy.options.moe_leaf_modules == ("Experts", "Router")
    quiet_trainer(strategy=strategy, accumulate_grad_batches=2, gradient_clip_val=1.0)
    with pytest.raises(ConfigurationError, match="gradient_accumulation_steps=2"):
        quiet_trainer(strategy=strategy)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"deepspeed_config_file": {"gradient_clipping": 2}, "gradient_clipping": 1.0}, "differs from 2 in the"),
        ({"offload_param_nvme_path": "/a", "offload_optimizer_nvme_path": "/b"}, "differ"),
    ],
)
def test_other_names_say_where_they_belong(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        DeepSpeedStrategy.from_config(config)


def test_stand_ins_say_what_they_stand_for() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = DummyOptim([{"params": [weight], "weight_decay": 0.1}], lr=0.5)
    assert optimizer.given_groups == [{"params": [weight], "weight_decay": 0.1}]
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(ConfigurationError, match="DeepSpeed's configuration"):
        optimizer.step()
    with pytest.raises(ConfigurationError, match="DeepSpeed's configuration"):
        DummyScheduler(optimizer).step()


def _take(scheduler: Any) -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}
    run: Any = SimpleNamespace(lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler, interval="epoch")])
    connect_schedule(None, None, run, DeepSpeedStrategy(config=config).config.origin)


def test_a_torch_schedule_over_a_torch_optimizer_is_accepted() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    _take(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5))
    with pytest.raises(ConfigurationError, match="needs a 'scheduler'"):
        _take(DummyScheduler(optimizer))


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    for text, complaint in (("{", "not valid JSON"), ("[]", "Write a JSON object")):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=complaint):
            DeepSpeedStrategy(path)
