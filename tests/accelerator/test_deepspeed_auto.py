"""A DeepSpeed configuration with "auto" on two ranks: what prepare fills in, and what it cannot."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from trainwright import Accelerator, DeepSpeedPlugin, DummyOptim, DummyScheduler

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _model(**config: int) -> Any:
    model: Any = nn.Linear(4, 1)
    model.config = SimpleNamespace(**config)
    return model


def _loader() -> DataLoader[Any]:
    return DataLoader(torch.ones(16, 4), batch_size=2)  # type: ignore[arg-type]


def _config(**entries: Any) -> dict[str, Any]:
    auto = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    schedule = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    return {
        "zero_optimization": {"stage": 3, **dict.fromkeys(auto, "auto")},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(schedule, "auto")},
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        **entries,
    }


def _filled() -> list[dict[str, Any]]:
    plugin = DeepSpeedPlugin(hf_ds_config=_config())
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2, mixed_precision="bf16")
    assert (plugin.is_auto("optimizer.params.lr"), plugin.get_value("bf16.enabled")) == (True, True)
    found = []
    for rate, hidden in ((0.05, 8), (0.02, 16)):
        model = _model(hidden_size=hidden)
        optimizer = DummyOptim(model.parameters(), lr=rate)
        schedule = DummyScheduler(optimizer, total_num_steps=6, warmup_num_steps=2)
        accelerator.prepare(_loader(), model, optimizer, schedule)
        found.append(json.loads(json.dumps(plugin.deepspeed_config)))
        accelerator.prepare(_loader())
        assert plugin.config is plugin.deepspeed_config
        assert plugin.config == found[-1]
        accelerator.free_memory()
    accelerator.end_training()
    return found


def test_the_plugin_holds_the_values_of_auto_after_prepare() -> None:
    found, _ = run_distributed(_filled, 2, init=False, timeout=240)
    for config, rate, hidden in zip(found, (0.05, 0.02), (8, 16), strict=True):
        assert '"auto"' not in json.dumps(config)
        assert config["optimizer"]["params"]["lr"] == config["scheduler"]["params"]["warmup_max_lr"] == rate
        zero = config["zero_optimization"]
        assert (zero["reduce_bucket_size"], zero["stage3_param_persistence_threshold"]) == (hidden**2, 10 * hidden)
        assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (8, 2)
        assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (2, 0)
        assert (config["bf16"], config["fp16"]) == ({"enabled": True}, {"enabled": False})
