"""DeepSpeed's hostfile, which lists the machines of a job and their devices, and the start of machines with pdsh.

An invalid file raises ConfigurationError, and a missing program MissingPackageError, before anything is started.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError, MissingPackageError
from trainwright.core.process import environment, variable
from trainwright.launch import child
from trainwright.launch.launch_config import LaunchConfig
from trainwright.launch.reading import LaunchCommand, known_options

_HANDED_ON = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "NCCL_", "GLOO_", "UCX_", "PYTHON", "LD_LIBRARY_PATH")
# Options that are not handed on as they are.
_OWN = (
    *("deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter", "deepspeed_multinode_launcher"),
    *("machine_rank", "gpu_ids"),
)
_REACH_SECONDS = 8
_LAST_OUTPUT_SECONDS = 0.5
_FAILURE = re.compile(rf"(?:{child.ENDED}|^pdsh@.*exited with exit code) (\d+)|^pdsh@.*connect".encode())
_HOST = re.compile(r"\w[\w.:@-]*")  # pdsh and ssh read other characters as options, lists and files
_Hosts = dict[str, list[int]]


def read_hosts(config: LaunchConfig) -> _Hosts:
    """Return the machines of a job in the order of the hostfile, with the numbers of their devices."""
    from trainwright.strategies.deepspeed.library import read_hostfile  # torch takes seconds

    path = str(config.deepspeed_hostfile)
    if not Path(path).is_file():
        raise ConfigurationError(f"--deepspeed_hostfile {path} does not exist. Check the path.")
    filters = config.deepspeed_inclusion_filter or "", config.deepspeed_exclusion_filter or ""
    try:
        hosts = read_hostfile(path, *filters)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--deepspeed_hostfile {path}, or a filter of its machines: {error}.") from error
    for name in hosts:
        if not _HOST.fullmatch(name):
            raise ConfigurationError(f"--deepspeed_hostfile {path}: {name!r} is not the name of a machine.")
    if len({len(slots) for slots in hosts.values()}) != 1:
        counts = ", ".join(f"{name} {len(slots)}" for name, slots in hosts.items()) or "none"
        raise ConfigurationError(
            f"machines need the same number of slots, at least 1. Slots by the hostfile and its filters: {counts}."
        )
    return hosts


def with_hostfile(command: LaunchCommand) -> tuple[LaunchCommand, _Hosts | None]:
    """Return the command with the options of the hostfile, and the machines for pdsh. None: pdsh is not used."""
    config = command.config
    launcher = command.config.deepspeed_multinode_launcher or "standard"
    if launcher not in ("standard", "pdsh"):
        raise ConfigurationError(
            f"--deepspeed_multinode_launcher {launcher} is not supported. Use standard or pdsh, or start the script by "
            "mpirun or srun itself."
        )
    if not config.deepspeed_hostfile:
        if launcher == "pdsh" and (config.num_machines or 1) > 1:
            raise ConfigurationError("--deepspeed_multinode_launcher pdsh needs --deepspeed_hostfile too.")
        return command, None
    hosts = read_hosts(config)
    uses_pdsh = launcher == "pdsh"
    rank = 0 if uses_pdsh else _own_rank(hosts) if config.machine_rank is None else config.machine_rank
    slots = list(hosts.values())[min(max(rank, 0), len(hosts) - 1)]
    found: dict[str, Any] = {"num_machines": len(hosts), "num_processes": len(hosts) * len(slots)}
    found["gpu_ids"] = None if config.cpu else ",".join(map(str, slots))
    notes = [
        f"{name}={value} of {config.deepspeed_hostfile} is used, not {getattr(config, name)}."
        for name, value in found.items()
        if getattr(config, name) not in (None, "all", value)
    ]
    config = replace(
        config,
        **found,
        machine_rank=rank,
        main_process_ip=config.main_process_ip or next(iter(hosts)).rpartition("@")[2],
        main_process_port=config.main_process_port or 29500,
    )
    return replace(command, config=config, notes=command.notes + notes), hosts if uses_pdsh else None


def _own_rank(hosts: _Hosts) -> int:
    """Return the position of this machine's name in the hostfile. Raise if the file does not have it once."""
    own = socket.gethostname()
    ranks = [rank for rank, name in enumerate(hosts) if name in (own, own.partition(".")[0], socket.getfqdn())]
    if len(ranks) != 1:
        raise ConfigurationError(f"{own} is not in the hostfile. Pass --machine_rank, from 0 to {len(hosts) - 1}.")
    return ranks[0]


def start_machines(command: LaunchCommand, hosts: _Hosts) -> int:
    """Start the command on all machines by pdsh, and return the largest exit code. A failure ends all machines."""
    if shutil.which("pdsh") is None:
        raise MissingPackageError("--deepspeed_multinode_launcher pdsh: pdsh is missing. Run: apt-get install pdsh")
    kind = variable("PDSH_RCMD_TYPE") or "ssh"
    variables = environment() | {"PDSH_RCMD_TYPE": kind}
    _check_reachable(hosts, variables)
    text = _remote_text(command, hosts)
    words = ["sh", "-c", text if kind == "exec" else shlex.quote(text)]  # others pass words to a shell
    pdsh = [*child.command(os.getpid()), "pdsh", "-S", "-b", "-f", str(len(hosts)), "-w", ",".join(hosts), *words]
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with subprocess.Popen(pdsh, stderr=subprocess.PIPE, env=variables, start_new_session=True) as run:
            try:
                return _follow(run)
            finally:
                run.terminate()  # it closes the connections, which ends the machines
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _follow(run: subprocess.Popen[bytes]) -> int:
    """Forward the output of pdsh until pdsh ends or a machine has failed. Return the exit code."""
    assert run.stderr is not None
    for line in run.stderr:
        sys.stderr.write(line.decode(errors="replace"))
        failure = _FAILURE.search(line)
        if failure is not None:
            time.sleep(_LAST_OUTPUT_SECONDS)
            return int(failure[1] or 1)
    return run.wait()


def _remote_text(command: LaunchCommand, hosts: _Hosts) -> str:
    """Return the shell command of a machine. pdsh replaces %n by its rank."""
    words = [f"--{name}={value}" for name, value in command.config.set_options().items() if name not in _OWN]
    words += {"module": ["-m"], "program": ["--no_python"]}.get(command.kind, [])
    handed = [f"{name}={value}" for name, value in handed_variables().items()]
    program = ["exec", "env", *handed, *child.command("machine"), sys.executable, "-m", "trainwright", "launch"]
    last = [*words, "--", command.script, *command.arguments]
    folder, start, rest = (shlex.join(part).replace("%", "%%") for part in ([str(Path.cwd())], program, last))
    cases = " ".join(f"{rank}) d={','.join(map(str, slots))};;" for rank, slots in enumerate(hosts.values()))
    devices = "" if command.config.cpu else " --gpu_ids=$d"
    return f"cd {folder} && case %n in {cases} esac && {start} --machine_rank=%n{devices} {rest}"


def handed_variables() -> dict[str, str]:
    """Return the variables that other machines receive: variables of libraries, then those in `.deepspeed_env`."""
    of_options = {option.variable for option in known_options().values()}  # their values are flags
    found = {
        name: value
        for name, value in environment().items()
        if (name == "PATH" or name.startswith(_HANDED_ON)) and name not in of_options
    }
    for folder in (Path.home(), Path.cwd()):
        file = folder / (variable("DS_ENV_FILE") or ".deepspeed_env")
        for line in file.read_text().splitlines() if file.is_file() else ():
            name, equals, value = line.strip().partition("=")
            if equals and not name.startswith("#"):
                found[name] = value
    return found


def _check_reachable(hosts: _Hosts, variables: dict[str, str]) -> None:
    """Raise if pdsh cannot run `true` on all machines."""
    command = ["pdsh", "-S", "-f", str(len(hosts)), "-u", str(_REACH_SECONDS), "-w", ",".join(hosts), "true"]
    done = subprocess.run(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,  # ssh asks for no password
    )
    if done.returncode:
        problems = "; ".join(done.stderr.split("\n")).rstrip("; ")
        raise ConfigurationError(
            f"a machine of the hostfile cannot be reached: {problems}. Nothing has been started. Check its name, and "
            "that ssh connects to it without a password."
        )
