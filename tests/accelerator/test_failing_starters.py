"""User-written loops in which one rank fails, under each starter of processes and on two hosts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.accelerator.test_failing_loops import Case, explains
from tests.helpers.selection import mostly_exhaustive
from tests.helpers.slurm_cluster import needs_slurm, slurm_cluster
from tests.helpers.two_hosts import PORT, Host, environment, needs_namespaces, two_hosts

pytestmark = [pytest.mark.engines, pytest.mark.distributed]

_LOOP = str(Path(__file__).with_name("failing_loop.py"))
_LIMIT_S = 20.0
_SILENCE_S = 30.0  # after which a host that cannot be reached counts as lost
_IN_NOTEBOOK = (
    "import runpy, sys; from trainwright import notebook_launcher; "
    "notebook_launcher(runpy.run_path, (sys.argv.pop(1),), num_processes=2)"
)
_STARTERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "notebook_launcher": ["-c", _IN_NOTEBOOK],
    "mpirun": ["-m", "trainwright", "launch", "--mpi", "--cpu", "--num_processes", "2"],
    "ray": ["-m", "trainwright", "launch", "--ray", "--cpu", "--num_processes", "2"],
    "srun": [],
}
_NEEDS = {
    "mpirun": pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun: apt-get install openmpi-bin"),
    "ray": pytest.mark.requires("ray", reason="it starts the actors"),
    "srun": needs_slurm,
}
_FAILURES = [(kind, phase) for kind in ("raise", "SIGKILL", "sys.exit(0)") for phase in ("backward", "save_state")]


def _words(case: Case, folder: Path, **more: float) -> list[str]:
    """Return the arguments of the interpreter that runs the loop."""
    return [_LOOP, json.dumps({**case._asdict(), "lost_s": 8.0, "folder": str(folder), **more})]


def _seconds_since_failure(folder: Path) -> float:
    return time.time() - float((folder / "failed-at").read_text())


def _wait_for_failure(folder: Path) -> None:
    deadline = time.monotonic() + 90
    while not (folder / "failed-at").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _running(folder: Path) -> list[str]:
    """Return the process IDs of the ranks that still run."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_rank = f'"folder": "{folder}"' in file.read_text(errors="replace")
        except OSError:  # it has ended
            continue
        if is_rank:
            found.append(file.parent.name)
    return found


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder, slurm_cluster(Path(folder)) as variables:
        yield {"SLURM_CONF": variables["SLURM_CONF"]}


@pytest.mark.parametrize(("kind", "phase"), mostly_exhaustive(_FAILURES, keep=[("SIGKILL", "save_state")]))
@pytest.mark.parametrize("starter", [pytest.param(name, marks=_NEEDS.get(name, ())) for name in _STARTERS])
def test_every_process_of_a_starter_ends(
    starter: str, kind: str, phase: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    case = Case(kind, phase, "fsdp")
    command = [sys.executable, *_STARTERS[starter], *_words(case, tmp_path)]
    variables = {**environment(), "GLOO_SOCKET_IFNAME": "lo", "RAY_USAGE_STATS_ENABLED": "0"}
    if starter == "srun":
        command = ["srun", "-n2", *command]
        variables |= request.getfixturevalue("slurm")
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200
    )
    taken_s = _seconds_since_failure(tmp_path)
    print(f"{starter}, {case}: exit code {done.returncode}, {taken_s:.1f} s\n{done.stdout}")
    assert done.returncode > 0
    assert taken_s < 2 * _LIMIT_S  # twice that of a machine that is not busy
    assert not _running(tmp_path)
    # `notebook_launcher` and mpirun, which end the others themselves, name the first one.
    named_by_starter = {
        "raise": "ValueError: the user's own",
        "SIGKILL": "SIGKILL|signal 9",
        "sys.exit(0)": "SystemExit: 0",
    }
    assert explains(case, done.stdout) or re.search(named_by_starter[kind], done.stdout)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with two_hosts() as made:
        yield made


def _start(hosts: list[Host], starter: str, words: list[str], folder: Path) -> list[subprocess.Popen[str]]:
    if starter == "launch":
        return [host.launch(words, folder) for host in hosts]
    address = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    return [host.start(words, folder, RANK=str(host.number), **address) for host in hosts]


_ON_HOSTS = [
    (Case(kind, "save_state", strategy, who, starter),)
    for starter in ("launch", "by hand")
    for kind, who, strategy in (
        ("raise", 1, "fsdp"), ("SIGKILL", 1, "fsdp"), ("SIGKILL", 1, "ddp"), ("raise", 0, "fsdp"),
        ("pause", 1, "fsdp"), ("pause", 1, "ddp"),
    )
]  # fmt: skip


@needs_namespaces
@pytest.mark.parametrize("case", mostly_exhaustive(_ON_HOSTS, keep=[_ON_HOSTS[8], _ON_HOSTS[10]]), ids=str)
def test_every_process_of_two_hosts_ends(case: Case, hosts: list[Host], tmp_path: Path) -> None:
    processes = _start(hosts, case.starter, _words(case, tmp_path, pause_s=600.0), tmp_path)
    _wait_for_failure(tmp_path)
    limit_s = 2 * _LIMIT_S
    if case.kind == "pause":
        hosts[1].set_link("down")
        limit_s += _SILENCE_S
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=limit_s + 40)[0])
        except subprocess.TimeoutExpired:
            outputs.append("runs")
        print(f"{case}: exit code {process.returncode}, {_seconds_since_failure(tmp_path):.1f} s\n{outputs[-1]}")
    assert all(process.returncode for process in processes)
    assert _seconds_since_failure(tmp_path) < limit_s
    if case.kind == "pause":
        assert all("cannot be reached" in output for output in outputs)
    else:
        assert explains(
            case, outputs[1 - case.who] if case.kind == "SIGKILL" else outputs[case.who] + outputs[1 - case.who]
        )


@needs_namespaces
@pytest.mark.exhaustive
@pytest.mark.parametrize("starter", ["launch", "by hand"])
@pytest.mark.parametrize("harm", ["slow", "down for 3 s"])
def test_a_loop_of_two_hosts_continues(harm: str, starter: str, hosts: list[Host], tmp_path: Path) -> None:
    case = Case("pause", "save_state", "fsdp", 1, starter)
    processes = _start(hosts, starter, _words(case, tmp_path, pause_s=40.0), tmp_path)
    _wait_for_failure(tmp_path)
    if harm == "slow":
        hosts[1].slow_link()
    else:
        hosts[1].set_link("down")
        time.sleep(3)
        hosts[1].set_link("up")
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
