"""Ranks as actors of Ray: by `trainwright launch --ray` and by `Trainer(launcher="ray")`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.selection import mostly_exhaustive
from trainwright.core.errors import ConfigurationError
from trainwright.core.process import detect, job
from trainwright.processes.launcher import free_port
from trainwright.processes.ray_actors import RayJob, _Place, _ranks, parse_launcher, run_on_ray

_PROGRAM = """
import json, os, sys, time
from pathlib import Path
import torch
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright import Trainer
from trainwright.callbacks import Callback, ModelCheckpoint
from trainwright.loggers import CSVLogger


class Reports(Callback):
    def on_train_step_end(self, trainer, task, result):
        rank, attempt = os.environ["RANK"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        Path(f"step-{attempt}-{rank}").write_text(f"{os.getpid()} {os.getppid()} {trainer.global_step}")
        if Path("slow").exists() and attempt == "0":
            time.sleep(0.3)


def trainer(**options):
    saver = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    return Trainer(
        strategy="ddp", accelerator="cpu", devices=2, max_steps=8, default_root_dir=".", callbacks=[saver, Reports()],
        logger=CSVLogger(".", version=0), enable_progress_bar=False, enable_model_summary=False, seed=0, **options,
    )


if __name__ == "__main__":
    task = RegressionTask(momentum=0.9)
    launcher = sys.argv[1] if len(sys.argv) > 1 else "auto"
    made = trainer(launcher=launcher)
    made.fit(task, regression_loader(32, 2, shuffle=True), regression_loader(4, 2))
    if os.environ.get("RANK", "0") == "0":
        saver = next(each for each in made.callbacks if isinstance(each, ModelCheckpoint))
        metrics = made.callback_metrics
        found = {"step": made.global_step, "val_loss": metrics.get("val_loss"), "best": saver.best_model_path}
        Path("result.json").write_text(json.dumps(found))
        torch.save(task.state_dict(), "weights.pt")
"""  # fmt: skip


def _start(folder: Path, *words: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(_PROGRAM)
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _launch(folder: Path, *options: str) -> subprocess.Popen[str]:
    return _start(
        folder, "-m", "trainwright", "launch", "--ray", "--cpu", "--num_processes", "2", *options, "program.py"
    )


def _output(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run without Ray."""
    folder = tmp_path_factory.mktemp("plain")
    _output(_start(folder, "program.py"))
    return folder


@pytest.mark.engines
@pytest.mark.distributed
@pytest.mark.requires("ray", reason="it starts the actors")
@pytest.mark.parametrize("kill", mostly_exhaustive(range(4), keep=[0]))
def test_a_killed_rank_or_actor_is_restarted_and_the_result_is_equal(kill: int, plain: Path, tmp_path: Path) -> None:
    folder, draw = tmp_path / "killed", random.Random(kill)
    folder.mkdir()
    (folder / "slow").touch()
    process = _launch(folder, "--max_restarts", "2")
    report = folder / f"step-0-{kill % 2}"
    deadline = time.monotonic() + 200
    while not (report.exists() and (found := report.read_text())):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    rank, actor, _ = map(int, found.split())
    time.sleep(draw.uniform(0, 2.2))  # training takes 2.4 s
    os.kill(actor if kill % 4 > 1 else rank, signal.SIGKILL)
    output = _output(process)
    assert "Restart 1 of 2." in output
    assert kill % 4 > 1 or f"rank {kill % 2} ended with exit code -9. Restart" in output
    assert (folder / "step-1-0").exists()  # the second attempt
    assert not (folder / "step-2-0").exists()
    expected = torch.load(plain / "weights.pt")
    torch.testing.assert_close(torch.load(folder / "weights.pt"), expected, rtol=0, atol=0)


@pytest.mark.engines
@pytest.mark.distributed
@pytest.mark.requires("ray", reason="it starts the actors")
def test_a_trainer_on_ray_leaves_the_results_in_the_process_that_called_it(plain: Path, tmp_path: Path) -> None:
    _output(_start(tmp_path / "ray", "program.py", "ray"))
    folders = (tmp_path / "ray", plain)
    found, expected = (json.loads((folder / "result.json").read_text()) for folder in folders)
    assert found["step"] == 8
    assert found["val_loss"] == expected["val_loss"]
    assert Path(found["best"]).name == Path(expected["best"]).name
    weights = [torch.load(folder / "weights.pt") for folder in folders]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_ranks_are_numbered_by_machine_and_see_its_gpus() -> None:
    places = [
        _Place("a", "10.0.0.1", 1, ["0"]),
        _Place("b", "10.0.0.2", 2, ["3"]),
        _Place("a", "10.0.0.1", 3, ["1"]),
    ]
    ranks = _ranks(places)
    assert [index for index, _ in ranks] == [0, 2, 1]
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")
    assert [[variables[name] for name in names] for _, variables in ranks] == [
        ["0", "0", "2", "0", "10.0.0.1", "0,1"],
        ["1", "1", "2", "0", "10.0.0.1", "0,1"],
        ["2", "0", "1", "1", "10.0.0.1", "3"],
    ]


@pytest.mark.parametrize("launcher", ["ray:max_restart=1", "ray:cpus=x", "ray:"])
def test_a_wrong_option_of_ray_is_an_error(launcher: str) -> None:
    with pytest.raises(ConfigurationError, match="is not an option"):
        parse_launcher(launcher)


@pytest.mark.slow
def test_a_cluster_that_cannot_be_reached_is_an_error_at_once() -> None:
    pytest.importorskip("ray")
    address, start = f"127.0.0.1:{free_port()}", time.monotonic()
    with pytest.raises(ConfigurationError, match=f"the Ray cluster at {address} cannot be reached: .*refused"):
        run_on_ray(RayJob(["true"], 1, address=address))
    assert time.monotonic() - start < 30  # Ray itself tries for minutes


def test_ray_is_a_launcher_without_variables_of_its_own() -> None:
    variables: dict[str, Any] = {"RANK": "1", "WORLD_SIZE": "2"}
    assert detect("ray:max_restarts=1", variables).launcher == "none"
    with pytest.raises(ConfigurationError, match="rays"):
        detect("rays", {})
    found = job({"TRAINWRIGHT_JOB": "x", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert (found.name, found.attempt) == ("x", 2)
