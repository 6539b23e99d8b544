"""A job whose machines may leave and come back: two launchers on this machine, of which one is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from trainwright.core.errors import ConfigurationError
from trainwright.launch.launch import check_options
from trainwright.launch.launch_config import LaunchConfig
from trainwright.processes.launcher import free_port

_ROOT = Path(__file__).parents[2]
_VARIABLES = {**os.environ, "PYTHONPATH": f"{_ROOT}:{_ROOT}/src"}
_SCRIPT = """
import os, time
from pathlib import Path
import torch
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright import Trainer
from trainwright.callbacks import Callback, ModelCheckpoint

class Reports(Callback):
    def on_train_step_end(self, trainer, task, result):
        Path(f"group-{os.environ['GROUP_RANK']}").write_text(f"{trainer.global_step} {trainer.world_size}")
        time.sleep(3.0 if trainer.world_size == 1 else 0.1)

if __name__ == "__main__":
    torch.set_num_threads(1)
    task = RegressionTask(momentum=0.9)
    trainer = Trainer(
        strategy="ddp", accelerator="cpu", max_steps=40, default_root_dir=".", seed=0, logger=False,
        callbacks=[ModelCheckpoint(every_n_train_steps=2), Reports()],
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(task, regression_loader(128, 2, shuffle=True))
    if trainer.is_global_zero:
        torch.save(task.state_dict(), "weights.pt")
        Path("sizes").write_text(f"{trainer.world_size} {trainer.accumulate_grad_batches}")
"""


def _start(folder: Path, port: int, name: str) -> subprocess.Popen[bytes]:
    words = "--cpu --num_machines 2 --num_processes 2 --min_nodes 1 --rdzv_backend c10d --rdzv_id job "
    words += f"--main_process_ip 127.0.0.1 --main_process_port {port} --rdzv_conf last_call_timeout=2,join_timeout=60"
    with open(folder / f"{name}.out", "w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "trainwright", "launch", *words.split(), "script.py"],
            cwd=folder,
            env=_VARIABLES,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_for(folder: Path, name: str, step: int, world: int, launcher: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        words = (folder / name).read_text().split() if (folder / name).exists() else []
        if words and int(words[0]) >= step and int(words[1]) == world:
            return
        assert launcher.poll() is None, (folder / "first.out").read_text()
        time.sleep(0.02)
    raise AssertionError(f"step {step} with {world} processes was not reached:\n{(folder / 'first.out').read_text()}")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_continues_without_a_machine_and_takes_it_back(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    port = free_port()
    launchers = [_start(tmp_path, port, "first")]
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # the first launcher stores the rendezvous
            with socket.socket() as client:
                if not client.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.05)
        launchers.append(_start(tmp_path, port, "second"))
        _wait_for(tmp_path, "group-1", 5, 2, launchers[0])
        os.killpg(launchers[1].pid, signal.SIGKILL)
        _wait_for(tmp_path, "group-0", 6, 1, launchers[0])
        launchers.append(_start(tmp_path, port, "third"))
        _wait_for(tmp_path, "group-1", 9, 2, launchers[0])
        assert launchers[0].wait(timeout=150) == 0, (tmp_path / "first.out").read_text()
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
    assert (tmp_path / "sizes").read_text() == "2 1"
    # Equal weights: the global batch stayed the same, and each sample was read once.
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "script.py").write_text(_SCRIPT.replace('strategy="ddp"', "accumulate_grad_batches=2"))
    subprocess.run([sys.executable, "script.py"], cwd=plain, check=True, env={**_VARIABLES, "GROUP_RANK": "0"})
    torch.testing.assert_close(
        torch.load(tmp_path / "weights.pt"), torch.load(plain / "weights.pt"), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rdzv_id": None}, "needs --rdzv_backend c10d, --rdzv_id"),
        ({"rdzv_backend": "static"}, "needs --rdzv_backend c10d"),
        ({"min_nodes": 3}, "expected 1 to --num_machines 2"),
    ],
)
def test_options_of_machines_that_may_leave(options: dict[str, object], message: str) -> None:
    given = {"num_machines": 2, "num_processes": 2, "min_nodes": 1, "rdzv_backend": "c10d", "rdzv_id": "job",
             "main_process_ip": "a", "main_process_port": 1}  # fmt: skip
    check_options(LaunchConfig(**given))
    with pytest.raises(ConfigurationError, match=message):
        check_options(LaunchConfig(**{**given, **options}))
