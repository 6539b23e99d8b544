"""Restarts: processes and launchers are killed, and the job resumes from its newest state."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainwright.processes.launcher import free_port

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

# "launcher": on the second machine, the first attempt kills its launcher at step 7.
_SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainwright import Accelerator
from trainwright.utils import ProjectConfiguration, set_seed

torch.set_num_threads(1)
folder, mode = Path(sys.argv[1]), sys.argv[2]
(folder / f"pid-{os.getpid()}").touch()
accelerator = Accelerator(cpu=True, seed=0, project_config=ProjectConfiguration(
    project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2))
set_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
inputs = torch.arange(160.0).reshape(40, 4) / 160
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


class Progress:
    epoch = step = 0

    def state_dict(self):
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state):
        self.epoch, self.step = state["epoch"], state["step"]


progress = Progress()
accelerator.register_for_checkpointing(progress)
if any((folder / "checkpoints").glob("checkpoint_*")):
    accelerator.load_state()
start = progress.step
while progress.epoch < 2:
    for x, y in loader:
        second = os.environ["GROUP_RANK"] == "1"
        if mode == "launcher" and progress.step == 7 and second and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        if progress.step % 3 == 0:
            accelerator.save_state()
    progress.epoch += 1
if accelerator.is_main_process:
    torch.save(accelerator.get_state_dict(model), folder / "last.pt")
    print("from step", start, "to", progress.step, flush=True)
"""


class _Job:
    """A job of two machines whose launchers are started one by one."""

    def __init__(self, folder: Path, mode: str, *options: str) -> None:
        folder.mkdir()
        self.folder, self.port, self.started = folder, free_port(), []
        (folder / "script.py").write_text(_SCRIPT)
        self.command = [sys.executable, "-m", "trainwright", "launch", "--cpu", "--num_processes", "2"]
        self.command += ["--num_machines", "2", "--main_process_ip", "127.0.0.1"]
        self.command += ["--main_process_port", str(self.port)]
        self.command += options
        self.script = [str(folder / "script.py"), str(folder), mode]

    started: list[subprocess.Popen[str]]

    def start(self, *options: str) -> subprocess.Popen[str]:
        self.started.append(
            subprocess.Popen(
                [*self.command, *options, *self.script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        return self.started[-1]

    def wait_until_reachable(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait_for_processes(self) -> None:
        """Wait until none of the script's processes exists."""
        deadline = time.monotonic() + 10
        files = [Path("/proc") / file.name.removeprefix("pid-") for file in self.folder.glob("pid-*")]
        assert len(files) >= 2
        while any(file.exists() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / "last.pt")


@pytest.fixture
def jobs() -> Iterator[list[_Job]]:
    made: list[_Job] = []
    yield made
    for launcher in (one for job in made for one in job.started):
        if launcher.poll() is None:
            launcher.kill()
        launcher.communicate()


def _ends(launcher: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str, str]:
    out, err = launcher.communicate(timeout=seconds)
    return launcher.returncode, out, err


@pytest.mark.exhaustive
def test_a_machine_that_is_started_again_resumes_the_job_bit_for_bit(tmp_path: Path, jobs: list[_Job]) -> None:
    options = ("--rdzv_backend", "c10d", "--rdzv_id", "job", "--max_restarts", "1")
    for mode in ("plain", "launcher"):
        jobs.append(_Job(tmp_path / mode, mode, *options))
        first = jobs[-1].start()
        jobs[-1].wait_until_reachable()  # the first launcher stores the rendezvous, and is not the one that is killed
        second = jobs[-1].start()
        if mode == "launcher":
            assert _ends(second)[0] == -signal.SIGKILL
            second = jobs[-1].start()
        found = [_ends(launcher) for launcher in (first, second)]
        assert [code for code, _, _ in found] == [0, 0], found
        output = "".join(out for _, out, _ in found)
        assert ("from step 6 to 20" if mode == "launcher" else "from step 0 to 20") in output
    torch.testing.assert_close(jobs[1].weights(), jobs[0].weights(), rtol=0, atol=0)


@pytest.mark.exhaustive
def test_with_the_static_rendezvous_the_other_machine_ends(tmp_path: Path, jobs: list[_Job]) -> None:
    jobs.append(_Job(tmp_path / "launcher", "launcher", "--rdzv_backend", "static", "--max_restarts", "1"))
    first, second = (jobs[-1].start("--machine_rank", str(rank)) for rank in range(2))
    assert _ends(second)[0] == -signal.SIGKILL
    start_s = time.monotonic()
    code, _, err = _ends(first, 60)
    assert code == 1
    assert time.monotonic() - start_s < 40
    last = err.rpartition("trainwright launch: ")[2]
    assert last.startswith("machine 1 has sent no heartbeat for 15 seconds: its launcher has ended")
    assert "Traceback" not in last
    jobs[-1].wait_for_processes()


def test_machines_that_do_not_meet_are_an_error_of_one_line(tmp_path: Path, jobs: list[_Job]) -> None:
    jobs.append(_Job(tmp_path / "plain", "plain", "--rdzv_backend", "c10d", "--rdzv_conf", "join_timeout=3"))
    code, _, err = _ends(jobs[-1].start(), 60)
    assert code == 1
    last = err.rpartition("trainwright launch: ")[2]
    assert last.startswith(f"the 2 machines did not meet at 127.0.0.1:{jobs[-1].port}")
    assert "Traceback" not in err
