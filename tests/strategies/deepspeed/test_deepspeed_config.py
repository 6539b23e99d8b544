"""What may be said to DeepSpeed, and what is refused before anything is touched."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from trainwright.core.errors import ConfigurationError
from trainwright.processes.partial_state import PartialState
from trainwright.strategies import STRATEGIES
from trainwright.strategies.deepspeed import checks, library
from trainwright.strategies.deepspeed.config import for_building, for_engine
from trainwright.strategies.deepspeed.hf_config import HfDeepSpeedConfig
from trainwright.strategies.deepspeed.placeholders import DummyOptim, DummyScheduler
from trainwright.strategies.deepspeed.state import as_torch
from trainwright.strategies.deepspeed.strategy import DeepSpeedStrategy
from trainwright.strategies.deepspeed.zero_model import connect_schedule


def test_defaults_are_lightnings() -> None:
    strategy = DeepSpeedStrategy()
    assert strategy.engine_config.stage == 2
    assert strategy.engine_config.content == {
        "zero_optimization": {
            "stage": 2, "sub_group_size": 10**12, "contiguous_gradients": True, "overlap_comm": True,
            "allgather_partitions": True, "reduce_scatter": True, "allgather_bucket_size": 200_000_000,
            "reduce_bucket_size": 200_000_000,
        },
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    for config in (None, {}):
        assert DeepSpeedStrategy(config, zero_optimization=False).engine_config.stage == 0
    assert DeepSpeedStrategy(stage=3, thread_count=4).engine_config.content["aio"] == {"intra_op_parallelism": 4}


@pytest.mark.parametrize(
    ("name", "stage", "optimizer", "parameters"),
    [("deepspeed_stage_1_offload", 1, "cpu", "none"), ("deepspeed_stage_3_offload_nvme", 3, "nvme", "nvme")],
)
def test_names_mean_what_they_say(name: str, stage: int, optimizer: str, parameters: str) -> None:
    config = STRATEGIES.get(name)().engine_config
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
    connect_schedule(None, None, run, DeepSpeedStrategy(config=config).engine_config.origin)


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


def test_a_configuration_answers_and_changes_by_dotted_keys() -> None:
    zero = {"stage": 2, "offload_param": {"device": "nvme"}}
    config = HfDeepSpeedConfig({"zero_optimization": zero, "fp16": {"enabled": False}})
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (True, False, True)
    keys = ("zero_optimization.stage", "fp16.enabled", "bf16.enabled")  # true, false, and missing
    assert [config.is_true(key) for key in keys] == [True, False, False]
    assert [config.is_false(key) for key in keys] == [False, True, False]
    config.del_config_sub_tree("zero_optimization.offload_param.device", must_exist=True)
    config.del_config_sub_tree("bf16.enabled")
    assert config.config == {"zero_optimization": {"stage": 2, "offload_param": {}}, "fp16": {"enabled": False}}
    assert not config.is_offload()
    with pytest.raises(ConfigurationError, match=r"has no 'fp16\.scale'"):
        config.del_config_sub_tree("fp16.scale", must_exist=True)
    HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    assert not PartialState._shared_state  # a script that was not launched has no group to connect


def test_deepspeed_is_loaded_for_one_device_type(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(device_name=lambda: "cpu")
    logger = SimpleNamespace(setLevel=lambda level: None)
    deepspeed = SimpleNamespace(
        accelerator=SimpleNamespace(get_accelerator=lambda: device), utils=SimpleNamespace(logger=logger)
    )
    monkeypatch.setattr(library, "require_package", lambda *names, **options: deepspeed)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert library.load_library("cpu") is deepspeed
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    with pytest.raises(ConfigurationError, match="already uses 'cpu'"):
        library.load_library("cuda")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_with_offload_the_host_steps_the_groups_of_torchs_adam(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checks, "cpu_adam", lambda groups, adamw_mode: SimpleNamespace(param_groups=groups, adamw_mode=adamw_mode)
    )
    offload = DeepSpeedStrategy(stage=2, offload_optimizer=True).engine_config
    optimizer = kind([torch.nn.Parameter(torch.ones(2))])
    checks.check_optimizers([optimizer], torch.nn.Linear(1, 1), offload, None)  # type: ignore[arg-type]
    found: Any = checks.on_host(optimizer, offload)
    assert found.param_groups is optimizer.param_groups
    assert found.adamw_mode is (kind is torch.optim.AdamW)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        assert getattr(found, hooks) is getattr(optimizer, hooks)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5).step()  # warns of no missing step
    assert checks.on_host(optimizer, DeepSpeedStrategy(stage=2).engine_config) is optimizer
    for unlike in ({"amsgrad": True}, {"maximize": True}):
        optimizer = kind([torch.nn.Parameter(torch.ones(2))], **unlike)
        with pytest.raises(ConfigurationError, match="cannot step on the host"):
            checks.check_optimizers([optimizer], torch.nn.Linear(1, 1), offload, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("adamw", [True, False])
def test_states_of_deepspeeds_adam_become_those_of_torchs(adamw: bool) -> None:
    like_torchs = torch.optim.AdamW if adamw else torch.optim.Adam
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = type("DeepSpeedCPUAdam", (torch.optim.SGD,), {"adam_w_mode": adamw})([weight])
    groups = [{"lr": 0.3, "bias_correction": True, "params": ["weight"]}]
    average = torch.ones(2)
    tree = as_torch({"groups": groups, "state": {"weight": {"step": 2, "exp_avg": average}}, "kept": 1}, optimizer)
    assert (tree["class"], tree["kept"]) == (like_torchs.__name__, 1)
    assert tree["groups"] == [{**like_torchs([weight], lr=0.3).param_groups[0], "params": ["weight"]}]
    assert tree["state"]["weight"]["exp_avg"] is average
    assert torch.equal(tree["state"]["weight"]["step"], torch.tensor(2.0))
    assert as_torch(tree, torch.optim.SGD([weight])) is tree


def test_an_engine_steps_the_users_adagrad() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    given, made = torch.optim.Adagrad([weight], lr=0.3), torch.optim.Adagrad([torch.nn.Parameter(torch.ones(4))])
    linked: list[Any] = []
    zero = SimpleNamespace(optimizer=made, _link_all_hp_params=lambda: linked.append(zero.optimizer))
    library.keep_own_adagrad(SimpleNamespace(basic_optimizer=given, optimizer=zero))
    assert zero.optimizer is given
    assert linked == [given]
    assert given.state == made.state
    other = SimpleNamespace(optimizer=torch.optim.SGD([weight]))
    library.keep_own_adagrad(SimpleNamespace(basic_optimizer=given, optimizer=other))
    assert other.optimizer is not given


def test_gradients_that_start_within_a_block_are_not_swapped() -> None:
    def split(tensors: list[Any], offsets: list[int]) -> tuple[list[Any], list[int]]:
        return [SimpleNamespace(swappable=True) for _ in tensors], offsets

    swapper = SimpleNamespace(_adjust_for_misaligned_lengths=split, numel_alignment=256)
    library.keep_unaligned_gradients(SimpleNamespace(optimizer_swapper=swapper))
    places = [0, 256, 300, 511]
    parts, found = swapper._adjust_for_misaligned_lengths([torch.ones(1)] * 4, places)  # type: ignore[call-arg]
    assert ([part.swappable for part in parts], found) == ([True, True, False, False], places)
