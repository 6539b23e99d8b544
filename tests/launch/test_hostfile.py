"""DeepSpeed's hostfile: machines, filters, and starting the command on each machine or once by pdsh."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainwright.core.errors import ConfigurationError
from trainwright.launch import hostfile
from trainwright.launch.hostfile import read_hosts, start_machines, with_hostfile
from trainwright.launch.launch_config import LaunchConfig
from trainwright.launch.reading import LaunchCommand
from trainwright.processes.launcher import free_port

_HOSTS = "# machines\nnode-1 slots=4\n\nnode-2 slots=4\nnode-3 slots=4\n"
_needs_pdsh = pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is missing: apt-get install pdsh")


def _command(text: str, tmp_path: Path, **options: object) -> LaunchCommand:
    file = tmp_path / "hosts"
    file.write_text(text)
    config = LaunchConfig(deepspeed_hostfile=str(file), **options)  # type: ignore[arg-type]
    return LaunchCommand(config, "script.py", [], "script", [])


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", {"node-1": [0, 1, 2, 3], "node-2": [0, 1, 2, 3], "node-3": [0, 1, 2, 3]}),
        ("node-3:2,0,2@node-1:1,3", "", {"node-1": [1, 3], "node-3": [0, 2]}),
        ("", "node-2", {"node-1": [0, 1, 2, 3], "node-3": [0, 1, 2, 3]}),
        ("", "node-1:0@node-2:1@node-3:2", {"node-1": [1, 2, 3], "node-2": [0, 2, 3], "node-3": [0, 1, 3]}),
    ],
)
def test_filters_choose_machines_and_slots(
    include: str, exclude: str, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    found = _command(_HOSTS, tmp_path, deepspeed_inclusion_filter=include, deepspeed_exclusion_filter=exclude)
    assert list(read_hosts(found.config).items()) == list(expected.items())


@pytest.mark.parametrize(
    ("text", "include", "exclude", "expected"),
    [
        (_HOSTS, "node-1", "node-2", "mutually exclusive"),
        (_HOSTS, "nod-1", "", "Hostname 'nod-1' not found"),
        (_HOSTS, "node-1:4", "", "No slot '4' specified on host 'node-1'"),
        (_HOSTS, "", "node-1:0", "Slots by the hostfile and its filters: node-1 3, node-2 4"),
        ("node-1 slots=1\nnode-1 slots=1\n", "", "", "multiple entries for node-1"),
        ("node-1\n", "", "", "a bad entry: node-1"),
        ("-oProxyCommand=x slots=1\n", "", "", "'-oProxyCommand=x' is not the name of a machine"),
    ],
)
def test_what_is_wrong_is_an_error(text: str, include: str, exclude: str, expected: str, tmp_path: Path) -> None:
    found = _command(text, tmp_path, deepspeed_inclusion_filter=include, deepspeed_exclusion_filter=exclude)
    with pytest.raises(ConfigurationError) as caught:
        read_hosts(found.config)
    assert expected in str(caught.value)


def test_options_follow_from_the_hostfile_and_the_own_name(tmp_path: Path) -> None:
    own = socket.gethostname()
    text = f"192.0.2.77 slots=4\n{own} slots=2\n"
    filters = {"deepspeed_inclusion_filter": f"192.0.2.77:1,3@{own}"}
    command, machines = with_hostfile(_command(text, tmp_path, **filters, num_processes=9))
    assert machines is None
    assert command.notes == [f"num_processes=4 of {tmp_path / 'hosts'} is used, not 9."]
    found = command.config
    assert (found.num_machines, found.machine_rank, found.num_processes, found.gpu_ids) == (2, 1, 4, "0,1")
    assert (found.main_process_ip, found.main_process_port) == ("192.0.2.77", 29500)
    command, _ = with_hostfile(_command(text, tmp_path, machine_rank=0, deepspeed_exclusion_filter="192.0.2.77:0,1"))
    assert command.config.gpu_ids == "2,3"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "is not in the hostfile. Pass --machine_rank, from 0 to 0"),
        ({"deepspeed_multinode_launcher": "openmpi"}, "openmpi is not supported. Use standard or pdsh"),
    ],
)
def test_a_machine_or_launcher_that_does_not_fit_is_an_error(
    options: dict[str, str], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        with_hostfile(_command("192.0.2.77 slots=1\n", tmp_path, **options))


@_needs_pdsh
@pytest.mark.parametrize(("name", "kind"), [("no-such-machine", "rsh"), ("192.0.2.77", "ssh")])
def test_a_machine_that_cannot_be_reached_is_named(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\necho Connection refused >&2\nexit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PDSH_RCMD_TYPE", kind)
    begin = time.monotonic()
    with pytest.raises(ConfigurationError, match=rf"cannot be reached: .*{name}.*Nothing has been started"):
        start_machines(_command(_HOSTS, tmp_path), {name: [0]})
    assert time.monotonic() - begin < 10


def test_variables_are_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # a flag hands it on
    monkeypatch.setenv("SECRET", "x")
    (tmp_path / ".deepspeed_env").write_text("# of this job\nGREETING=a = b\n\n")
    found = hostfile.variables_to_send()
    assert found["GREETING"] == "a = b"
    assert found["NCCL_DEBUG"] == "INFO"
    assert {"PATH"} <= set(found)
    assert not {"SECRET", "ACCELERATE_MIXED_PRECISION"} & set(found)


_SCRIPT = """
import os, sys, time
import torch
from trainwright import Accelerator

accelerator = Accelerator()
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0)).item()
print("sum", total, os.getcwd(), os.environ.get("GREETING"), *sys.argv[1:], flush=True)
if "fail" in sys.argv and accelerator.process_index == 1:
    raise ValueError("bad luck")
if {"fail", "wait"} & set(sys.argv):
    open(f"{os.getpid()}.pid", "w").close()
    time.sleep(100)
"""


def _start(tmp_path: Path, *words: str, launcher: str, **variables: str) -> subprocess.Popen[str]:
    (tmp_path / "script.py").write_text(_SCRIPT)
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    (tmp_path / ".deepspeed_env").write_text("GREETING=it's 100%\n")
    options = ["--cpu", "--main_process_port", str(free_port()) if launcher == "pdsh" else "29713"]
    options += ["--deepspeed_hostfile", "hosts", "--deepspeed_multinode_launcher", launcher]
    command = [sys.executable, "-m", "trainwright", "launch", *options, *words]
    environment = {**os.environ, "PDSH_RCMD_TYPE": "exec", **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.engines
@pytest.mark.distributed
def test_standard_is_started_on_each_machine(tmp_path: Path) -> None:
    runs = [_start(tmp_path, "--machine_rank", str(rank), "script.py", launcher="standard") for rank in range(2)]
    found = [run.communicate(timeout=100) for run in runs]
    assert [out for out, _ in found] == [f"sum 3.0 {tmp_path} None\n"] * 2, found


# A program in the place of ssh that runs what ssh would hand to a shell.
_SSH = """#!/bin/sh
while [ "$1" != localhost ] && [ "$1" != 127.0.0.1 ]; do shift; done
shift
cd / && exec sh -c "$*"
"""


@pytest.mark.engines
@pytest.mark.distributed
@_needs_pdsh
def test_pdsh_starts_all_machines(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(_SSH)
    (tmp_path / "bin/ssh").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    run = _start(tmp_path, "script.py", "a  b", "%n;$HOME", launcher="pdsh", PATH=path, PDSH_RCMD_TYPE="ssh")
    out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    line = f"sum 3.0 {tmp_path} it's 100% a  b %n;$HOME"
    assert sorted(out.splitlines()) == [f"127.0.0.1: {line}", f"localhost: {line}"]


def _ended(tmp_path: Path) -> None:
    deadline = time.monotonic() + 15
    while any(Path(f"/proc/{file.stem}").exists() for file in tmp_path.glob("*.pid")):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.engines
@pytest.mark.distributed
@_needs_pdsh
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends pdsh with a killed launcher")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_all_machines(number: int, tmp_path: Path) -> None:
    run = _start(tmp_path, "script.py", "wait", launcher="pdsh")
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.pid"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run.send_signal(number)
    run.communicate(timeout=30)
    assert run.returncode == (-number if number == signal.SIGKILL else 128 + number)
    _ended(tmp_path)


@pytest.mark.engines
@pytest.mark.distributed
@_needs_pdsh
def test_a_failure_ends_all_machines(tmp_path: Path) -> None:
    run = _start(tmp_path, "script.py", "fail", launcher="pdsh")
    _, err = run.communicate(timeout=100)
    assert run.returncode == 1
    assert "127.0.0.1: trainwright launch: rank 1 failed first" in err
    assert "127.0.0.1: trainwright launch: this machine ended with exit code 1" in err
    _ended(tmp_path)
