"""Starting scripts by Slurm and MPI: the text of scripts and commands, errors, and real jobs."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.selection import mostly_exhaustive
from tests.helpers.slurm_cluster import needs_slurm, slurm_cluster
from trainwright.checkpoint import find_checkpoints
from trainwright.core.errors import ConfigurationError, MissingPackageError
from trainwright.launch.clusters import mpirun_command, sbatch_script
from trainwright.launch.launch import check_options, launch
from trainwright.launch.launch_config import LaunchConfig
from trainwright.launch.reading import LaunchCommand, read_command

_needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun: apt-get install openmpi-bin")


def _command(**options: Any) -> LaunchCommand:
    config = LaunchConfig(**{"num_processes": 4, **options})
    check_options(config)
    return LaunchCommand(config, "my train.py", ["--name", "it's"], "script", [])


def test_the_script_for_sbatch_has_all_options() -> None:
    words = "--slurm --num_processes 8 --num_machines 2 --num_cpu_threads_per_process 6 --mixed_precision bf16 "
    words += "--slurm_partition main --slurm_account lab --slurm_time 1:00:00 --slurm_output out.txt "
    words += "--slurm_option --constraint=a100 --slurm_option=--exclusive --main_process_port 1234"
    command = read_command([*words.split(), "my train.py", "it's"])
    assert sbatch_script(command).splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name='my train.py'",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=6",
        "#SBATCH --partition=main",
        "#SBATCH --account=lab",
        "#SBATCH --time=1:00:00",
        "#SBATCH --output=out.txt",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=USR1@120",
        "#SBATCH --requeue",
        "#SBATCH --constraint=a100",
        "#SBATCH --exclusive",
        "",
        "export OMP_NUM_THREADS=6",
        "export ACCELERATE_MIXED_PRECISION=bf16",
        "export MASTER_PORT=1234",
        "export SRUN_CPUS_PER_TASK=6",
        f"srun --kill-on-bad-exit=1 {sys.executable} -u 'my train.py' 'it'\"'\"'s'",
    ]


_HOSTILE = ("$(touch PWN)", "`touch PWN`", "'; touch PWN; '", '"; touch PWN; "', "]]> && touch PWN", "x" * 10_000)


def test_no_option_is_executed_by_the_shell_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\necho "$ACCELERATE_DYNAMO_BACKEND"\n')
    (tmp_path / "srun").chmod(0o755)
    names = ("slurm_partition", "slurm_account", "slurm_time", "dynamo_backend")
    for text in _HOSTILE:
        config = LaunchConfig(num_processes=1, slurm=True, **dict.fromkeys(names, text))
        script = sbatch_script(LaunchCommand(config, f"{text}.py", [text], "program", []))
        done = subprocess.run(
            ["bash"], input=script, text=True, check=True, capture_output=True, cwd=tmp_path,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        )  # fmt: skip
        assert done.stdout == f"--kill-on-bad-exit=1 {text}.py {text}\n{text}\n"
    assert [file.name for file in tmp_path.iterdir()] == ["srun"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"slurm": True, "machine_rank": 1}, "--machine_rank 1 has no effect with --slurm"),
        ({"slurm": True, "main_process_ip": "10.0.0.1"}, "--main_process_ip 10.0.0.1 has no effect with --slurm"),
        ({"mpi": True, "log_dir": "logs"}, "--log_dir logs has no effect with --mpi"),
        ({"slurm": True, "mpi": True}, "--slurm and --mpi exclude each other"),
        ({"slurm": True, "num_processes": None}, "--slurm needs --num_processes too"),
        ({"slurm": True, "num_machines": 3}, "cannot be divided by --num_machines 3"),
        ({"slurm": True, "slurm_output": "no-folder/%j.out"}, "the folder no-folder does not exist"),
        ({"slurm_time": "1:00"}, "--slurm_time needs --slurm too"),
        ({"mpirun_ccl": 2}, "--mpirun_ccl needs --mpi too"),
        ({"num_processes": 10**23}, f"--num_processes {10**23}: write a number of at most 1,000,000"),
        ({"print": True}, "--print needs --slurm, --mpi or --sagemaker too"),
        ({"mpirun_hostfile": "no-such-file"}, "--mpirun_hostfile no-such-file does not exist"),
    ],
)
def test_options_that_do_not_fit_are_errors(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        _command(**options)
    assert says in str(caught.value)


@pytest.mark.parametrize(("engine", "says"), [("slurm", "sbatch is missing.*--print"), ("mpi", "mpirun is missing")])
def test_a_missing_program_is_an_error(engine: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackageError, match=says):
        launch([f"--{engine}", "--num_processes", "2", str(tmp_path / "train.py")])


def _mpirun(version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mpirun").write_text(f"#!/bin/sh\necho '{version}'\n")
    (folder / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    (folder / "hosts").write_text("# first\n\nnode-1 slots=2\nnode-2:2\n")


_INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.13"


@pytest.mark.parametrize(
    ("version", "words", "variable"),
    [
        ("mpirun (Open MPI) 4.1.4", "--hostfile {hosts} --map-by ppr:2:node --bind-to none", ["-x", "{}={}"]),
        (_INTEL, "-f {hosts} -ppn 2", ["-genv", "{}", "{}"]),
    ],
)
def test_the_command_of_mpirun(
    version: str, words: str, variable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _mpirun(version, tmp_path, monkeypatch)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    hosts = str(tmp_path / "hosts")
    command = _command(mpirun_hostfile=hosts, num_machines=2, mixed_precision="bf16", mpirun_ccl=3)
    text = shlex.join(mpirun_command(command))
    assert text.startswith(f"mpirun -n 4 {words.format(hosts=hosts)} ")
    assert text.endswith(shlex.join(command.program))
    expected = {"NCCL_DEBUG": "INFO", "ACCELERATE_MIXED_PRECISION": "bf16", "MASTER_ADDR": "node-1"}
    expected |= {"MASTER_PORT": "29500", "CCL_WORKER_COUNT": "3"}
    for name, value in expected.items():
        assert f" {' '.join(variable).format(name, value)} " in text


_PAGE = (Path(__file__).parents[2] / "docs/clusters.md").read_text(encoding="utf-8")
_COMMANDS = [
    re.sub(r"\s*\\\n\s*|\s+#[^\n]*$", " ", found).split()[2:]
    for found in re.findall(r"^    (trainwright launch (?:[^\n]*\\\n)*[^\n]*)$", _PAGE, re.MULTILINE)
]


@pytest.mark.parametrize("words", _COMMANDS, ids=" ".join)
def test_the_commands_of_our_page_are_right(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _mpirun("mpirun (Open MPI) 4.1.4", tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "inputs.tsv", "metrics.tsv"):
        (tmp_path / name).touch()
    (yaml,) = re.findall(r"```yaml\n(.*?)```", _PAGE, re.DOTALL)
    (tmp_path / "sagemaker.yaml").write_text(yaml)
    if "--ray" in words or "--min_nodes" in words:  # they have no `--print`; other tests start them
        check_options(read_command(words).config)
        return
    assert launch([*(() if "--kubernetes" in words else ("--print",)), *words]) == 0
    assert "train.py" in (capsys.readouterr().out + "".join(file.read_text() for file in tmp_path.glob("*.yaml")))


_SCRIPT = """
import os, sys
import torch
from trainwright import Accelerator

accelerator = Accelerator()
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0)).item()
words = ["sum", total, accelerator.num_processes, accelerator.mixed_precision, *sys.argv[1:]]
os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def _start(folder: Path, *words: str, variables: dict[str, str] | None = None, **streams: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainwright", "launch", "--cpu", "--num_processes", "2", *words]
    environment = {**os.environ, **(variables or {})}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **streams)


def _launch(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    run = _start(folder, *words, variables=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = run.communicate(timeout=120)
    finally:
        run.kill()
    return subprocess.CompletedProcess(run.args, run.returncode, output, errors)


@pytest.mark.engines
@pytest.mark.distributed
@_needs_mpirun
def test_mpirun_starts_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    found = _launch(tmp_path, "--mpi", "--mixed_precision", "bf16", "train.py", "a  b")
    assert sorted(found.stdout.splitlines()) == ["sum 3.0 2 bf16 a  b"] * 2, found.stderr


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder, slurm_cluster(Path(folder)) as variables:
        yield {"SLURM_CONF": variables["SLURM_CONF"]}


def _wait(folder: Path, job: str, variables: dict[str, str]) -> str:
    """Wait until a job has left the queue, and return its output."""
    command = ["squeue", "-h", "-j", job]
    environment = {**os.environ, **variables}
    _wait_until(lambda: not subprocess.run(command, env=environment, capture_output=True, check=False).stdout.strip())
    (file,) = folder.glob(f"*-{job}.out")
    return file.read_text()


@pytest.mark.engines
@pytest.mark.distributed
@needs_slurm
def test_a_job_of_slurm_trains_two_ranks(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    found = _launch(
        tmp_path, "--slurm", "--slurm_partition", "main", "--mixed_precision", "bf16", "train.py", "a  b", **cluster
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("Submitted batch job ")
    output = _wait(tmp_path, found.stdout.split()[-1], cluster)
    assert sorted(output.splitlines()) == ["sum 3.0 2 bf16 a  b"] * 2


def _wait_until(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


_RESTARTED = """
import os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainwright import Callback, TaskModule, Trainer, seed_everything
from trainwright.callbacks import ModelCheckpoint
from trainwright.checkpoint import find_checkpoints


class Noisy(TaskModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Slow(Callback):
    def on_train_step_end(self, trainer, task, result):
        if trainer.global_step == 1:
            Path(f"rank-{trainer.global_rank}").write_text(str(os.getpid()))
        if "slow" in sys.argv:
            time.sleep(0.3)


seed_everything(1)
task = Noisy()
data = DataLoader(TensorDataset(torch.randn(128, 4)), batch_size=4, shuffle=True)
callbacks = [Slow(), ModelCheckpoint(every_n_train_steps=2)]
trainer = Trainer(max_epochs=3, logger=False, callbacks=callbacks, default_root_dir="runs", enable_progress_bar=False)
resumes = "resume" in sys.argv and find_checkpoints("runs/checkpoints")
trainer.fit(task, data, ckpt_path="last" if resumes else None)
if trainer.global_rank == 0:
    torch.save(task.state_dict(), "weights.pt")
    print("end", trainer.global_step, os.environ.get("SLURM_RESTART_COUNT"), trainer.resumed, flush=True)
"""


_ONE_THREAD = ("--num_cpu_threads_per_process", "1")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of a run of two processes that was not interrupted."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "train.py").write_text(_RESTARTED)
    found = _launch(folder, *_ONE_THREAD, "train.py")
    assert "end 48 None False" in found.stdout, found.stderr
    return torch.load(folder / "weights.pt")


_KILLS = mostly_exhaustive(range(10), keep=[0])


def _moment(folder: Path, draw: random.Random) -> list[int]:
    """Wait until both ranks train, and then until a random moment. Return the process IDs of the ranks."""
    files = [folder / f"rank-{rank}" for rank in range(2)]
    _wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    time.sleep(draw.uniform(0, 7))
    return [int(file.read_text()) for file in files]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.engines
@pytest.mark.distributed
@_needs_mpirun
@pytest.mark.parametrize("kill", _KILLS)
def test_a_killed_run_of_mpirun_resumes_and_gives_the_same_weights(
    kill: int, uninterrupted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(_RESTARTED)
    words = ("--mpi", *_ONE_THREAD, "train.py", "resume")
    with (tmp_path / "output").open("w") as output:
        run = _start(tmp_path, *words, "slow", stdout=output, stderr=output)
    ranks = _moment(tmp_path, random.Random(kill))
    os.kill([run.pid, *ranks][kill % 3], signal.SIGKILL)  # the command has become mpirun
    assert run.wait(timeout=30) != 0, (tmp_path / "output").read_text()
    _wait_until(lambda: not any(map(_is_running, ranks)), 4)  # long before they would have ended by themselves
    resumes = bool(find_checkpoints(tmp_path / "runs/checkpoints"))
    found = _launch(tmp_path, *words)
    assert f"end 48 None {resumes}" in found.stdout, found.stderr
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt"), uninterrupted, rtol=0, atol=0)


@pytest.mark.engines
@pytest.mark.distributed
@needs_slurm
@pytest.mark.parametrize("kill", _KILLS)
def test_a_job_that_is_signalled_is_requeued_and_gives_the_same_weights(
    kill: int, cluster: dict[str, str], uninterrupted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    variables = {**os.environ, **cluster}
    (tmp_path / "train.py").write_text(_RESTARTED)
    job = _launch(tmp_path, "--slurm", *_ONE_THREAD, "train.py", "slow", **cluster).stdout.split()[-1]
    _moment(tmp_path, random.Random(kill))
    subprocess.run(["scancel", "--signal=USR1", job], env=variables, check=True)
    show = ["squeue", "-h", "-o", "%r", "-j", job]
    _wait_until(lambda: b"BeginTime" in subprocess.run(show, env=variables, capture_output=True, check=True).stdout)
    # Slurm waits two minutes before it starts a requeued job.
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], env=variables, check=True)
    assert "end 48 1 True" in _wait(tmp_path, job, cluster)
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt"), uninterrupted, rtol=0, atol=0)
