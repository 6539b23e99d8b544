"""Plugins and kwargs handlers of Accelerate: the strategies they make, their variables, and what they change."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullStateDictConfig

from tests.contracts.test_own_loop import Net
from trainwright import (
    Accelerator,
    AcceleratorState,
    AutocastKwargs,
    DDPStrategy,
    DeepSpeedPlugin,
    DeepSpeedStrategy,
    DistributedDataParallelKwargs,
    FSDPStrategy,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    Strategy,
    TensorParallelStrategy,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
    get_active_deepspeed_plugin,
)
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.processes.partial_state import PartialState
from trainwright.strategies.launcher_variables import DynamoBackend
from trainwright.utils import HfDeepSpeedConfig

_FSDP: dict[str, tuple[dict[str, Any], dict[str, str], FSDPStrategy]] = {
    "defaults": ({}, {}, FSDPStrategy()),
    "version 2's": ({"fsdp_version": 2, "reshard_after_forward": False}, {}, FSDPStrategy(reshard_after_forward=False)),
    "sizes": ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 7}, {}, FSDPStrategy(min_num_params=7)),
    "options": (
        {"cpu_offload": True, "activation_checkpointing": True, "state_dict_type": "FULL_STATE_DICT"},
        {},
        FSDPStrategy(cpu_offload=True, activation_checkpointing=True, state_dict_type="full"),
    ),
    "variables": (
        {},
        {
            "FSDP_VERSION": "1",
            "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block, Head",
            "FSDP_MIN_NUM_PARAMS": "100000000",
            "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
            "FSDP_OFFLOAD_PARAMS": "false",
            "FSDP_USE_ORIG_PARAMS": "true",
            "FSDP_SYNC_MODULE_STATES": "true",
            "FSDP_FORWARD_PREFETCH": "true",
            "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
            "FSDP_ACTIVATION_CHECKPOINTING": "True",
        },
        FSDPStrategy(
            sharding_strategy="SHARD_GRAD_OP",
            auto_wrap_policy=["Block", "Head"],
            forward_prefetch=1,
            cpu_ram_efficient_loading=True,
            activation_checkpointing=True,
        ),
    ),
    "a variable and a field": (
        {"reshard_after_forward": True},
        {"FSDP_RESHARD_AFTER_FORWARD": "false", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
        FSDPStrategy(reshard_after_forward=True, activation_checkpointing=True),
    ),
}


@pytest.mark.parametrize("name", _FSDP)
def test_an_fsdp_plugin_is_a_strategy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, variables, expected = _FSDP[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    plugin = FullyShardedDataParallelPlugin(**fields)
    assert plugin.strategy(2) == expected
    assert pickle.loads(pickle.dumps(plugin)) == plugin


_DEEPSPEED: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, Any]]] = {
    "defaults": ({}, {}, {"zero_stage": 2}),
    "variables": (
        {"offload_param_device": "cpu"},
        {
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
            "ACCELERATE_GRADIENT_CLIPPING": "1.5",
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
            "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "Experts",
        },
        {
            "zero_stage": 3,
            "gradient_clipping": 1.5,
            "offload_param_device": "cpu",
            "transformer_moe_cls_names": "Experts",
        },
    ),
}


@pytest.mark.parametrize("name", _DEEPSPEED)
def test_a_deepspeed_plugin_is_a_strategy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, variables, config = _DEEPSPEED[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    found, expected = DeepSpeedPlugin(**fields).strategy(2), DeepSpeedStrategy.from_config(config)
    assert found.engine_config.options == expected.engine_config.options
    assert found.engine_config.content == expected.engine_config.content


def test_variables_that_differ_from_the_configuration_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    zero = {"stage": 2, "offload_param": {"device": "none"}}
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"zero_optimization": zero, "gradient_clipping": 1}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(config))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "1.0")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
    with pytest.raises(ConfigurationError) as caught:
        Accelerator(cpu=True)
    expected = "zero_stage=3 (zero_optimization.stage=2), offload_param_device='cpu' "
    assert f"{expected}(zero_optimization.offload_param.device='none'). Remove them" in str(caught.value)
    assert "gradient_clipping" not in str(caught.value)


@pytest.mark.slow
def test_the_configuration_determines_accumulation_and_precision() -> None:
    config = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 10, "bf16": {"enabled": True}}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    with pytest.warns(TrainwrightWarning, match="gradient_accumulation_steps=4 is overridden .* which has 10"):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, deepspeed_plugin=plugin)
    assert (accelerator.gradient_accumulation_steps, accelerator.mixed_precision) == (10, "bf16")
    assert "optimizer" not in plugin.deepspeed_config
    accelerator.end_training()
    assert Accelerator(cpu=True, strategy=DeepSpeedStrategy(config)).gradient_accumulation_steps == 10
    with pytest.raises(ConfigurationError, match=r"config has bf16\.enabled=True.*mixed_precision='bf16'"):
        Accelerator(cpu=True, mixed_precision="no", deepspeed_plugin=plugin)


def test_a_tensor_parallel_plugin_splits_over_all_ranks_or_some(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TorchTensorParallelPlugin(2).strategy(2) == TensorParallelStrategy(tp=2)
    assert TorchTensorParallelPlugin(tp_size=2).strategy(4) == FSDPStrategy(tp=2)
    monkeypatch.setenv("TP_SIZE", "2")
    assert TorchTensorParallelPlugin().strategy(4) == FSDPStrategy(tp=2)


def test_an_fsdp_plugin_may_be_set_until_a_model_is_prepared() -> None:
    plugin = FullyShardedDataParallelPlugin(backward_prefetch="NO_PREFETCH", mixed_precision_policy="fp32")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert accelerator.state.fsdp_plugin is plugin
    plugin.auto_wrap_policy = lambda module: isinstance(module, nn.Linear)
    plugin.set_mixed_precision(torch.bfloat16)  # keeps the policy
    assert plugin.mixed_precision_policy == "fp32"
    plugin.set_mixed_precision(torch.bfloat16, override=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert [isinstance(module, FSDPModule) for module in accelerator.unwrap_model(model)] == [True, False, True]
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    accelerator.end_training()


class _Pair(nn.Sequential):
    _no_split_modules = ("Linear",)


@pytest.mark.parametrize("wrap", ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"])
def test_a_named_wrap_policy_becomes_torchs_for_the_modules_of_a_model(wrap: str) -> None:
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=wrap, min_num_params=3)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    net = _Pair(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    plugin.set_auto_wrap_policy(net)
    assert callable(plugin.auto_wrap_policy)
    plugin.set_auto_wrap_policy(net)  # has no effect the second time
    model, optimizer = accelerator.prepare(net, optimizer)
    assert [isinstance(module, FSDPModule) for module in accelerator.unwrap_model(model)] == [True, False, True]
    assert (optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"]) == (True, None)
    accelerator.end_training()


def test_configurations_of_states_select_their_type() -> None:
    full = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    assert FullyShardedDataParallelPlugin(state_dict_config=full).strategy(2).state_dict_type == "full"
    with pytest.raises(ConfigurationError, match="state_dict_type='SHARDED_STATE_DICT' differ"):
        FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT", state_dict_config=full).strategy(2)
    with pytest.raises(ConfigurationError, match="state_dict_config is a dict"):
        FullyShardedDataParallelPlugin(state_dict_config={}).strategy(2)


def test_a_deepspeed_plugin_writes_a_precision_to_its_configuration() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto"}})
    for name, fp16, bf16 in (("fp16", True, False), ("bf16", False, True), ("fp8", False, True), ("no", False, False)):
        plugin.set_mixed_precision(name)
        config = plugin.deepspeed_config
        assert (config["fp16"]["enabled"], config["bf16"]["enabled"]) == (fp16, bf16)
    plugin.deepspeed_config["bf16"]["enabled"] = True
    with pytest.raises(ConfigurationError, match=r"has bf16\.enabled=True"):
        plugin.set_mixed_precision("fp16")


def test_fields_and_configuration_of_a_deepspeed_plugin_may_change_after_it_was_read() -> None:
    fields: dict[str, Any] = {"hf_ds_config": {"zero_optimization": {"stage": 2}}}
    plugin, equal, other = DeepSpeedPlugin(**fields), DeepSpeedPlugin(**fields), DeepSpeedPlugin(**fields)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    assert accelerator.deepspeed_plugin is plugin
    assert plugin.zero_stage == 2
    plugin.zero_stage = 3
    assert plugin.deepspeed_config["zero_optimization"]["stage"] == plugin.strategy(1).engine_config.stage == 3
    own: Any = plugin.hf_ds_config
    assert own.is_zero3()
    own.config["zero_optimization"]["stage"] = 1
    assert (plugin.get_value("zero_optimization.stage"), plugin.strategy(1).engine_config.stage) == (1, 1)
    copied = pickle.loads(pickle.dumps(plugin))
    copied.zero_stage = 2
    assert (copied.strategy(1).engine_config.stage, plugin.strategy(1).engine_config.stage) == (2, 1)
    plugin.hf_ds_config = {"zero_optimization": {"stage": 0}}
    assert plugin.strategy(1).engine_config.stage == plugin.deepspeed_config["zero_optimization"]["stage"] == 0
    # As transformers does:
    plugin.hf_ds_config = HfDeepSpeedConfig(own.config)
    plugin.deepspeed_config = plugin.hf_ds_config.config
    plugin.hf_ds_config.config["zero_optimization"]["stage"] = 2
    assert plugin.strategy(1).engine_config.stage == 2
    # The plugin is compared as it was passed.
    assert Accelerator(cpu=True, deepspeed_plugin=equal).deepspeed_plugin is plugin
    other.gradient_clipping = 0.5
    with pytest.raises(ConfigurationError, match="an earlier one has others"):
        Accelerator(cpu=True, deepspeed_plugin=other)
    accelerator.end_training()


def test_a_configuration_that_is_assigned_to_a_deepspeed_plugin_is_that_of_its_object() -> None:
    plugin = DeepSpeedPlugin(zero_stage=1)
    plugin.deepspeed_config = {"zero_optimization": {"stage": 3}}
    config: Any = plugin.hf_ds_config
    assert config.config is plugin.deepspeed_config
    assert config.is_zero3()
    assert plugin.strategy(1).engine_config.stage == 3
    assert plugin == DeepSpeedPlugin(zero_stage=1)


def test_another_accelerator_has_the_plugins_of_the_first() -> None:
    with pytest.raises(ConfigurationError, match="no Accelerator has DeepSpeed plugins"):
        get_active_deepspeed_plugin(AcceleratorState(cpu=True))
    plugins = {"a": DeepSpeedPlugin(zero_stage=1), "b": DeepSpeedPlugin(zero_stage=3)}
    first, second = Accelerator(cpu=True, deepspeed_plugins=plugins), Accelerator(cpu=True)
    plain = Accelerator(cpu=True, strategy="single")
    first.state.select_deepspeed_plugin("b")
    assert first.deepspeed_plugin is second.deepspeed_plugin is plugins["b"]
    assert (plain.deepspeed_plugin, second.strategy.engine_config.stage) == (None, 1)  # type: ignore[attr-defined]  # DeepSpeed's
    assert pickle.loads(pickle.dumps(first.state)).get_deepspeed_plugin("a") is plugins["a"]
    with pytest.raises(ConfigurationError, match=r"no DeepSpeed plugin 'c'.* Known: a, b"):
        first.state.select_deepspeed_plugin("c")
    second.end_training()
    first.end_training()
    assert Accelerator(cpu=True).deepspeed_plugin is None


def _with_warnings(make: Callable[[], Accelerator]) -> tuple[Strategy, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator = make()
    found = accelerator.strategy
    accelerator.end_training()
    return found, [str(one.message) for one in caught if one.category is TrainwrightWarning]


def test_the_launchers_variables_select_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")
    assert _with_warnings(lambda: Accelerator(cpu=True)) == (FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"), [])
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigurationError, match="ACCELERATE_USE_FSDP and ACCELERATE_USE_DEEPSPEED"):
        Accelerator(cpu=True)


def test_an_argument_that_overrides_a_variable_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD")
    found, texts = _with_warnings(lambda: Accelerator(cpu=True, fsdp_plugin=plugin))
    assert found == FSDPStrategy(sharding_strategy="NO_SHARD")
    assert texts == [
        "FSDP_SHARDING_STRATEGY=FULL_SHARD is overridden by fsdp_plugin, which has sharding_strategy='NO_SHARD'."
    ]
    PartialState._reset_state()
    _, texts = _with_warnings(lambda: Accelerator(cpu=True, strategy="single"))
    assert texts == ["ACCELERATE_USE_FSDP=true is overridden by strategy='single'."]


_PLUGIN = FullyShardedDataParallelPlugin()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"fsdp_plugin": 1}, "fsdp_plugin is a builtins.int. Pass one trainwright.FullyShardedDataParallelPlugin"),
        ({"fsdp_plugin": _PLUGIN, "deepspeed_plugin": DeepSpeedPlugin()}, "fsdp_plugin and deepspeed_plugin both"),
        ({"strategy": "ddp", "kwargs_handlers": [DistributedDataParallelKwargs()]}, "strategy='ddp' and kwargs_h"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=3)}, "fsdp_version=3 is unknown"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(use_orig_params=False)}, "use_orig_params=False"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy="FULL_SHRD")}, "Did you mean 'FULL_SHARD'"),
        ({"deepspeed_plugins": DeepSpeedPlugin(), "deepspeed_plugin": DeepSpeedPlugin()}, "are the same argument"),
        ({"torch_tp_plugin": TorchTensorParallelPlugin(torch_device_mesh=1)}, "torch_device_mesh is not supported"),
        ({"dynamo_backend": "inducter"}, "Did you mean 'inductor'"),
        ({"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin("eager")}, "both select a compiler"),
        ({"kwargs_handlers": [GradScalerKwargs(), GradScalerKwargs()]}, "holds two GradScalerKwargs"),
        (
            {"strategy": DDPStrategy(timeout=5), "kwargs_handlers": [InitProcessGroupKwargs(timeout=timedelta(1))]},
            "differ. Pass one of them",
        ),
    ],
)
def test_what_contradicts_itself_is_an_error_before_anything_starts(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Accelerator(cpu=True, **arguments)
    assert not PartialState._shared_state


def test_autocast_has_the_options_of_its_handler() -> None:
    net, inputs = nn.Linear(3, 2), torch.randn(4, 3)
    off = AutocastKwargs(enabled=False)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[off])
    torch.testing.assert_close(accelerator.prepare(net)(inputs), net(inputs), rtol=0, atol=0)
    with accelerator.autocast():
        assert net(inputs).dtype == torch.float32
    with accelerator.autocast(autocast_handler=AutocastKwargs(cache_enabled=False)):
        assert net(inputs).dtype == torch.bfloat16
        assert not torch.is_autocast_cache_enabled()


def test_dynamo_options_are_those_of_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TorchDynamoPlugin().compile_options() is None
    assert TorchDynamoPlugin(DynamoBackend.NO).compile_options() is None
    assert TorchDynamoPlugin("AOT_EAGER", fullgraph=True).compile_options() == {
        "backend": "aot_eager",
        "fullgraph": True,
    }
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "False")
    assert TorchDynamoPlugin().compile_options() == {"backend": "eager", "dynamic": True, "fullgraph": False}


@pytest.mark.slow
def test_a_prepared_model_is_compiled_and_keeps_its_names() -> None:
    from torch._dynamo.testing import CompileCounter  # imports much of torch

    backend, net = CompileCounter(), Net()
    names, expected = list(net.state_dict()), net(torch.ones(2, 4))
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend, fullgraph=True))
    model = accelerator.prepare(net)
    torch.testing.assert_close(model(torch.ones(2, 4)), expected)
    assert backend.frame_count == 1
    assert list(model.state_dict()) == list(accelerator.get_state_dict(model)) == names
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is net
    kept: Any = accelerator.unwrap_model(model)
    assert kept._orig_mod is net
    PartialState._reset_state()
    again = Accelerator(cpu=True, dynamo_backend="aot_eager").prepare(torch.compile(net, backend=backend))
    torch.testing.assert_close(again(torch.ones(2, 4)), expected)  # compiled once, by the user's backend


def test_a_wrap_policy_of_classes_names_what_is_missing() -> None:
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    with pytest.raises(ConfigurationError, match="Linear has no _no_split_modules"):
        plugin.set_auto_wrap_policy(nn.Linear(2, 2))
    plugin.transformer_cls_names_to_wrap = "Linear, Blok"
    with pytest.raises(ConfigurationError, match="Blok"):
        plugin.set_auto_wrap_policy(_Pair(nn.Linear(2, 2)))
    plugin.auto_wrap_policy = None
    plugin.set_auto_wrap_policy(nn.Linear(2, 2))
    assert plugin.auto_wrap_policy is None
