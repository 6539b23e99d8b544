"""Accelerate's pages on DeepSpeed, block by block: the same calls in the same order, on small models."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from trainwright import (
    Accelerator,
    AcceleratorState,
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    get_active_deepspeed_plugin,
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


def _full(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def _by_hand(
    seed: int, *, rates: list[float], teacher: int | None = None, clip: float | None = None, accumulate: int = 1
) -> dict[str, torch.Tensor]:
    """Train on one device with plain torch, with one learning rate for each step."""
    model, samples = Model(seed), _samples()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01)
    rows = _ROWS * _RANKS * accumulate
    for i, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        here = samples[i * rows % len(samples) :][:rows]
        batch = {name: torch.stack([sample[name] for sample in here]) for name in here[0]}
        output = model(**batch)
        loss = output.loss
        if teacher is not None:
            loss = loss + functional.mse_loss(output.logits, Model(teacher)(**batch).logits.detach())
        loss.backward()
        if clip is not None:
            assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


# "DeepSpeed"

_OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
_SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto",
    },
}  # fmt: skip
_STAGES = {
    2: {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
    },
    3: {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}


def _config(stage: int, **entries: Any) -> dict[str, Any]:
    return {
        "zero_optimization": _STAGES[stage],
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
        **entries,
    }


def _config_file(config: dict[str, Any], folder: str) -> dict[str, Any]:
    file = Path(folder) / "zero_config.json"
    file.write_text(json.dumps(config))
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=file))
    assert (accelerator.distributed_type, accelerator.gradient_accumulation_steps) == ("DEEPSPEED", 2)
    model: Any = Model(1)
    assert accelerator.state.deepspeed_plugin is not None
    optimizer_cls: Any = (
        torch.optim.AdamW
        if accelerator.state.deepspeed_plugin is None
        or "optimizer" not in accelerator.state.deepspeed_plugin.deepspeed_config
        else DummyOptim
    )
    optimizer: Any = optimizer_cls(model.parameters(), lr=_RATE, weight_decay=0.01)
    lr_scheduler: Any
    if (
        accelerator.state.deepspeed_plugin is None
        or "scheduler" not in accelerator.state.deepspeed_plugin.deepspeed_config
    ):
        lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    else:
        lr_scheduler = DummyScheduler(optimizer, total_num_steps=6, warmup_num_steps=2)
    model, optimizer, dataloader, lr_scheduler = accelerator.prepare(model, optimizer, _loader(), lr_scheduler)
    rates = []
    for batch in itertools.chain(dataloader, dataloader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
    accelerator.save_model(model, f"{folder}/saved")
    unwrapped_model = accelerator.unwrap_model(model)
    found = _full(accelerator, model)
    accelerator.end_training()
    return {"weights": found, "rates": rates, "unwrapped": type(unwrapped_model).__name__}


@pytest.mark.parametrize(
    ("stage", "entries"),
    [(2, {"scheduler": _SCHEDULER}), (2, {}), (3, {"optimizer": _OPTIMIZER, "scheduler": _SCHEDULER})],
    ids=["scheduler", "neither", "optimizer and scheduler"],
)
def test_a_configuration_file_trains_as_by_hand(stage: int, entries: dict[str, Any], tmp_path: Path) -> None:
    found, other = run_distributed(
        _config_file, _RANKS, _config(stage, **entries), str(tmp_path), init=False, timeout=240
    )
    assert len(found["rates"]) == _STEPS
    assert (found["rates"] == [_RATE] * _STEPS) == ("scheduler" not in entries)
    assert max(found["rates"]) == pytest.approx(_RATE)
    wanted = _by_hand(1, rates=found["rates"], clip=0.1, accumulate=2)
    torch.testing.assert_close(found["weights"], wanted, rtol=1e-4, atol=1e-5)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    torch.testing.assert_close(saved, found["weights"], rtol=0, atol=0)
    assert found["unwrapped"] == "Model"
    assert (stage == 3) == (other["weights"] == {})  # the main process has the full weights


def _refused() -> list[str]:
    found = []
    for case in ("scheduler of a DummyOptim", "no hidden_size", "another batch size"):
        config = _config(2, optimizer=_OPTIMIZER)
        if case == "another batch size":
            config["train_micro_batch_size_per_gpu"] = 3
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model: Any = Model(1)
        optimizer: Any = DummyOptim(model.parameters(), lr=_RATE)
        objects = [model, optimizer, _loader()]
        if case == "scheduler of a DummyOptim":
            objects.append(torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
        elif case == "no hidden_size":
            del model.config
        with pytest.raises(ConfigurationError) as caught:
            accelerator.prepare(*objects)
        found.append(str(caught.value))
        accelerator.end_training()
    return found


def test_what_the_configuration_cannot_be_is_an_error() -> None:
    for scheduler, hidden_size, batch_size in run_distributed(_refused, _RANKS, init=False, timeout=240):
        assert "ConstantLR was created with a DummyOptim and does not change" in scheduler
        assert '"auto" for zero_optimization.reduce_bucket_size' in hidden_size
        assert "train_micro_batch_size_per_gpu=3, which differs from the training loader's batch_size=2" in batch_size


# "Using multiple models with DeepSpeed"

_ZERO2 = {
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
_ZERO3 = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": "auto",
        "stage3_max_reuse_distance": "auto",
    },
    "train_micro_batch_size_per_gpu": 1,
}


def _distill() -> dict[str, Any]:
    zero2_plugin, zero3_plugin = DeepSpeedPlugin(hf_ds_config=_ZERO2), DeepSpeedPlugin(hf_ds_config=_ZERO3)
    deepspeed_plugins = {"student": zero2_plugin, "teacher": zero3_plugin}
    accelerator = Accelerator(deepspeed_plugins=deepspeed_plugins)
    active_plugin = get_active_deepspeed_plugin(accelerator.state)
    assert active_plugin is deepspeed_plugins["student"]
    assert active_plugin is accelerator.deepspeed_plugin

    student_model: Any = Model(1)
    optimizer: Any = DummyOptim(student_model.parameters(), lr=_RATE, weight_decay=0.01)
    scheduler: Any = DummyScheduler(optimizer, warmup_num_steps=2)
    student_model, optimizer, scheduler, train_dataloader = accelerator.prepare(
        student_model, optimizer, scheduler, _loader()
    )
    accelerator.state.select_deepspeed_plugin("teacher")
    assert accelerator.deepspeed_plugin is accelerator.state.get_deepspeed_plugin("teacher") is zero3_plugin
    teacher_model = accelerator.prepare(Model(2))

    teacher_model.eval()
    student_model.train()
    rates = []
    for batch in train_dataloader:
        with torch.no_grad():
            output_teacher = teacher_model(**batch)
        output_student = student_model(**batch)
        loss = functional.mse_loss(output_student.logits, output_teacher.logits) + output_student.loss
        accelerator.backward(loss)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    sharded = [any(hasattr(p, "ds_id") for p in one.parameters()) for one in (student_model, teacher_model)]
    found = {"student": _full(accelerator, student_model), "teacher": _full(accelerator, teacher_model)}
    accelerator.end_training()
    return {**found, "rates": rates, "sharded": sharded}


def test_a_student_at_stage_2_learns_from_a_teacher_at_stage_3() -> None:
    found, _ = run_distributed(_distill, _RANKS, init=False, timeout=240)
    assert found["sharded"] == [False, True]
    assert len(found["rates"]) == _STEPS
    assert found["rates"][-1] == pytest.approx(_RATE)  # two steps of warm-up
    assert found["rates"][0] < _RATE
    wanted = _by_hand(1, rates=found["rates"], teacher=2)
    torch.testing.assert_close(found["student"], wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["teacher"], dict(Model(2).state_dict()), rtol=0, atol=0)


def _disjoint(given_again: bool) -> list[dict[str, torch.Tensor]]:
    deepspeed_plugins = {
        "first_model": DeepSpeedPlugin(zero_stage=2),
        "second_model": DeepSpeedPlugin(zero_stage=3, gradient_clipping=0.1),
    }
    first_accelerator = Accelerator(deepspeed_plugins=deepspeed_plugins)
    second_accelerator = Accelerator(deepspeed_plugins=dict(deepspeed_plugins)) if given_again else Accelerator()
    with pytest.raises(ConfigurationError, match=r"\['other'\].*\['first_model', 'second_model'\]"):
        Accelerator(deepspeed_plugin={"other": DeepSpeedPlugin()})

    first_accelerator.state.select_deepspeed_plugin("first_model")
    first_model: Any = Model(1)
    first_optimizer: Any = torch.optim.AdamW(first_model.parameters(), lr=_RATE)
    first_scheduler: Any = torch.optim.lr_scheduler.ConstantLR(first_optimizer, 1.0)
    first_model, first_optimizer, first_scheduler, train_dl = first_accelerator.prepare(
        first_model, first_optimizer, first_scheduler, _loader()
    )
    AcceleratorState().select_deepspeed_plugin("second_model")
    second_model: Any = Model(2)
    second_optimizer: Any = torch.optim.AdamW(second_model.parameters(), lr=_RATE)
    second_scheduler: Any = torch.optim.lr_scheduler.ConstantLR(second_optimizer, 1.0)
    second_model, second_optimizer, second_scheduler = second_accelerator.prepare(
        second_model, second_optimizer, second_scheduler
    )
    for batch in train_dl:
        outputs1 = first_model(**batch)
        first_accelerator.backward(outputs1.loss)
        first_optimizer.step()
        first_scheduler.step()
        first_optimizer.zero_grad()

        outputs2 = second_model(**batch)
        second_accelerator.backward(outputs2.loss)
        second_optimizer.step()
        second_scheduler.step()
        second_optimizer.zero_grad()
    assert not any(hasattr(p, "ds_id") for p in first_model.parameters())
    found = [_full(first_accelerator, first_model), _full(second_accelerator, second_model)]
    second_accelerator.end_training()
    return found


@pytest.mark.parametrize("given_again", [False, True])
def test_two_accelerators_train_disjoint_models_with_a_plugin_each(given_again: bool) -> None:
    (first, second), _ = run_distributed(_disjoint, _RANKS, given_again, init=False, timeout=240)
    torch.testing.assert_close(first, _by_hand(1, rates=[_RATE] * _STEPS), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second, _by_hand(2, rates=[_RATE] * _STEPS, clip=0.1), rtol=1e-4, atol=1e-5)


# "auto" after prepare


def _filled() -> dict[str, Any]:
    config = _config(3, optimizer=_OPTIMIZER, scheduler=_SCHEDULER, bf16={"enabled": "auto"})
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


def _is_sharded() -> bool:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=16))
    return all(hasattr(parameter, "ds_id") for parameter in model.parameters())


def _built(folder: str) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, LlamaConfig

    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config=_config(2, gradient_accumulation_steps=1, gradient_clipping="auto")),
        "teacher": DeepSpeedPlugin(hf_ds_config=_ZERO3, zero3_init_flag=True),
        "whole": DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False),
    }
    accelerator = Accelerator(deepspeed_plugins=plugins)
    assert not _is_sharded()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    student: Any = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=16))
    if accelerator.is_main_process:
        student.save_pretrained(folder)
    accelerator.wait_for_everyone()
    words = torch.arange(8).view(1, 8)
    expected = student(input_ids=words).logits.detach()
    optimizer: Any = torch.optim.AdamW(student.parameters(), lr=_RATE)
    student, optimizer = accelerator.prepare(student, optimizer)
    accelerator.state.select_deepspeed_plugin("teacher")
    assert _is_sharded()
    teacher: Any = AutoModelForCausalLM.from_pretrained(folder)
    held = sum(parameter.ds_tensor.numel() for parameter in teacher.parameters())
    total = sum(parameter.ds_numel for parameter in teacher.parameters())
    teacher = accelerator.prepare(teacher)
    with torch.no_grad():
        logits = teacher(input_ids=words).logits
    losses = []
    for _ in range(3):
        loss = functional.mse_loss(student(input_ids=words).logits, logits + 1)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
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
    return {"expected": expected, "logits": logits, "share": held / total, "losses": losses}


def test_transformers_builds_the_models_of_a_stage_3_plugin_in_shards(tmp_path: Path) -> None:
    for found in run_distributed(_built, _RANKS, str(tmp_path), init=False, timeout=240):
        torch.testing.assert_close(found["logits"], found["expected"])
        assert found["share"] < 0.6
        assert found["losses"] == sorted(found["losses"], reverse=True)
