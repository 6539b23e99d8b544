"""Configuration files that are written: the same options are read back, and FSDP1 becomes FSDP2."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.kwargs_handler import as_flag
from trainwright.launch.config_file import content_of, to_fsdp2, write_file
from trainwright.launch.launch_config import LaunchConfig, Option, as_mapping, options
from trainwright.launch.reading import options_of, read_file
from trainwright.utils import write_basic_config


def _values(option: Option) -> st.SearchStrategy[Any]:
    if option.choices:
        return st.sampled_from([option.parse(choice, "choice") for choice in option.choices])
    if option.read is as_flag:
        return st.booleans()
    if option.read is int:
        return st.integers()
    if option.read is float:
        return st.floats(allow_nan=False)
    if option.read is as_mapping:
        keys = st.text(max_size=3)  # shorter than those that are refused
        return st.dictionaries(keys, st.booleans() | st.text() | st.dictionaries(keys, st.integers()))
    return st.text().filter(str.isprintable) | st.sampled_from(
        ["True", "False", "true", "no", "null", "3", "0,1", "1_000", "12:30", "~", "a: b"]
    )


_CONFIGS = st.fixed_dictionaries(
    {}, optional={option.name: _values(option) for option in options() if not option.is_refused}
).map(lambda values: LaunchConfig(**values))


@pytest.mark.slow
@given(_CONFIGS, st.sampled_from(["c.yaml", "c.json"]))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_is_read_back_to_the_same_options(tmp_path: Path, config: LaunchConfig, name: str) -> None:
    path, values = read_file(write_file(config, tmp_path / name))
    assert (path, LaunchConfig(**values)) == (str(tmp_path / name), config)
    assert not list(tmp_path.glob(".*"))


def test_the_layout_is_that_of_accelerate() -> None:
    config = LaunchConfig(
        cpu=False, num_processes=4, use_fsdp=True, fsdp_version=2, fsdp_reshard_after_forward="True",
        dynamo_backend="inductor", use_parallelism_config=True, parallelism_config_tp_size=2, mixed_precision="no",
        gradient_accumulation_steps=3,
    )  # fmt: skip
    assert content_of(config) == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "use_cpu": False,
        "num_processes": 4,
        "mixed_precision": "no",
        "deepspeed_config": {"gradient_accumulation_steps": 3},
        "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
        "dynamo_config": {"dynamo_backend": "inductor"},
        "parallelism_config": {"parallelism_config_tp_size": 2},
    }


def test_a_basic_configuration_has_a_process_for_each_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainwright.launch.config_file.device_count", lambda: 3)
    path = write_basic_config("bf16")
    assert path == tmp_path / "cache/trainwright/default_config.yaml"
    content = {"cpu": False, "num_machines": 1, "num_processes": 3, "mixed_precision": "bf16"}
    assert read_file(None) == (str(path), content)
    assert write_basic_config() is False
    assert "exists and stays as it is" in capsys.readouterr().out
    assert read_file(None)[1] == content
    monkeypatch.setattr("trainwright.launch.config_file.device_count", lambda: 0)
    write_basic_config(save_location=str(tmp_path / "a.json"))
    assert json.loads((tmp_path / "a.json").read_text())["use_cpu"] is True
    with pytest.raises(ConfigurationError, match="mixed_precision='bf61' is unknown"):
        write_basic_config("bf61", tmp_path / "b.yaml")
    write_basic_config("fp8", tmp_path / "b.yaml")
    assert read_file(tmp_path / "b.yaml")[1]["mixed_precision"] == "fp8"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(LaunchConfig(num_processes=1), tmp_path / "a.yaml")

    def full(self: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigurationError, match="cannot be written: no space left"):
        write_file(LaunchConfig(num_processes=2), path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.yaml"]
    assert read_file(path)[1] == {"num_processes": 1}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"fsdp_reshard_after_forward": True}),
        ({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": True},
         {"fsdp_reshard_after_forward": True, "fsdp_offload_params": True}),
        ({"fsdp_sharding_strategy": 2}, {"fsdp_reshard_after_forward": False}),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, {"fsdp_reshard_after_forward": False}),
        ({"sharding_strategy": "SHARD_GRAD_OP", "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
          "fsdp_forward_prefetch": False, "fsdp_use_orig_params": True, "fsdp_sync_module_states": True},
         {"fsdp_reshard_after_forward": False}),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, {"fsdp_reshard_after_forward": False}),
    ],
)  # fmt: skip
def test_options_of_fsdp1_become_those_of_fsdp2(given: dict[str, Any], expected: dict[str, Any]) -> None:
    before = LaunchConfig(**options_of({"distributed_type": "FSDP", "fsdp_config": given}, "a.yaml"))
    after, _ = to_fsdp2(before, "a.yaml")
    assert content_of(after)["fsdp_config"] == {"fsdp_version": 2, **expected}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "a.yaml does not describe FSDP"),
        ({"use_fsdp": True, "fsdp_version": 2}, "has fsdp_version: 2 already"),
        ({"use_fsdp": True, "fsdp_sharding_strategy": "3"}, "'NO_SHARD' has no counterpart. FSDP2 always shards"),
        ({"use_fsdp": True, "fsdp_sharding_strategy": "HALF"}, "'HALF' has no counterpart. It is unknown"),
        ({"use_fsdp": True, "fsdp_sharding_strategy": "4", "num_machines": 2}, "HYBRID_SHARD needs num_processes"),
    ],
)
def test_what_fsdp2_cannot_express_is_an_error(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        to_fsdp2(LaunchConfig(**values), "a.yaml")
    assert text in str(caught.value)


def test_a_replica_for_each_machine_becomes_an_axis() -> None:
    before = LaunchConfig(use_fsdp=True, num_machines=2, num_processes=8, fsdp_sharding_strategy="HYBRID_SHARD")
    content = content_of(to_fsdp2(before, "a.yaml")[0])
    assert content["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 4,
    }


def test_a_hybrid_strategy_whose_replicas_are_lost_is_named() -> None:
    before = LaunchConfig(
        use_fsdp=True,
        num_machines=2,
        num_processes=8,
        fsdp_sharding_strategy="HYBRID_SHARD",
        use_parallelism_config=True,
        fsdp_use_orig_params=True,
    )
    _, removed = to_fsdp2(before, "a.yaml")
    assert removed == [
        "fsdp_sharding_strategy=HYBRID_SHARD, which is parallelism_config_dp_replicate_size=2 in FSDP2",
        "fsdp_use_orig_params",
    ]
    assert to_fsdp2(replace(before, parallelism_config_dp_replicate_size=2), "a.yaml")[1] == ["fsdp_use_orig_params"]
