"""Real processes by every launcher: torchrun, Slurm's variables, and the Trainer itself from a script or notebook."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.host.folders import mark_in_use
from trainwright.core.rng import seed_everything
from trainwright.processes import launcher
from trainwright.processes.worker import end_with

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


_ROOT = Path(__file__).parents[2]


# A user's script: everything in it is its own, and it has no `if __name__ == "__main__"`.
_SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainwright import TaskModule, Trainer
{imports}
torch.set_num_threads(1)
print("script runs", os.getpid(), flush=True)


class OwnTask(TaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        {step}
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("seen", float(len(batch[0])), reduce_fx="sum")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


inputs = torch.arange(32.0).reshape(8, 4) / 32
loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=1)
task = OwnTask()
trainer = Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False, {arguments})
trainer.fit(task, loader)
seen = trainer.validate(task, loader, verbose=False)
result = {{
    "rank": trainer.global_rank, "world": trainer.world_size, "steps": trainer.global_step,
    "weights": task.net.weight.flatten().tolist(), "loss": trainer.callback_metrics.get("loss"), "seen": seen,
}}
Path(sys.argv[1], f"rank-{{trainer.global_rank}}.json").write_text(json.dumps(result))
"""


def write_script(folder: Path, *, step: str = "pass", arguments: str = 'devices="auto"', imports: str = "") -> Path:
    """Write the script; `step` runs in each training step."""
    path = folder / "user_script.py"
    path.write_text(_SCRIPT.format(step=step, arguments=arguments, imports=imports))
    return path


def environment(**more: str) -> dict[str, str]:
    """Return this process's variables with the checkout on the path and gloo on the loopback device."""
    path = os.pathsep.join([str(_ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    linux = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **linux, **more}


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env=environment(**variables), capture_output=True, text=True, timeout=300, check=False
    )


def results_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]


def expected_weights() -> list[float]:
    """Return what a loop by hand learns: each step is the mean of two samples, one of each rank."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    inputs = torch.arange(32.0).reshape(8, 4) / 32
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for start in range(0, 8, 2):
            batch = inputs[start : start + 2]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(batch), batch.sum(dim=1, keepdim=True)).backward()
            optimizer.step()
    return net.weight.flatten().tolist()


def check(results: list[dict[str, Any]], ranks: list[int]) -> None:
    assert [result["rank"] for result in results] == ranks
    for result in results:
        assert (result["world"], result["steps"]) == (2, 8)
        assert result["weights"] == pytest.approx(expected_weights(), abs=1e-6)
        assert result["seen"] == [{"seen": 8.0}]
    assert len({result["loss"] for result in results}) == 1


def test_slurms_variables_make_two_tasks_one_run(tmp_path: Path) -> None:
    script = write_script(tmp_path)
    # No MASTER_PORT: both find the port by the job's number.
    common = {
        "SLURM_JOB_ID": str(random.SystemRandom().randrange(10**6)), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_NAME": "train",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            cwd=tmp_path,
            env=environment(**common, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=90) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    check(results_in(tmp_path), [0, 1])
    assert "launcher slurm (SLURM_PROCID=0" in outputs[0][0]


_OWN_BATCHES = """import dataclasses
import torch.distributed as dist

@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    targets: torch.Tensor
    def __getitem__(self, index):
        return (self.inputs, self.targets)[index]

def collate(samples):
    return Batch(*map(torch.stack, zip(*samples)))
"""


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.exhaustive)])
def test_the_trainer_starts_the_processes_of_a_script_without_running_it_again(context: str, tmp_path: Path) -> None:
    """Workers and other ranks unpickle classes of the script."""
    step = "gathered = [None] * 2; dist.all_gather_object(gathered, batch); assert type(gathered[1]) is Batch"
    script = write_script(tmp_path, arguments="devices=2", imports=_OWN_BATCHES, step=step)
    options = f"batch_size=1, collate_fn=collate, num_workers=1, multiprocessing_context={context!r}"
    text = script.read_text().replace("batch_size=1", options)
    if context == "spawn":  # a spawned worker of rank 0 imports the script
        definitions, rest = text.split("inputs = ")
        text = f"{definitions}\nif __name__ == '__main__':\n{textwrap.indent(f'inputs = {rest}', '    ')}"
    script.write_text(text)
    done = run([sys.executable, str(script), str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert context == "spawn" or done.stdout.count("script runs") == 1
    # The calling process is rank 0 and keeps the weights, the metrics and what validate returned.
    check(results_in(tmp_path), [0])


_CELLS = [
    "import torch\nfrom torch import nn\nfrom trainwright import TaskModule, Trainer\ntorch.set_num_threads(1)",
    """
class NotebookTask(TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def predict_step(self, batch, batch_idx):
        return self.global_rank

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
""",
    """
task, data = NotebookTask(), [torch.ones(2, 4)] * 8
before = task.net.weight.detach().clone()
trainer = Trainer(accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
trainer.fit(task, data)
again = Trainer(accelerator="cpu", devices=2, strategy="ddp_notebook", logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False)
ranks = again.predict(task, data[:4])
""",
    "print(trainer.global_step, trainer.world_size, bool((task.net.weight != before).any()), ranks)",
]


@pytest.mark.engines
@pytest.mark.requires("nbclient", "a notebook is executed for real")
@pytest.mark.requires("ipykernel", "by a real kernel")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets of the notebook's client
def test_a_notebook_trains_its_own_task_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    for name, value in environment(JUPYTER_PLATFORM_DIRS="1").items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in _CELLS])
    client = nbclient.NotebookClient(
        notebook, timeout=90, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    (output,) = notebook.cells[-1].outputs
    assert output["text"].split() == ["4", "2", "True", "[0,", "1,", "0,", "1]"]


class _Draws(RegressionTask):
    drawn: list[tuple[int, float, float, float]]

    def on_train_start(self) -> None:
        mine = torch.initial_seed(), random.random(), float(np.random.rand()), float(torch.rand(()))
        self.drawn = self.trainer.strategy.processes.gather_object(mine)


def test_seeds_reach_the_processes_that_the_trainer_starts() -> None:
    task = _Draws()
    seed_everything(3)
    random.random()
    quiet_trainer(devices=2, max_steps=1, num_sanity_val_steps=0).fit(task, regression_loader(8))
    seed_everything(3)
    random.random()
    assert task.drawn == [(3, random.random(), float(np.random.rand()), float(torch.rand(())))] * 2


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def _left_over(folder: Path, name: str, *, age_s: float) -> Path:
    work = folder / name
    work.mkdir()
    (work / "work.pkl").write_bytes(b"the task and its data")
    os.utime(work, (time.time() - age_s,) * 2)
    return work


@pytest.mark.usefixtures("own_temporary_folder")
def test_old_folders_without_an_owner_are_removed(tmp_path: Path) -> None:
    left = _left_over(tmp_path, "trainwright-work-abc", age_s=3600)
    used = _left_over(tmp_path, "trainwright-work-def", age_s=3600)
    young = _left_over(tmp_path, "trainwright-work-ghi", age_s=0)
    others = _left_over(tmp_path, "trainwright-abc", age_s=3600)
    (tmp_path / "trainwright-work-link").symlink_to(others)
    with mark_in_use(used):
        launcher._remove_left_over()
    assert not left.exists()
    assert used.exists()
    assert young.exists()
    assert list(others.iterdir())


def test_a_killed_process_failed_before_those_that_left_a_traceback(tmp_path: Path) -> None:
    children = launcher._Children(tmp_path)
    (tmp_path / "error-1.txt").write_text("rank 1:\nRuntimeError: Connection closed by peer")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        children._started[2] = process
        assert "rank 1" in str(children.failure())
        process.kill()
        process.wait()
        assert "rank 2 was killed by SIGKILL" in str(children.failure())


@pytest.mark.usefixtures("own_temporary_folder")
def test_a_worker_whose_parent_was_killed_removes_its_folder_and_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = _left_over(tmp_path, "trainwright-work-abc", age_s=0)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit):
        end_with(ended.pid, work)
    assert not work.exists()
