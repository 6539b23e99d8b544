"""Commands and files of Accelerate's pages on launching, and those of our own page, run or are refused.

Each command has the options of its page, with `trainwright` for `accelerate`. On a machine without GPUs the processes
run on the CPU; the options that need GPUs are read and checked.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright.cli.main import main
from trainwright.core.errors import ConfigurationError
from trainwright.launch.launch import check
from trainwright.launch.reading import options_of, read_command

_ROOT = Path(__file__).parents[2]

# Trains one step, and prints the process, its engine and its arguments.
_SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader
from trainwright import Accelerator


class BertLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class Block(BertLayer):
    pass


torch.set_num_threads(1)
accelerator = Accelerator(**({"cpu": True} if not torch.accelerator.is_available() else {}))
model = torch.nn.Sequential(BertLayer(), Block(), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = DataLoader(torch.ones(8, 4), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with accelerator.accumulate(model):
    accelerator.backward(model(next(iter(loader))).mean())
    optimizer.step()
    optimizer.zero_grad()
words = ["facts", accelerator.process_index, accelerator.num_processes, accelerator.mixed_precision,
         str(accelerator.distributed_type).rpartition(".")[2], type(accelerator.engine).__name__, *sys.argv[1:]]
sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once: two processes write to one pipe
sys.stdout.flush()
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("script.py", "train.py"):
        (tmp_path / name).write_text(_SCRIPT)


def _run(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell, in which `trainwright` is this one."""
    text = f'trainwright() {{ "{sys.executable}" -m trainwright "$@"; }}\n{command}'
    environment = {**os.environ, **variables}
    done = subprocess.run(
        ["bash", "-e", "-c", text], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def _facts(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines that the script has printed, in the order of ranks."""
    return sorted(found[1] for found in re.finditer(r"facts (.*)", done.stdout))


def _options(arguments: str) -> dict[str, Any]:
    command = read_command([*shlex.split(arguments), "script.py"])
    check(command)
    return command.config.set_options()


# Commands that run here


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("command", "ranks", "kind"),
    [
        ("trainwright launch script.py --arg1 --arg2", 1, "no NO"),
        ('CUDA_VISIBLE_DEVICES="0" ZE_AFFINITY_MASK="0" trainwright launch --cpu --debug script.py --arg1 --arg2', 1,
         "no NO"),
        ("trainwright launch --multi_gpu --mixed_precision=bf16 --num_processes=2 script.py --arg1 --arg2", 2,
         "bf16 MULTI_CPU"),
        (f"{shlex.quote(sys.executable)} -u -m trainwright launch --num_processes=2 script.py --arg1 --arg2", 2,
         "no MULTI_CPU"),
        ('ACCELERATE_DEBUG_MODE="1" torchrun --nproc_per_node=2 --nnodes=1 script.py --arg1 --arg2', 2, "no MULTI_CPU"),
    ],
)  # fmt: skip
def test_the_commands_of_the_launch_page_run(command: str, ranks: int, kind: str) -> None:
    expected = [f"{rank} {ranks} {kind}" for rank in range(ranks)]
    lines = _facts(_run(command, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"))
    assert [line.rpartition(" --arg1")[0].rpartition(" ")[0] for line in lines] == expected
    assert all(line.endswith(" --arg1 --arg2") for line in lines)


# Files that run here

_FSDP = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
_DEEPSPEED = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 1.0
  offload_optimizer_device: {device}
  offload_param_device: {device}
  zero3_init_flag: true
  zero3_save_16bit_model: {saves}
  zero_stage: {stage}
distributed_type: DEEPSPEED
fsdp_config: {{}}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 2
use_cpu: false
"""
_DEEPSPEED_FILE = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_config_file: ds_config.json
  zero3_init_flag: true
distributed_type: DEEPSPEED
downcast_bf16: 'no'
dynamo_backend: 'NO'
fsdp_config: {}
machine_rank: 0
main_training_function: main
megatron_lm_config: {}
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""
_DS_CONFIG = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": False,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "none"},
    },
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
    "steps_per_print": 2000000,
}
_GPUS = """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: MULTI_GPU
fsdp_config: {}
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 2
use_cpu: false
"""
_CPU = """
compute_environment: LOCAL_MACHINE
distributed_type: '{kind}'
downcast_bf16: 'no'
ipex_config:
  ipex: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: {ranks}
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""
_BF16 = " --mixed_precision bf16"  # instead of fp16, which DeepSpeed trains on GPUs only


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("text", "options", "ranks", "kind"),
    [
        (_FSDP, "", 2, "bf16 FSDP FSDPEngine"),
        (_DEEPSPEED.format(device="none", saves="false", stage=2), _BF16, 2, "bf16 DEEPSPEED DeepSpeedEngine"),
        (_DEEPSPEED_FILE, "", 2, "bf16 DEEPSPEED DeepSpeedEngine"),
        (_GPUS, _BF16, 2, "bf16 MULTI_CPU DDPEngine"),
        (_CPU.format(kind="NO", ranks=1), "", 1, "bf16 NO Engine"),
    ],
    ids=["fsdp", "zero2", "deepspeed-file", "gpus", "cpu"],
)
def test_the_files_of_the_pages_start_their_engine(text: str, options: str, ranks: int, kind: str) -> None:
    Path("my_config.yaml").write_text(text)
    Path("ds_config.json").write_text(json.dumps(_DS_CONFIG))
    done = _run(f"trainwright launch --config_file my_config.yaml{options} script.py")
    assert _facts(done) == [f"{rank} {ranks} {kind}" for rank in range(ranks)]


# Commands and files that need GPUs, or are refused


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--multi_gpu", {"multi_gpu": True}),
        ("--multi_gpu --mixed_precision=fp16 --num_processes=2",
         {"multi_gpu": True, "mixed_precision": "fp16", "num_processes": 2}),
        ("--gpu_ids 0,3 --num_processes 2", {"gpu_ids": "0,3", "num_processes": 2}),
        ("--use_deepspeed --mixed_precision=fp16 --zero_stage=3 --gradient_accumulation_steps=5 "
         "--gradient_clipping=1.0 --offload_param_device=cpu --offload_optimizer_device=nvme "
         "--zero3_save_16bit_model=true",
         {"use_deepspeed": True, "mixed_precision": "fp16", "zero_stage": 3, "gradient_accumulation_steps": 5,
          "gradient_clipping": 1.0, "offload_param_device": "cpu", "offload_optimizer_device": "nvme",
          "zero3_save_16bit_model": True}),
        ("--num_machines 2 --machine_rank 1 --main_process_ip 172.31.43.8 --main_process_port 29500 "
         "--num_processes 16",
         {"num_machines": 2, "machine_rank": 1, "main_process_ip": "172.31.43.8", "main_process_port": 29500,
          "num_processes": 16}),
    ],
)  # fmt: skip
def test_commands_for_gpus_are_read(arguments: str, expected: dict[str, Any]) -> None:
    assert _options(arguments) == expected


@pytest.mark.parametrize(
    ("device", "saves", "stage"), [("none", "false", 2), ("cpu", "true", 3)], ids=["zero2", "zero3-offload"]
)
def test_files_for_gpus_are_read(device: str, saves: str, stage: int) -> None:
    Path("my_config.yaml").write_text(_DEEPSPEED.format(device=device, saves=saves, stage=stage))
    assert _options("--config_file my_config.yaml") == {
        "use_deepspeed": True,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": device,
        "offload_param_device": device,
        "zero3_init_flag": True,
        "zero3_save_16bit_model": saves == "true",
        "zero_stage": stage,
        "machine_rank": 0,
        "mixed_precision": "fp16",
        "num_machines": 1,
        "num_processes": 2,
        "cpu": False,
    }


def test_a_file_for_four_cpu_machines_is_read() -> None:
    content = yaml.safe_load(_CPU.format(kind="MULTI_CPU", ranks=16))
    content |= {"num_machines": 4, "main_process_ip": "36.112.23.24", "main_process_port": 29500}
    found = options_of(content, "a.yaml")
    expected = {"cpu": True, "num_machines": 4, "num_processes": 16, "main_process_port": 29500}
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("compute_environment: AMAZON_SAGEMAKER\naws_secret_access_key: abc", "by --profile"),
        ("distributed_type: TPU\ntpu_use_cluster: true", "start the script on each machine of a pod"),
        ("mixed_precision: fp8\nfp8_config: {backend: MSAMP, opt_level: O2}", "fp8_backend='MSAMP' is unknown"),
    ],
)
def test_files_of_other_systems_are_refused(text: str, says: str) -> None:
    Path("my_config.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        _options("--config_file my_config.yaml")


@pytest.mark.parametrize("arguments", ["--tpu_cluster", "--fp8_opt_level=O1"])
def test_commands_of_other_systems_are_refused(arguments: str) -> None:
    with pytest.raises(ConfigurationError, match="supported"):
        _options(arguments)


# The commands of docs/launching.md

_PAGE = (_ROOT / "docs/launching.md").read_text(encoding="utf-8")
_COMMANDS = [
    re.sub(r"\s*\\\n\s*|\s+#[^\n]*$", " ", found).strip()
    for found in re.findall(r"^    (trainwright (?:[^\n]*\\\n)*[^\n]*)$", _PAGE, re.MULTILINE)
]
_MACHINES = [command for command in _COMMANDS if "--machine_rank" in command]
_STARTS = [one for one in _COMMANDS if " launch " in one and one not in _MACHINES and "hostfile" not in one]
_LIGHT = """
import sys
from trainwright import Accelerator

accelerator = Accelerator()
words = ["facts", accelerator.process_index, accelerator.num_processes, accelerator.mixed_precision,
         str(accelerator.distributed_type).rpartition(".")[2]]
sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once: two processes write to one pipe
sys.stdout.flush()
"""


def _write_programs() -> None:
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    for name in ("train.py", "package/train.py"):
        Path(name).write_text(_LIGHT)
    Path("program").write_text("#!/bin/sh\necho facts $RANK $WORLD_SIZE no MULTI_CPU\n")
    Path("program").chmod(0o755)
    Path("old.yaml").write_text("distributed_type: MULTI_CPU\nfp16: true\nnum_processes: 2\n")
    Path("fsdp1.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n")


def test_the_page_has_commands_for_each_case() -> None:
    assert (len(_COMMANDS), len(_MACHINES)) == (20, 2)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("command", _STARTS)
def test_the_launch_commands_of_our_page_run(command: str) -> None:
    _write_programs()
    ranks = 4 if "--num_processes 4" in command else 2 if "--num_processes" in command else 1
    kind = next(
        (kind for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM") if f"--use_{kind.lower()}" in command), "MULTI_CPU"
    )
    ending = f"{'bf16' if 'bf16' in command else 'no'} {kind if ranks > 1 else 'NO'}"
    assert _facts(_run(command)) == [f"{rank} {ranks} {ending}" for rank in range(ranks)]


def test_the_other_commands_of_our_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    _write_programs()
    for command in _COMMANDS:
        if " launch " not in command and " check " not in command:
            assert main(shlex.split(command)[1:]) == 0, command
    assert "mixed_precision=bf16" in capsys.readouterr().out
    assert read_command(["--config_file", "old.yaml", "train.py"]).config.mixed_precision == "fp16"
    assert read_command(["--config_file", "fsdp2.yaml", "train.py"]).config.fsdp_version == 2


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("command", [one for one in _COMMANDS if " check " in one])
def test_the_checks_of_our_page_pass(command: str, tmp_path: Path) -> None:
    Path("fsdp.yaml").write_text("distributed_type: FSDP\nuse_cpu: true\nnum_processes: 2\n")
    assert ", 0 fail, " in _run(command.replace("/shared/runs", str(tmp_path))).stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_the_commands_for_two_machines_of_our_page_run() -> None:
    _write_programs()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    changes = {"10.0.0.1": "127.0.0.1", "29500": port, "--num_processes 16": "--num_processes 2"}
    commands = []
    for command in _MACHINES:
        for old, new in changes.items():
            assert old in command
            command = command.replace(old, new)
        commands.append(command)
    assert _facts(_run(f"{' & '.join(commands)}\nwait $!\nwait")) == ["0 2 no MULTI_CPU", "1 2 no MULTI_CPU"]
