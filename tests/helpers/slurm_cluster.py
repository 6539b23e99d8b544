"""A Slurm cluster of this machine alone, as root: munged, slurmctld and slurmd with their files in one folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
needs_slurm = pytest.mark.skipif(
    not all(map(shutil.which, PROGRAMS)) or os.geteuid() != 0,
    reason="needs Slurm and root: apt-get install slurm-wlm munge",
)
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
MpiDefault=none
ReturnToService=2
JobRequeue=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=1000
PartitionName=main Nodes={host} Default=YES State=UP OverSubscribe=FORCE:8
"""


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start a cluster, yield the variables of its users, and end it with its jobs.

    Args:
        folder: Folder for all files. Its path must be short, because sockets are in it.
    """
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o711)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    controller_port, node_port = _free_ports()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            host=host, folder=folder, cores=os.cpu_count(), controller_port=controller_port, node_port=node_port
        )
    )
    variables = {**os.environ, "SLURM_CONF": str(configuration)}
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge/socket"]
    munged += [f"--{name}-file={folder}/munge/{name}" for name in ("pid", "log", "seed")]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D"]):
            with (folder / f"{command[0]}.out").open("wb") as out:
                started.append(subprocess.Popen(command, env=variables, stdout=out, stderr=subprocess.STDOUT))
            if command is munged:
                _wait_for(lambda: (folder / "munge/socket").exists(), folder)
        _wait_for(lambda: "idle" in _output(["sinfo", "-h", "-o", "%t"], variables), folder)
        yield variables
        _output(["scancel", "--user=root"], variables)
        _wait_for(lambda: not _output(["squeue", "-h"], variables).strip(), folder)
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(timeout=20)


def _free_ports() -> list[int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return [one.getsockname()[1], other.getsockname()[1]]


def _output(command: list[str], variables: dict[str, str]) -> str:
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=30).stdout


def _wait_for(condition: object, folder: Path, seconds: float = 60) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        logs = "\n".join(file.read_text(errors="replace")[-800:] for file in folder.glob("*.[lo][ou]*"))
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)
