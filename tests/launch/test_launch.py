"""`trainwright launch` with real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

_SCRIPT = """
import os, sys
from trainwright import Accelerator

accelerator = Accelerator(**({"cpu": True} if "--cpu" in sys.argv else {}))
facts = [accelerator.process_index, accelerator.num_processes, accelerator.mixed_precision,
         accelerator.gradient_accumulation_steps, str(accelerator.distributed_type).rpartition(".")[2], *sys.argv[1:]]
print(*facts, flush=True)
if "fail" in sys.argv and accelerator.process_index == 1:
    raise ValueError("bad luck")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    return path


def _launch(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainwright", "launch", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_one_process_gets_the_options(script: Path) -> None:
    found = _launch("--cpu", "--mixed_precision", "bf16", "--gradient_accumulation_steps", 3, script, "x", "--flag")
    assert (found.stdout.split(), found.returncode) == (["0", "1", "bf16", "3", "NO", "x", "--flag"], 0)


def test_a_failure_names_the_rank_and_the_error_last(script: Path) -> None:
    found = _launch("--cpu", "--num_processes", 2, script, "fail")
    assert found.returncode == 1
    *_, last, log = found.stderr.strip().splitlines()
    assert last.startswith("trainwright launch: rank 1 failed first")
    assert "exit code 1" in last
    assert "ValueError: bad luck" in last
    assert "ValueError: bad luck" in Path(log.removeprefix("Its output: ").rstrip(".")).read_text()
    assert found.stderr.count("[rank1]: ValueError: bad luck") == 2  # where it was raised, and in the last line


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(
            signal.SIGKILL, marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends them then")
        ),
    ],
)
def test_the_end_of_the_launcher_ends_the_processes(number: int, script: Path) -> None:
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "trainwright", "launch", "--cpu", "--num_processes", "2", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        pids = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
        launcher.send_signal(number)
        assert launcher.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_log_folder_that_is_a_file_is_an_error(script: Path) -> None:
    found = _launch("--cpu", "--num_processes", 2, "--log_dir", script, script)
    assert found.returncode == 2
    assert found.stderr.startswith(f"trainwright: error: --log_dir {script} cannot be created")
