"""Options of `trainwright launch`: flags, variables, files, and which of them wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright.core.errors import ConfigurationError
from trainwright.launch.launch import check
from trainwright.launch.launch_config import LaunchConfig, options
from trainwright.launch.reading import default_file, options_of, read_command


def _set(config: LaunchConfig) -> dict[str, Any]:
    return {option.name: value for option in options() if (value := getattr(config, option.name)) is not None}


@pytest.mark.parametrize(
    ("argv", "expected", "script", "arguments", "kind"),
    [
        (["a.py"], {}, "a.py", [], "script"),
        (["--cpu", "--num_processes", "2", "a.py", "--cpu", "x"], {"cpu": True, "num_processes": 2}, "a.py",
         ["--cpu", "x"], "script"),
        (["--num-processes=2", "--mixed-precision=BF16", "a.py"], {"num_processes": 2, "mixed_precision": "bf16"},
         "a.py", [], "script"),
        (["-m", "pkg.mod", "-m"], {}, "pkg.mod", ["-m"], "module"),
        (["-q", "-t", "3", "--no_python", "env"], {"quiet": True, "tee": "3"}, "env", [], "program"),
        (["--use_fsdp", "--fsdp_offload_params", "true", "--", "a.py"], {"use_fsdp": True, "fsdp_offload_params": True},
         "a.py", [], "script"),
    ],
)  # fmt: skip
def test_a_command_line_is_read(
    argv: list[str], expected: dict[str, Any], script: str, arguments: list[str], kind: str
) -> None:
    found = read_command(argv)
    assert (_set(found.config), found.script, found.arguments, found.kind) == (expected, script, arguments, kind)


def test_flags_win_over_variables_and_these_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("mixed_precision: fp16\nnum_processes: 4\nuse_cpu: true\ngradient_accumulation_steps: 3\n")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    found = read_command(["--config_file", str(file), "--num_processes", "2", "a.py"])
    assert _set(found.config) == {
        "cpu": True,
        "num_processes": 2,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 3,
    }
    assert found.notes == [
        f"num_processes=2 of --num_processes is used, not 4 of {file}.",
        f"mixed_precision=bf16 of the variable ACCELERATE_MIXED_PRECISION is used, not fp16 of {file}.",
    ]
    assert found.config.environment() == {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
    }


def test_the_default_file_is_ours_or_that_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_file() is None
    theirs = tmp_path / "hub/accelerate/default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("num_processes: 3\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    assert read_command(["a.py"]).config.num_processes == 3
    ours = tmp_path / "cache/trainwright/default_config.yaml"
    ours.parent.mkdir(parents=True)
    ours.write_text("num_processes: 2\n")
    assert read_command(["a.py"]).config.num_processes == 2


_COMMON = {
    "compute_environment": "LOCAL_MACHINE",
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_process_ip": None,
    "main_training_function": "main",
    "num_machines": 1,
    "num_processes": 2,
    "tpu_env": [],
    "tpu_use_cluster": False,
}
_READ = {"machine_rank": 0, "num_machines": 1, "num_processes": 2, "downcast_bf16": False}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"distributed_type": "NO", "use_cpu": False}, {"cpu": False}),
        (yaml.safe_load("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO"),
         {"sagemaker": True, "sagemaker_distributed_type": "NO"}),
        ({"distributed_type": "MULTI_CPU"}, {"cpu": True}),
        ({"distributed_type": "MULTI_GPU", "gpu_ids": "0,1", "rdzv_backend": "static"},
         {"gpu_ids": "0,1", "rdzv_backend": "static"}),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 1, "fsdp_offload_params": False,
          "fsdp_backward_prefetch_policy": "BACKWARD_PRE", "fsdp_transformer_layer_cls_to_wrap": ["A", "B"]}},
         {"use_fsdp": True, "fsdp_sharding_strategy": "1", "fsdp_offload_params": False,
          "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_transformer_layer_cls_to_wrap": "A,B"}),
        ({"distributed_type": "DEEPSPEED", "fsdp_config": {}, "deepspeed_config": {"zero_stage": 2,
          "gradient_accumulation_steps": 4, "offload_param_device": "none", "zero3_init_flag": True}},
         {"use_deepspeed": True, "zero_stage": 2, "gradient_accumulation_steps": 4, "offload_param_device": "none",
          "zero3_init_flag": True}),
        ({"dynamo_backend": "INDUCTOR"}, {"dynamo_backend": "INDUCTOR"}),
        ({"dynamo_config": {"dynamo_mode": "default"}}, {"dynamo_mode": "default"}),
        ({"parallelism_config": {"parallelism_config_tp_size": 2}},
         {"use_parallelism_config": True, "parallelism_config_tp_size": 2}),
    ],
)  # fmt: skip
def test_files_of_accelerate_are_read(content: dict[str, Any], expected: dict[str, Any]) -> None:
    assert options_of(_COMMON | content, "a.yaml") == _READ | expected


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "name a script"),
        (["--num_proceses", "2", "a.py"], "has no option --num_proceses. Did you mean 'num_processes'"),
        (["--num_processes"], "--num_processes needs a value"),
        (["--module=false", "a.py"], "--module=false: the flag takes no value. Write --module, or omit it"),
        (["--num_processes", "two", "a.py"], "--num_processes: num_processes='two', expected a whole number"),
        (["--mixed_precision", "bf61", "a.py"], "mixed_precision='bf61' is unknown. Did you mean 'bf16'"),
        (["--config_file", "/no/such.yaml", "a.py"], "cannot be read"),
        (["--use_fsdp", "--use_deepspeed", "{script}"], "--use_fsdp and --use_deepspeed exclude each other"),
        (["--zero_stage", "2", "{script}"], "--zero_stage needs --use_deepspeed too"),
        (["--tpu", "{script}"], "--tpu needs torch_xla and the torch that it was built for"),
        (["--cpu", "--multi_gpu", "{script}"], "--cpu and --multi_gpu exclude each other"),
        (["--tpu_use_cluster", "{script}"], "start the script on each machine of a pod with --tpu"),
        (["--fp8_backend", "msamp", "{script}"], "fp8_backend='msamp' is unknown. Known: AO, TE. MS-AMP needs"),
        (["--num_machines", "2", "{script}"], "needs --machine_rank, --main_process_ip, --main_process_port too"),
        (["--num_machines", "2", "--rdzv_backend", "c10d", "{script}"],
         "--num_machines 2 needs --main_process_ip, --main_process_port too"),
        (["--num_machines", "2", "--num_processes", "3", "--machine_rank", "0", "--main_process_ip", "a",
          "--main_process_port", "1", "{script}"], "cannot be divided by --num_machines 2"),
        (["no_such.py"], "the script 'no_such.py' does not exist"),
        (["python", "-m", "module"], "launch starts Python itself. Leave 'python' out"),
        (["{broken}"], "broken.py:1 does not compile"),
        (["--no_python", "no_such_program"], "the program 'no_such_program' was not found"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_starts(argv: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    (tmp_path / "broken.py").write_text("x = (\n")
    names = {"{script}": str(tmp_path / "script.py"), "{broken}": str(tmp_path / "broken.py")}
    with pytest.raises(ConfigurationError) as caught:
        check(read_command([names.get(word, word) for word in argv]))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (["a"], "does not hold a mapping"),
        ({"compute_environment": "AZURE"}, "compute_environment='AZURE' is not supported"),
        ({"megatron_lm_config": {"megatron_lm_tp": 2}}, "has the unknown key 'megatron_lm_tp'"),
        ({"num_procesess": 2}, "has the unknown key 'num_procesess'. Did you mean 'num_processes'"),
        ({"fsdp_config": 3}, "fsdp_config=3 is not a mapping"),
    ],
)
def test_a_file_that_cannot_be_served_is_an_error(content: object, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        options_of(content, "a.yaml")
    assert text in str(caught.value)


def test_a_value_that_yaml_cannot_convert_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("num_processes: 2024-99-99\n")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_command(["--config_file", str(file), "a.py"])
