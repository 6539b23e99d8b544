"""Accelerate's pages on DeepSpeed, block by block: the same calls in the same order, on small models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from trainwright import (
    Accelerator,
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
)
from trainwright.core.errors import ConfigurationError

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
_ROWS, _STEPS, _RANKS = 2, 4, 2
_RATE = 0.05


class Output(dict[str, torch.Tensor]):
    """The outputs of a model, as attributes too."""

    def __getattr__(self, name: str) -> torch.Tensor:
        return self[name]


class Model(nn.Module):
    """A model with the interface of transformers' models."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=8)
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Output:
        logits = self.layers(inputs)
        return Output(loss=functional.mse_loss(logits, labels), logits=logits)


def _samples() -> list[dict[str, torch.Tensor]]:
    inputs = torch.randn(_ROWS * _RANKS * _STEPS, 4, generator=torch.Generator().manual_seed(1))
    return [{"inputs": row, "labels": row.sum(0, keepdim=True).sin()} for row in inputs]


def _loader() -> DataLoader[Any]:
    samples: Any = _samples()
    return DataLoader(samples, batch_size=_ROWS)


# "DeepSpeed"

_OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
_SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto",
    },
}  # fmt: skip
_ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_gather_16bit_weights_on_model_save": "auto",
}


def _config(**entries: Any) -> dict[str, Any]:
    return {
        "zero_optimization": _ZERO3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
        **entries,
    }


def _refused() -> list[str]:
    found = []
    for case in ("no hidden_size", "another batch size"):
        config = _config(optimizer=_OPTIMIZER)
        if case == "another batch size":
            config["train_micro_batch_size_per_gpu"] = 3
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model: Any = Model(1)
        optimizer: Any = DummyOptim(model.parameters(), lr=_RATE)
        if case == "no hidden_size":
            del model.config
        with pytest.raises(ConfigurationError) as caught:
            accelerator.prepare(model, optimizer, _loader())
        found.append(str(caught.value))
        accelerator.end_training()
    return found


def test_what_the_configuration_cannot_be_is_an_error() -> None:
    for hidden_size, batch_size in run_distributed(_refused, _RANKS, init=False, timeout=240):
        assert '"auto" for zero_optimization.reduce_bucket_size' in hidden_size
        assert "train_micro_batch_size_per_gpu=3, which differs from the training loader's batch_size=2" in batch_size


# "auto" after prepare


def _filled() -> dict[str, Any]:
    config = _config(optimizer=_OPTIMIZER, scheduler=_SCHEDULER, bf16={"enabled": "auto"})
    config |= {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2, mixed_precision="bf16")
    assert (plugin.is_auto("optimizer.params.lr"), plugin.get_value("bf16.enabled")) == (True, True)
    found = []
    for rate, hidden in ((0.05, 8), (0.02, 16)):
        model: Any = Model(1)
        model.config.hidden_size = hidden
        optimizer = DummyOptim(model.parameters(), lr=rate)
        schedule = DummyScheduler(optimizer, total_num_steps=6, warmup_num_steps=2)
        accelerator.prepare(_loader(), model, optimizer, schedule)
        found.append(json.loads(json.dumps(plugin.deepspeed_config)))
        accelerator.prepare(_loader())
        assert plugin.config is plugin.deepspeed_config
        assert plugin.config == found[-1]
        accelerator.free_memory()
    accelerator.end_training()
    return {"first": found[0], "second": found[1]}


def test_the_plugin_holds_the_values_of_auto_after_prepare() -> None:
    found, _ = run_distributed(_filled, _RANKS, init=False, timeout=240)
    for config, rate, hidden in ((found["first"], 0.05, 8), (found["second"], 0.02, 16)):
        assert '"auto"' not in json.dumps(config)
        assert config["optimizer"]["params"]["lr"] == config["scheduler"]["params"]["warmup_max_lr"] == rate
        zero = config["zero_optimization"]
        assert (zero["reduce_bucket_size"], zero["stage3_param_persistence_threshold"]) == (hidden**2, 10 * hidden)
        assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (8, 2)
        assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (2, 0)
        assert (config["bf16"], config["fp16"]) == ({"enabled": True}, {"enabled": False})


# Models of transformers are built in shards


def _llama() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=16))


def _is_sharded() -> bool:
    return all(hasattr(parameter, "ds_id") for parameter in _llama().parameters())


def _built(folder: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    teacher_config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    plugins = {
        "student": DeepSpeedPlugin(zero_stage=2),
        "teacher": DeepSpeedPlugin(hf_ds_config=teacher_config, zero3_init_flag=True),
        "whole": DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False),
    }
    accelerator = Accelerator(deepspeed_plugins=plugins)
    assert not _is_sharded()
    torch.manual_seed(0)
    student = _llama()
    if accelerator.is_main_process:
        student.save_pretrained(folder)
    accelerator.wait_for_everyone()
    words = torch.arange(8).view(1, 8)
    expected = student(input_ids=words).logits.detach()
    accelerator.state.select_deepspeed_plugin("teacher")
    assert _is_sharded()
    teacher: Any = AutoModelForCausalLM.from_pretrained(folder)
    held = sum(parameter.ds_tensor.numel() for parameter in teacher.parameters())
    total = sum(parameter.ds_numel for parameter in teacher.parameters())
    teacher = accelerator.prepare(teacher)
    with torch.no_grad():
        logits = teacher(input_ids=words).logits
    plugin = plugins["teacher"]
    with plugin.zero3_init_context_manager(enable=False):
        assert not plugin.is_zero3_init_enabled()
        assert not _is_sharded()
    assert plugin.is_zero3_init_enabled()
    assert _is_sharded()
    for name in ("student", "whole"):
        accelerator.state.select_deepspeed_plugin(name)
        assert not _is_sharded()
    accelerator.state.select_deepspeed_plugin("teacher")
    accelerator.end_training()
    assert not _is_sharded()
    return {"expected": expected, "logits": logits, "share": held / total}


def test_transformers_builds_the_models_of_a_stage_3_plugin_in_shards(tmp_path: Path) -> None:
    for found in run_distributed(_built, _RANKS, str(tmp_path), init=False, timeout=240):
        torch.testing.assert_close(found["logits"], found["expected"])
        assert found["share"] < 0.6
