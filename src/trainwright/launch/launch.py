"""`trainwright launch`: run a script in one or several processes, on one machine or on each of several machines.

Invalid options raise ConfigurationError before any process is started.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import combinations
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.core.host.device_types import properties
from trainwright.core.names.stand_in import is_active
from trainwright.launch import child
from trainwright.launch.clusters import check_cluster, start_on_cluster
from trainwright.launch.hostfile import start_machines, with_hostfile
from trainwright.launch.launch_config import LaunchConfig, options
from trainwright.launch.machines import MachineWatch
from trainwright.launch.reading import SHORT, LaunchCommand, check_supported, read_command, split
from trainwright.processes.launcher import patch_environment, set_variable, set_variables

PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_ALL = "all"
_MOST = 1_000_000  # processes, machines or restarts; a greater number is a mistake, and the agent would count to it
_ELASTIC_RESTARTS = 100  # a machine that leaves costs one
# Errors that follow from the end of another process.
_CONSEQUENCE = re.compile(
    r"[Cc]onnection|Broken pipe|[Tt]imed out|[Tt]imeout|remote process|DistNetworkError|ends after the failure of rank"
)

_BLAMES = re.compile(r"ends after the failure of rank (\d+)\.")  # the message of a process that has ended itself

_AGENT_WAITS_S = 30  # between SIGTERM and SIGKILL


def launch(argv: Sequence[str]) -> int:
    """Run a script in the processes that the options describe. Return the exit code.

    A single process replaces the calling process. torch's elastic agent starts, monitors and ends several processes.

    Raises:
        ConfigurationError: An option or the script is not valid. No process has been started.
    """
    if not argv or "help" in split(argv)[1]:
        print(_help())
        return 0
    command = read_command(argv)
    machines = None
    if command.config.engine is None:
        command, machines = with_hostfile(command)
    check(command)
    for note in command.notes:
        print(f"trainwright launch: {note}", file=sys.stderr)
    if command.config.engine is not None:
        return start_on_cluster(command)
    if machines is not None:
        return start_machines(command, machines)
    if (command.config.multi_gpu or command.config.gpu_ids) and not command.config.cpu and not device_count():
        print("trainwright launch: this machine has no GPU, so it trains on the CPU.", file=sys.stderr)
    local, total = set_environment(command.config)
    if total == 1:
        os.execvp(command.program[0], command.program)
    return _run_agent(command, local)


def set_environment(config: LaunchConfig) -> tuple[int, int]:
    """Set the variables of the processes. Return the number of processes on this machine, and on all machines."""
    local, total = _process_counts(config)
    set_variables(config.environment() | _visible_devices(config.gpu_ids))
    if total > 1:
        set_variable("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // local)))
    return local, total


def check(command: LaunchCommand) -> None:
    """Check the options and the script before any process is started."""
    check_options(command.config)
    check_packages(command.config)
    if command.kind == "script" and not command.config.kubernetes:  # the image has the script
        _check_script(command.script)
    elif command.kind == "program" and not command.config.kubernetes and shutil.which(command.script) is None:
        raise ConfigurationError(f"the program {command.script!r} was not found, or is not executable. Check PATH.")


def check_options(config: LaunchConfig) -> None:
    """Raise ConfigurationError if options exclude each other, are out of range, or need other options."""
    check_supported(config)
    for one, other in (
        *combinations(("use_fsdp", "use_deepspeed", "use_megatron_lm"), 2),
        ("use_parallelism_config", "use_megatron_lm"),
        *combinations(("tpu", "cpu", "multi_gpu"), 2),
        *combinations(("slurm", "mpi", "ray", "kubernetes", "sagemaker"), 2),
        *(("mpirun_hostfile", name) for name in ("slurm", "ray", "kubernetes", "sagemaker")),
    ):
        if getattr(config, one) and getattr(config, other):
            raise ConfigurationError(f"--{one} and --{other} exclude each other. Pass one of them.")
    port = config.main_process_port
    if port is not None and not 0 <= port <= 65535:
        raise ConfigurationError(f"--main_process_port {port}: write a port from 0 to 65535.")
    for name, least in (("num_processes", 1), ("num_machines", 1), ("machine_rank", 0), ("max_restarts", 0)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigurationError(f"--{name} {value}: write a whole number of at least {least}.")
        if value is not None and value > _MOST:
            raise ConfigurationError(f"--{name} {value}: write a number of at most {_MOST:,}.")
    check_cluster(config)
    machines = config.num_machines or 1
    if config.min_nodes is not None:
        if config.rdzv_backend != "c10d" or config.rdzv_id is None or config.num_processes is None:
            raise ConfigurationError("--min_nodes needs --rdzv_backend c10d, --rdzv_id and --num_processes too.")
        if not 1 <= config.min_nodes <= machines:
            raise ConfigurationError(f"--min_nodes {config.min_nodes}: expected 1 to --num_machines {machines}.")
    if machines > 1 and config.engine is None:
        missing = [n for n in ("machine_rank", "main_process_ip", "main_process_port") if getattr(config, n) is None]
        if missing and not (config.rdzv_backend == "c10d" and missing == ["machine_rank"]):
            raise ConfigurationError(
                f"--num_machines {machines} needs {', '.join(f'--{name}' for name in missing)} too."
            )
        if (config.machine_rank or 0) >= machines:
            raise ConfigurationError(f"--machine_rank {config.machine_rank}: ranks are 0 to {machines - 1}.")
    if config.num_processes is not None and config.num_processes % machines:
        raise ConfigurationError(
            f"--num_processes {config.num_processes} is the number on all machines, and cannot be divided by "
            f"--num_machines {machines}. Pass a multiple."
        )


def check_packages(config: LaunchConfig) -> None:
    """Raise an error if this environment lacks a package that an option needs."""
    if config.tpu:
        from trainwright.core.host.xla_library import check_versions  # imports torch

        check_versions("--tpu")


def _check_script(script: str) -> None:
    path = Path(script)
    if path.name in ("python", "python3") and not path.is_file():
        raise ConfigurationError(f"launch starts Python itself. Leave {script!r} out: write script.py or -m module.")
    if not path.is_file():
        raise ConfigurationError(f"the script {script!r} does not exist. Check the path.")
    try:
        compile(path.read_bytes(), script, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigurationError(f"{script}{f':{line}' if line else ''} does not compile: {error}.") from error


def _process_counts(config: LaunchConfig) -> tuple[int, int]:
    """Return the number of processes on this machine, and on all machines."""
    machines = config.num_machines or 1
    wanted = None if config.num_processes is None else config.num_processes // machines
    if config.cpu or config.tpu or (wanted == 1 and machines == 1):
        return wanted or 1, (wanted or 1) * machines
    named = None if config.gpu_ids in (None, _ALL) else len(str(config.gpu_ids).split(","))
    available = named if named is not None else device_count()
    if wanted is not None and available and wanted > available:
        raise ConfigurationError(
            f"{wanted} processes on this machine, which has {available} devices. Pass --num_processes "
            f"{available * machines}, or --cpu."
        )
    local = wanted or available or 1
    return local, local * machines


def device_count() -> int:
    """Return the number of accelerators of this machine."""
    if "torch" not in sys.modules and has_no_devices():
        return 0  # without the seconds that torch takes
    import torch

    return torch.accelerator.device_count()


def has_no_devices() -> bool:
    """Return True if no package adds a device type to torch and this machine has no device files of accelerators.
    Always False on systems other than Linux.
    """
    if entry_points(group="torch.backends"):
        return False
    files = [
        "nvidia[0-9]*",
        "dri/renderD*",
        "davinci[0-9]*",
        "accel/accel*",
        "cambricon_dev*",
        "neuron[0-9]*",
        "kfd",
        "dxg",
    ]
    return sys.platform == "linux" and not any(found for pattern in files for found in Path("/dev").glob(pattern))


def _visible_devices(gpu_ids: str | None) -> dict[str, str]:
    if gpu_ids in (None, _ALL):
        return {}
    import torch

    found = torch.accelerator.current_accelerator()
    return {properties("cuda" if found is None else found.type).visible: str(gpu_ids)}


def run_agent(command: LaunchCommand, local: int, logs: str) -> FirstFailure | None:
    """Start the processes of this machine by torch's elastic agent, and wait for them. Main thread only.

    Returns:
        The failure that caused other failures, or None if no process has failed. All processes have ended.

    Raises:
        SystemExit: This process received a signal. All processes have ended.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # Each process ends with this one, and becomes the script.
    program = ["--no-python", *child.command(os.getpid()), *command.program]
    arguments = parse_args([*_agent_options(command.config, local, logs), *program])  # type: ignore[no-untyped-call]  # torch has no types here
    # With a store that torch's agents share (2.13), a machine that joins later waits for an address that the others do
    # not write again.
    shares = {} if command.config.rdzv_backend != "c10d" else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with patch_environment(**shares), warnings.catch_warnings():
        # torch does not close the files for the output of processes (2.13).
        warnings.filterwarnings("ignore", "unclosed file", ResourceWarning)
        try:
            run(arguments)  # type: ignore[no-untyped-call]  # as above
        except ChildFailedError as error:
            return first_failure(error, logs)
        except SignalException as error:
            raise SystemExit(128 + int(error.sigval)) from error
    return None


def _run_agent(command: LaunchCommand, local: int) -> int:
    """Run the agent, and return the exit code."""
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    config = command.config
    machines = command.config.num_machines or 1
    if config.log_dir is not None:
        try:
            Path(config.log_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--log_dir {config.log_dir} cannot be created: {error}.") from None
    logs = config.log_dir or tempfile.mkdtemp(prefix="trainwright-launch-")
    set_variable(PREFIX, "[rank ${rank}] ")
    watch = MachineWatch(config) if machines > 1 and config.rdzv_backend != "c10d" else None
    first = None
    try:
        with nullcontext() if watch is None else watch.running():
            first = run_agent(command, local, logs)
    except SystemExit:
        if watch is None or watch.error is None:
            raise
        return _failed(watch.error)
    except (DistError, RendezvousError) as error:
        return _failed(
            f"the {machines} machines did not meet at {config.main_process_ip}:{config.main_process_port}, or lost "
            f"contact ({type(error).__name__}: {error}). Check that the command runs on all of them"
        )
    finally:
        if config.log_dir is None and first is None:
            shutil.rmtree(logs, ignore_errors=True)
    if first is None:
        return 0
    place = ""
    others = ""
    if machines > 1:
        place = " on this machine"
        others = ". A process of another machine may have failed before: see the output there"
    about = f"{first.how}, process {first.pid} on {socket.gethostname()}"
    return _failed(f"rank {first.rank} failed first{place} ({about}){first.error()}{others}", first.code)


def _failed(text: str, code: int = 1) -> int:
    print(f"\ntrainwright launch: {text}.", file=sys.stderr)
    return code


def _agent_options(config: LaunchConfig, local: int, logs: str) -> list[str]:
    """Return the options of torchrun."""
    machines = config.num_machines or 1
    # The first process of a machine writes to the terminal itself, so that progress bars move.
    tee = config.tee or ",".join(f"{rank}:3" for rank in range(1, local)) or "0"
    nodes = str(machines) if config.min_nodes is None else f"{config.min_nodes}:{machines}"
    found = ["--nproc-per-node", str(local), "--nnodes", nodes, "--log-dir", logs, "--tee", tee]
    if config.min_nodes is not None and config.max_restarts is None:
        found += ["--max-restarts", str(_ELASTIC_RESTARTS)]
    for name in ("max_restarts", "monitor_interval", "role", "rdzv_conf", "rdzv_id"):
        value = getattr(config, name)
        if value is not None:
            found += [f"--{name.replace('_', '-')}", str(value)]
    if machines > 1:
        if config.rdzv_backend == "c10d":
            place = f"{config.main_process_ip}:{config.main_process_port}"
            return [*found, "--rdzv-backend", "c10d", "--rdzv-endpoint", place]
        if config.machine_rank == 0 and is_busy(config.main_process_port):
            raise ConfigurationError(f"--main_process_port {config.main_process_port} is in use. Choose another one.")
        address = ["--master-addr", str(config.main_process_ip), "--master-port", str(config.main_process_port)]
        return [*found, "--node-rank", str(config.machine_rank), *address]
    port = config.main_process_port
    if port and is_busy(port):
        print(f"trainwright launch: port {port} is in use; a free one is chosen.", file=sys.stderr)
        port = None
    return [*found, *(["--master-port", str(port)] if port else ["--standalone"])]


def is_busy(port: int | None) -> bool:
    """Return whether a port of this machine is in use."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        return port is not None and one.connect_ex(("127.0.0.1", port)) == 0


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The process that failed first: rank, process ID, exit code, description of its end, error, and output.

    The first process of a machine has no file: its output is in the terminal.
    """

    rank: int
    pid: int
    code: int
    how: str
    line: str
    file: Path | None

    def error(self) -> str:
        """Return the end of the message: the error of the process, and where its output is."""
        if self.file is None:
            return "; its output is above"
        if not self.line:
            return "; it has written no error"  # killed by a signal, or ended by sys.exit
        return f": {self.line}\nIts output: {self.file}"


def first_failure(error: Any, logs: str | Path) -> FirstFailure:
    """Return the failure that caused other failures.

    A process that a signal killed comes first, then the earliest error that does not follow from the end of another
    process, such as a lost connection. Processes whose output is not in a file come last. The time of an error is that
    of the process's last output, because torch's error has whole seconds. Processes that the agent has ended come last,
    unless their error is the last thing that they have written or another process names them: a failed script may need
    longer to exit than others wait for it.

    Args:
        error: `ChildFailedError` of torch's agent.
        logs: Folder for the output of processes.
    """
    order = []
    blamed: set[int] = set()
    earliest = min(one.timestamp for one in error.failures.values())
    for rank, one in error.failures.items():
        file = max(Path(logs).glob(f"*/attempt_*/{one.local_rank}/stderr.log"), default=None)
        text = "" if file is None else file.read_text(errors="replace")
        line = _error_line(text)
        if one.exitcode == -signal.SIGKILL and "Traceback (" not in text:
            line = ""  # the last output of a killed process is no error
        blamed.update(int(found) for found in _BLAMES.findall(text))
        if one.exitcode < 0:
            # The agent (torch 2.13) sends SIGTERM to the other processes, and SIGKILL if they still run after 30 s.
            is_killed_late = one.exitcode == -signal.SIGKILL and one.timestamp - earliest > _AGENT_WAITS_S / 2
            is_ended_by_agent = one.exitcode == -signal.SIGTERM or is_killed_late
            is_exiting = bool(line) and text.rstrip().endswith(line) and not _CONSEQUENCE.search(line)
            place = 0 if not is_ended_by_agent else 1 if is_exiting and "Traceback (" in text else 4
        else:
            place = 2 if not line else 3 if _CONSEQUENCE.search(line) else 1
        seconds = file.stat().st_mtime if file is not None and line else one.timestamp
        how = f"signal {one.signal_name()}" if one.exitcode < 0 else f"exit code {one.exitcode}"
        code = one.exitcode if one.exitcode >= 0 else 128 - one.exitcode
        order.append((place, seconds, rank, FirstFailure(rank, one.pid, code, how, line, file)))
    return min(order, key=lambda one: (one[2] not in blamed, *one[:3]))[-1]


def _error_line(text: str) -> str:
    """Return the first line of the last error in a process's output, or else the last line of the output."""
    lines = [line for line in text.splitlines() if line.strip()]
    texts = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in lines]
    start = max((number for number, line in enumerate(texts) if line.startswith("Traceback (")), default=len(lines))
    found = (line for line, one in zip(lines[start + 1 :], texts[start + 1 :], strict=True) if not one.startswith(" "))
    return next(found, lines[-1] if lines else "").strip()


def _help() -> str:
    return (
        "usage: trainwright launch [options] script.py [its arguments]\n"
        "       trainwright launch [options] -m module [its arguments]\n"
        "       trainwright launch [options] --no_python program [its arguments]\n\n"
        "Run a script in one process or in several. Options come from flags, then environment variables, then\n"
        "--config_file FILE (default: default_config.yaml in trainwright's or accelerate's cache folder).\n"
        "Flags may be written with dashes or underscores.\n\n" + options_help()
    )


def options_help() -> str:
    """Return the text about all options for `--help`."""
    groups: dict[str, list[str]] = {}
    short = {name: flag for flag, name in SHORT.items()}
    for option in options():
        value = "" if option.is_flag else f" {'|'.join(option.choices) or option.name.rpartition('_')[2].upper()}"
        flag = f"{short[option.name]}, " if option.name in short else ""
        if not option.later:
            groups.setdefault(option.group, []).append(f"  {flag}--{option.name}{value}\n        {option.help}")
    return "\n\n".join(f"{group}:\n" + "\n".join(lines) for group, lines in groups.items())


def replaces_accelerate() -> bool:
    """Return whether a started script must import Trainwright in place of accelerate, as this process does."""
    return is_active()
