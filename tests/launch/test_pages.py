"""Files of Accelerate's pages on launching, and the commands of our own page, run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.selection import mostly_exhaustive
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
    return sorted(found[1] for found in re.finditer(r"facts (.*)", done.stdout))


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


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("command", mostly_exhaustive(_STARTS, keep=_STARTS[1:2]))
def test_the_launch_commands_of_our_page_run(command: str) -> None:
    _write_programs()
    ranks = 4 if "--num_processes 4" in command else 2 if "--num_processes" in command else 1
    kind = next(
        (kind for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM") if f"--use_{kind.lower()}" in command), "MULTI_CPU"
    )
    ending = f"{'bf16' if 'bf16' in command else 'no'} {kind if ranks > 1 else 'NO'}"
    assert _facts(_run(command)) == [f"{rank} {ranks} {ending}" for rank in range(ranks)]


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
