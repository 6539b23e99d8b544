"""Jobs of two hosts: two network namespaces of this machine, joined by one link."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.selection import mostly_exhaustive
from tests.helpers.sources import ROOT
from tests.helpers.two_hosts import Host, environment, ip, needs_namespaces, two_hosts

pytestmark = [
    pytest.mark.engines,
    pytest.mark.distributed,
    needs_namespaces,
]

# Writes the validation losses of all epochs. With a file "wait" in the folder, it trains until it is ended.
_SCRIPT = """
import json, sys, time
from pathlib import Path
from trainwright import Trainer
from trainwright.callbacks import Callback
from tests.helpers.tasks import RegressionTask, regression_loader

folder, strategy, num_processes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
waits = (folder / "wait").exists()
losses = []


class Losses(Callback):
    def on_validation_end(self, trainer, task):
        losses.append(float(trainer.callback_metrics["val_loss"]))

    def on_train_step_end(self, trainer, task, result):
        (folder / f"step-of-{trainer.global_rank}").write_text(str(trainer.global_step))
        if waits:
            time.sleep(0.05)


trainer = Trainer(
    accelerator="cpu", devices="auto", strategy=strategy, max_epochs=1000 if waits else 3, seed=1, logger=False,
    default_root_dir=folder, enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0,
    callbacks=Losses(),
)
loader = regression_loader(64, batch_size=4 // num_processes)
trainer.fit(RegressionTask(momentum=0.9), loader, regression_loader(16, batch_size=4 // num_processes))
assert trainer.world_size == num_processes
if trainer.global_rank == 0:
    (folder / "losses.json").write_text(json.dumps(losses))
"""


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with two_hosts() as made:
        yield made


def _folder(path: Path, *, waits: bool = False) -> Path:
    path.mkdir()
    (path / "script.py").write_text(_SCRIPT)
    if waits:
        (path / "wait").touch()
    return path


def _words(folder: Path, strategy: str) -> list[str]:
    return [str(folder / "script.py"), str(folder), strategy, "2"]


def _losses(folder: Path) -> list[float]:
    return json.loads((folder / "losses.json").read_text())


@pytest.mark.parametrize("strategy", mostly_exhaustive(["ddp", "fsdp"], keep=["fsdp"]))
def test_two_hosts_train_as_one_process(strategy: str, hosts: list[Host], tmp_path: Path) -> None:
    alone, together = _folder(tmp_path / "alone"), _folder(tmp_path / "together")
    command = [sys.executable, str(alone / "script.py"), str(alone), "auto", "1"]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True, timeout=120)
    launchers = [host.launch(_words(together, strategy)) for host in hosts]
    outputs = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    assert _losses(together) == pytest.approx(_losses(alone), rel=1e-5)
    assert len(_losses(together)) == 3


@pytest.fixture
def running(hosts: list[Host], tmp_path: Path) -> Path:
    """Start a job of both hosts that trains until it is ended, and return its folder."""
    folder = _folder(tmp_path / "run", waits=True)
    for host in hosts:
        host.launch(["--rdzv_backend", "static", "--max_restarts", "1", *_words(folder, "ddp")])
    _wait_for_steps(folder, 1)
    return folder


def _wait_for_steps(folder: Path, num: int) -> None:
    deadline = time.monotonic() + 120
    files = [folder / f"step-of-{rank}" for rank in range(2)]
    while not all(file.exists() and int(file.read_text() or 0) >= num for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _end(host: Host, seconds: float) -> tuple[int, str]:
    output, _ = host.started[0].communicate(timeout=seconds)
    assert ip("netns", "pids", host.name) == ""
    return host.started[0].returncode, output.rpartition("trainwright launch: ")[2]


def test_both_hosts_end_when_their_link_drops(running: Path, hosts: list[Host]) -> None:
    hosts[1].set_link("down")
    for host, other in zip(hosts, (1, 0), strict=True):
        code, error = _end(host, 60)
        assert code == 1
        assert error.startswith(f"machine {other} has sent no heartbeat for 15 seconds")


@pytest.mark.exhaustive
def test_a_host_ends_when_the_other_one_dies(running: Path, hosts: list[Host]) -> None:
    hosts[1].kill()
    code, error = _end(hosts[0], 60)
    assert code == 1
    assert error.startswith("machine 1 has sent no heartbeat for 15 seconds: its launcher has ended")


def test_training_continues_after_a_short_loss_of_the_link(running: Path, hosts: list[Host]) -> None:
    hosts[1].set_link("down")
    time.sleep(3)
    hosts[1].set_link("up")
    _wait_for_steps(running, int((running / "step-of-0").read_text()) + 20)
