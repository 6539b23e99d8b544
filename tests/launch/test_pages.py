"""Files of Accelerate's pages on launching, and the commands of our own page, run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.cli.main import main
from trainwright.launch.reading import read_command
from trainwright.processes.launcher import free_port

_ROOT = Path(__file__).parents[2]


# Prints the process and its engine.
_SCRIPT = """
import sys
from trainwright import Accelerator

accelerator = Accelerator()
words = ["facts", accelerator.process_index, accelerator.num_processes, accelerator.mixed_precision,
         str(accelerator.distributed_type).rpartition(".")[2]]
sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once: two processes write to one pipe
sys.stdout.flush()
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("script.py", "train.py"):
        (tmp_path / name).write_text(_SCRIPT)


def _run(command: str) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell, in which `trainwright` is this one."""
    text = f'trainwright() {{ "{sys.executable}" -m trainwright "$@"; }}\n{command}'
    done = subprocess.run(["bash", "-e", "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def _facts(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines that the script has printed, in the order of ranks."""
    return sorted(found[1] for found in re.finditer(r"facts (.*)", done.stdout))


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


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("text", "kind"), [(_FSDP, "FSDP"), (_DEEPSPEED_FILE, "DEEPSPEED")])
def test_the_files_of_the_pages_start_their_engine(text: str, kind: str) -> None:
    Path("my_config.yaml").write_text(text)
    Path("ds_config.json").write_text(json.dumps(_DS_CONFIG))
    done = _run("trainwright launch --config_file my_config.yaml script.py")
    assert _facts(done) == [f"{rank} 2 bf16 {kind}" for rank in range(2)]


# The commands of docs/launching.md

_PAGE = (_ROOT / "docs/launching.md").read_text(encoding="utf-8")
_COMMANDS = [
    re.sub(r"\s*\\\n\s*|\s+#[^\n]*$", " ", found).strip()
    for found in re.findall(r"^    (trainwright (?:[^\n]*\\\n)*[^\n]*)$", _PAGE, re.MULTILINE)
]
_MACHINES = [command for command in _COMMANDS if "--machine_rank" in command]
_STARTS = [one for one in _COMMANDS if " launch " in one and one not in _MACHINES and "hostfile" not in one]


def _write_programs() -> None:
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    for name in ("train.py", "package/train.py"):
        Path(name).write_text(_SCRIPT)
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
    port = str(free_port())
    changes = {"10.0.0.1": "127.0.0.1", "29500": port, "--num_processes 16": "--num_processes 2"}
    commands = []
    for command in _MACHINES:
        for old, new in changes.items():
            assert old in command
            command = command.replace(old, new)
        commands.append(command)
    assert _facts(_run(f"{' & '.join(commands)}\nwait $!\nwait")) == ["0 2 no MULTI_CPU", "1 2 no MULTI_CPU"]
