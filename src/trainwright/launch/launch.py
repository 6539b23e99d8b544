"""`trainwright launch`: run a script in one or several processes, on one machine or on each of several machines.

Invalid options raise ConfigurationError before any process is started.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from itertools import combinations
from pathlib import Path

from trainwright.core.errors import ConfigurationError
from trainwright.core.host.device_types import properties
from trainwright.core.names.stand_in import is_active
from trainwright.launch import child
from trainwright.launch.clusters import check_cluster, start_on_cluster
from trainwright.launch.failures import FirstFailure, first_failure
from trainwright.launch.hostfile import start_machines, with_hostfile
from trainwright.launch.launch_config import LaunchConfig, options
from trainwright.launch.machines import MachineWatch
from trainwright.launch.reading import SHORT, LaunchCommand, check_supported, read_command, split
from trainwright.processes.launcher import patch_environment, set_variable, set_variables

PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_ALL = "all"
_LARGEST_NUMBER = 1_000_000  # of processes, machines or restarts: torch's agent would count to a mistyped larger one
_ELASTIC_RESTARTS = 100  # default with --min_nodes, where the end of a machine uses one restart
# Groups of options of which at most one may be passed.
_EXCLUSIVE = (
    ("use_fsdp", "use_deepspeed", "use_megatron_lm"),
    ("use_parallelism_config", "use_megatron_lm"),
    ("tpu", "cpu", "multi_gpu"),
    ("slurm", "mpi", "ray", "kubernetes", "sagemaker"),
    ("mpirun_hostfile", "slurm", "ray", "kubernetes", "sagemaker"),  # it selects --mpi
)
# Device files of accelerators in /dev: NVIDIA, AMD and Intel (renderD), Ascend, Habana and Google (accel), Cambricon,
# AWS Neuron, AMD's compute driver, GPUs under Windows' WSL.
_DEVICE_FILES = (
    "nvidia[0-9]*",
    "dri/renderD*",
    "davinci[0-9]*",
    "accel/accel*",
    "cambricon_dev*",
    "neuron[0-9]*",
    "kfd",
    "dxg",
)


def launch(argv: Sequence[str]) -> int:
    """Run a script in the processes that the options describe. Return the exit code.

    A single process replaces the calling process. torch's elastic agent starts, monitors and ends several processes.

    Raises:
        ConfigurationError: An option or the script is not valid. No process has been started.
        MissingPackageError: A package or program that an option needs is missing. No process has been started.
        SystemExit: This process received a signal. All processes have ended.
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
    requests_gpus = command.config.multi_gpu or command.config.gpu_ids
    if requests_gpus and not command.config.cpu and not device_count():
        print("trainwright launch: this machine has no GPU, so it trains on the CPU.", file=sys.stderr)
    local, total = set_environment(command.config)
    if total == 1:
        # This process becomes the script: signals and the exit code need no forwarding.
        os.execvp(command.program[0], command.program)
    return _run_agent(command, local)


def set_environment(config: LaunchConfig) -> tuple[int, int]:
    """Set the variables of the processes. Return the number of processes on this machine, and on all machines.

    Raises:
        ConfigurationError: This machine has fewer devices than processes.
    """
    local, total = _process_counts(config)
    set_variables(config.environment() | _visible_devices(config.gpu_ids))
    if total > 1:
        # Each of several processes would start a thread for each core. A value of the user stays.
        set_variable("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // local)))
    return local, total


def check(command: LaunchCommand) -> None:
    """Check the options and the script before any process is started."""
    check_options(command.config)
    check_packages(command.config)
    if command.config.kubernetes:
        return  # the image has the script, not this machine
    if command.kind == "script":
        _check_script(command.script)
    if command.kind == "program" and shutil.which(command.script) is None:
        raise ConfigurationError(f"the program {command.script!r} was not found, or is not executable. Check PATH.")


def check_options(config: LaunchConfig) -> None:
    """Raise ConfigurationError if options exclude each other, are out of range, or need other options."""
    check_supported(config)
    for group in _EXCLUSIVE:
        for one, other in combinations(group, 2):
            if getattr(config, one) and getattr(config, other):
                raise ConfigurationError(f"--{one} and --{other} exclude each other. Pass one of them.")
    port = config.main_process_port
    if port is not None and not 0 <= port <= 65535:
        raise ConfigurationError(f"--main_process_port {port}: write a port from 0 to 65535.")
    for name, least in (("num_processes", 1), ("num_machines", 1), ("machine_rank", 0), ("max_restarts", 0)):
        value = getattr(config, name)
        if value is None:
            continue
        if value < least:
            raise ConfigurationError(f"--{name} {value}: write a whole number of at least {least}.")
        if value > _LARGEST_NUMBER:
            raise ConfigurationError(f"--{name} {value}: write a number of at most {_LARGEST_NUMBER:,}.")
    check_cluster(config)
    machines = config.num_machines or 1
    if config.min_nodes is not None:
        # The variables of the processes contain the full number of processes and the name of the job, by which a job
        # that has lost a machine adjusts.
        if config.rdzv_backend != "c10d" or config.rdzv_id is None or config.num_processes is None:
            raise ConfigurationError("--min_nodes needs --rdzv_backend c10d, --rdzv_id and --num_processes too.")
        if not 1 <= config.min_nodes <= machines:
            raise ConfigurationError(f"--min_nodes {config.min_nodes}: expected 1 to --num_machines {machines}.")
    if machines > 1 and config.engine is None:
        _check_machines(config, machines)
    if config.num_processes is not None and config.num_processes % machines:
        raise ConfigurationError(
            f"--num_processes {config.num_processes} is the number on all machines, and cannot be divided by "
            f"--num_machines {machines}. Pass a multiple."
        )


def _check_machines(config: LaunchConfig, machines: int) -> None:
    """Check that this machine has a rank and the address of the first machine."""
    required = ["main_process_ip", "main_process_port"]
    if config.rdzv_backend != "c10d":  # which assigns the ranks itself
        required.insert(0, "machine_rank")
    missing = [f"--{name}" for name in required if getattr(config, name) is None]
    if missing:
        raise ConfigurationError(f"--num_machines {machines} needs {', '.join(missing)} too.")
    if (config.machine_rank or 0) >= machines:
        raise ConfigurationError(f"--machine_rank {config.machine_rank}: ranks are 0 to {machines - 1}.")


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
        place = f"{script}:{line}" if line else script
        raise ConfigurationError(f"{place} does not compile: {error}.") from error


def _process_counts(config: LaunchConfig) -> tuple[int, int]:
    """Return the number of processes on this machine, and on all machines.

    Raises:
        ConfigurationError: This machine has fewer devices than the requested number of processes.
    """
    machines = config.num_machines or 1
    requested = None
    if config.num_processes is not None:
        requested = config.num_processes // machines
    is_single = requested == 1 and machines == 1
    if config.cpu or config.tpu or is_single:
        # Devices are not counted, because that imports torch, which takes seconds.
        local = requested or 1
        return local, local * machines
    if config.gpu_ids in (None, _ALL):
        available = device_count()
    else:
        available = len(str(config.gpu_ids).split(","))
    if requested is not None and available and requested > available:
        raise ConfigurationError(
            f"{requested} processes on this machine, which has {available} devices. Pass --num_processes "
            f"{available * machines}, or --cpu."
        )
    local = requested or available or 1
    return local, local * machines


def device_count() -> int:
    """Return the number of accelerators of this machine."""
    if "torch" not in sys.modules and has_no_devices():
        return 0  # without the seconds that torch takes
    import torch

    return torch.accelerator.device_count()


def has_no_devices() -> bool:
    """Return True if this machine has no device files of accelerators, and no package adds a device type to torch.

    Always False on systems other than Linux.
    """
    if sys.platform != "linux" or entry_points(group="torch.backends"):
        return False
    return not any(found for pattern in _DEVICE_FILES for found in Path("/dev").glob(pattern))


def _visible_devices(gpu_ids: str | None) -> dict[str, str]:
    """Return the variable that limits the devices of the processes, such as `{"CUDA_VISIBLE_DEVICES": "0,1"}`."""
    if gpu_ids in (None, _ALL):
        return {}
    import torch

    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    return {properties(kind).visible: str(gpu_ids)}


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
    variables = {}
    if command.config.rdzv_backend == "c10d":
        # With a store that torch's agents share (2.13), a machine that joins later waits for an address that the others
        # do not write again.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with patch_environment(**variables), warnings.catch_warnings():
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
    """Run the agent, print the first failure, and return the exit code."""
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    config = command.config
    machines = config.num_machines or 1
    if config.log_dir is not None:
        try:
            Path(config.log_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--log_dir {config.log_dir} cannot be created: {error}.") from None
    logs = config.log_dir or tempfile.mkdtemp(prefix="trainwright-launch-")
    set_variable(PREFIX, "[rank ${rank}] ")
    watch: MachineWatch | None = None
    watching: AbstractContextManager[None] = nullcontext()
    # c10d has heartbeats of its own. The static rendezvous would not notice that a machine has stopped.
    if machines > 1 and config.rdzv_backend != "c10d":
        watch = MachineWatch(config)
        watching = watch.running()
    first = None
    try:
        with watching:
            first = run_agent(command, local, logs)
    except SystemExit:
        # The watch ends the agent by SIGTERM. Without an error of the watch, the signal came from elsewhere.
        if watch is None or watch.error is None:
            raise
        return _report_failure(watch.error)
    except (DistError, RendezvousError) as error:
        return _report_failure(
            f"the {machines} machines did not meet at {config.main_process_ip}:{config.main_process_port}, or lost "
            f"contact ({type(error).__name__}: {error}). Check that the command runs on all of them"
        )
    finally:
        if config.log_dir is None and first is None:  # the message about a failure names a file of the folder
            shutil.rmtree(logs, ignore_errors=True)
    if first is None:
        return 0
    place = ""
    advice = ""
    if machines > 1:
        place = " on this machine"
        advice = ". A process of another machine may have failed before: see the output there"
    about = f"{first.how}, process {first.pid} on {socket.gethostname()}"
    return _report_failure(f"rank {first.rank} failed first{place} ({about}){first.error()}{advice}", first.code)


def _report_failure(text: str, code: int = 1) -> int:
    """Print the text, and return the exit code."""
    print(f"\ntrainwright launch: {text}.", file=sys.stderr)
    return code


def _agent_options(config: LaunchConfig, local: int, logs: str) -> list[str]:
    """Return the options of torchrun."""
    machines = config.num_machines or 1
    tee = config.tee
    if not tee:
        # Output of local rank 0 goes to the terminal directly, so that progress bars move. Output of the others goes
        # to files and to the terminal. For 3 processes: "1:3,2:3".
        tee = ",".join(f"{rank}:3" for rank in range(1, local)) or "0"
    nodes = str(machines) if config.min_nodes is None else f"{config.min_nodes}:{machines}"
    result = ["--nproc-per-node", str(local), "--nnodes", nodes, "--log-dir", logs, "--tee", tee]
    if config.min_nodes is not None and config.max_restarts is None:
        result += ["--max-restarts", str(_ELASTIC_RESTARTS)]
    for name in ("max_restarts", "monitor_interval", "role", "rdzv_conf", "rdzv_id"):
        value = getattr(config, name)
        if value is not None:
            result += [f"--{name.replace('_', '-')}", str(value)]
    port = config.main_process_port
    if machines > 1 and config.rdzv_backend == "c10d":
        return [*result, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{config.main_process_ip}:{port}"]
    if machines > 1:
        if config.machine_rank == 0 and is_busy(port):
            raise ConfigurationError(f"--main_process_port {port} is in use. Choose another one.")
        result += ["--node-rank", str(config.machine_rank)]
        return [*result, "--master-addr", str(config.main_process_ip), "--master-port", str(port)]
    if port and is_busy(port):
        # No other machine needs the port, so any free port will do.
        print(f"trainwright launch: port {port} is in use; a free one is chosen.", file=sys.stderr)
        port = None
    if port:
        return [*result, "--master-port", str(port)]
    return [*result, "--standalone"]


def is_busy(port: int | None) -> bool:
    """Return whether a port of this machine is in use."""
    if port is None:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


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
    short_flags = {name: flag for flag, name in SHORT.items()}
    for option in options():
        if option.later:
            continue
        flag = f"--{option.name}"
        if option.name in short_flags:
            flag = f"{short_flags[option.name]}, {flag}"
        if not option.is_flag:
            # "--mixed_precision no|fp16|bf16|fp8", or the last word: "--log_dir DIR"
            flag += f" {'|'.join(option.choices) or option.name.rpartition('_')[2].upper()}"
        groups.setdefault(option.group, []).append(f"  {flag}\n        {option.help}")
    return "\n\n".join(f"{group}:\n" + "\n".join(lines) for group, lines in groups.items())


def replaces_accelerate() -> bool:
    """Return whether a started script must import Trainwright in place of accelerate, as this process does."""
    return is_active()
