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

# Beginnings of the names of variables that other machines receive.
_SENT_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "NCCL_", "GLOO_", "UCX_", "PYTHON", "LD_LIBRARY_PATH")
# Options that other machines do not receive, or receive with a value of their own.
_NOT_SENT = (
    "deepspeed_hostfile",
    "deepspeed_inclusion_filter",
    "deepspeed_exclusion_filter",
    "deepspeed_multinode_launcher",
    "machine_rank",
    "gpu_ids",
)
_REACH_SECONDS = 8
_LAST_OUTPUT_SECONDS = 0.5  # a failed machine may still send the rest of its output
# The exit code of a machine's program, by that program or by pdsh, or a connection that failed.
_FAILURE = re.compile(rf"(?:{child.ENDED}|^pdsh@.*exited with exit code) (\d+)|^pdsh@.*connect".encode())
_HOST = re.compile(r"\w[\w.:@-]*")  # pdsh and ssh read other characters as options, lists and files
_Hosts = dict[str, list[int]]  # {"node1": [0, 1], "node2": [0, 1]}


def read_hosts(config: LaunchConfig) -> _Hosts:
    """Return the machines of a job in the order of the hostfile, with the numbers of their devices."""
    from trainwright.strategies.deepspeed.library import read_hostfile  # torch takes seconds

    path = str(config.deepspeed_hostfile)
    if not Path(path).is_file():
        raise ConfigurationError(f"--deepspeed_hostfile {path} does not exist. Check the path.")
    inclusion = config.deepspeed_inclusion_filter or ""
    exclusion = config.deepspeed_exclusion_filter or ""
    try:
        hosts = read_hostfile(path, inclusion, exclusion)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--deepspeed_hostfile {path}, or a filter of its machines: {error}.") from error
    for name in hosts:
        if not _HOST.fullmatch(name):
            raise ConfigurationError(f"--deepspeed_hostfile {path}: {name!r} is not the name of a machine.")
    if len({len(slots) for slots in hosts.values()}) != 1:  # 0: no machine
        counts = ", ".join(f"{name} {len(slots)}" for name, slots in hosts.items()) or "none"
        raise ConfigurationError(
            f"machines need the same number of slots, at least 1. Slots by the hostfile and its filters: {counts}."
        )
    return hosts


def with_hostfile(command: LaunchCommand) -> tuple[LaunchCommand, _Hosts | None]:
    """Return the command with the options of the hostfile, and the machines for pdsh, or None without pdsh."""
    config = command.config
    launcher = config.deepspeed_multinode_launcher or "standard"
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
    rank = config.machine_rank
    if uses_pdsh:
        rank = 0  # each machine receives its rank from pdsh
    elif rank is None:
        rank = _own_rank(hosts)
    # A rank that is out of range is reported by `check_options`, which is called later.
    slots = list(hosts.values())[min(max(rank, 0), len(hosts) - 1)]
    values: dict[str, Any] = {"num_machines": len(hosts), "num_processes": len(hosts) * len(slots)}
    values["gpu_ids"] = None if config.cpu else ",".join(map(str, slots))
    notes = list(command.notes)
    for name, value in values.items():
        value_of_option = getattr(config, name)
        if value_of_option not in (None, "all", value):
            notes.append(f"{name}={value} of {config.deepspeed_hostfile} is used, not {value_of_option}.")
    first_host = next(iter(hosts)).rpartition("@")[2]  # without the user in "user@node1"
    config = replace(
        config,
        **values,
        machine_rank=rank,
        main_process_ip=config.main_process_ip or first_host,
        main_process_port=config.main_process_port or 29500,
    )
    return replace(command, config=config, notes=notes), hosts if uses_pdsh else None


def _own_rank(hosts: _Hosts) -> int:
    """Return the position of this machine's name in the hostfile. Raise if the file does not have it once."""
    host = socket.gethostname()
    names = (host, host.partition(".")[0], socket.getfqdn())
    ranks = [rank for rank, name in enumerate(hosts) if name in names]
    if len(ranks) != 1:
        raise ConfigurationError(f"{host} is not in the hostfile. Pass --machine_rank, from 0 to {len(hosts) - 1}.")
    return ranks[0]


def start_machines(command: LaunchCommand, hosts: _Hosts) -> int:
    """Start the command on all machines by pdsh. Return the exit code of the first machine that fails, or 0.

    A failure ends all machines.

    Raises:
        ConfigurationError: a machine cannot be reached. Nothing has been started.
        MissingPackageError: pdsh is not installed.
        SystemExit: this process received SIGTERM. All machines end.
    """
    if shutil.which("pdsh") is None:
        raise MissingPackageError("--deepspeed_multinode_launcher pdsh: pdsh is missing. Run: apt-get install pdsh")
    kind = variable("PDSH_RCMD_TYPE") or "ssh"
    variables = environment() | {"PDSH_RCMD_TYPE": kind}
    _check_reachable(hosts, variables)
    text = _remote_text(command, hosts)
    if kind != "exec":
        text = shlex.quote(text)  # ssh and others pass the words to a shell, which removes one level of quotes
    words = ["sh", "-c", text]
    pdsh = [*child.command(os.getpid()), "pdsh", "-S", "-b", "-f", str(len(hosts)), "-w", ",".join(hosts), *words]
    # The default of SIGTERM would end this process without the `finally` below.
    previous_handler = signal.signal(signal.SIGTERM, _end)
    try:
        with subprocess.Popen(pdsh, stderr=subprocess.PIPE, env=variables, start_new_session=True) as run:
            try:
                return _follow(run)
            finally:
                run.terminate()  # it closes the connections, which ends the machines
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


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
    """Return the shell command that all machines run. pdsh replaces %n by a machine's rank.

    cd FOLDER && case %n in 0) d=0,1;; 1) d=0,1;; esac &&
        exec env VARIABLES CHILD python -m trainwright launch --machine_rank=%n --gpu_ids=$d OPTIONS -- SCRIPT ARGUMENTS
    """
    options = [f"--{name}={value}" for name, value in command.config.set_options().items() if name not in _NOT_SENT]
    if command.kind == "module":
        options.append("-m")
    elif command.kind == "program":
        options.append("--no_python")
    variables = [f"{name}={value}" for name, value in variables_to_send().items()]
    program = ["exec", "env", *variables, *child.command("machine"), sys.executable, "-m", "trainwright", "launch"]
    folder = _quoted([str(Path.cwd())])
    start = _quoted(program)
    rest = _quoted([*options, "--", command.script, *command.arguments])
    cases = " ".join(f"{rank}) d={','.join(map(str, slots))};;" for rank, slots in enumerate(hosts.values()))
    devices = "" if command.config.cpu else " --gpu_ids=$d"
    return f"cd {folder} && case %n in {cases} esac && {start} --machine_rank=%n{devices} {rest}"


def _quoted(words: list[str]) -> str:
    """Quote words for a shell and for pdsh, which reads %% as %."""
    return shlex.join(words).replace("%", "%%")


def variables_to_send() -> dict[str, str]:
    """Return the variables that other machines receive: variables of libraries, then those in `.deepspeed_env`."""
    variables_of_options = {option.variable for option in known_options().values()}  # sent as flags
    variables = {}
    for name, value in environment().items():
        is_sent = name == "PATH" or name.startswith(_SENT_VARIABLES)
        if is_sent and name not in variables_of_options:
            variables[name] = value
    for folder in (Path.home(), Path.cwd()):
        file = folder / (variable("DS_ENV_FILE") or ".deepspeed_env")
        if not file.is_file():
            continue
        for line in file.read_text().splitlines():
            name, equals, value = line.strip().partition("=")
            if equals and not name.startswith("#"):
                variables[name] = value
    return variables


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
