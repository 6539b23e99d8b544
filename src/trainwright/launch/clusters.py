"""Start of a script with Slurm, MPI, Ray, Kubernetes or Amazon SageMaker, with the options of `trainwright launch`.

Invalid options raise ConfigurationError, and a missing program MissingPackageError, before anything is started.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from trainwright.core.errors import ConfigurationError, MissingPackageError, WorkerError
from trainwright.launch import child
from trainwright.launch.hostfile import variables_to_send
from trainwright.launch.kubernetes import write_manifest
from trainwright.launch.launch_config import LaunchConfig
from trainwright.launch.reading import LaunchCommand, known_options
from trainwright.launch.sagemaker import check_job, start_job
from trainwright.processes.launcher import free_port
from trainwright.processes.ray_actors import PARENT, RayJob, run_on_ray

# Options that only torch's agent uses, with values that request nothing. Files of `accelerate config` have some of
# them.
_AGENT_OPTIONS: dict[str, object] = {
    "machine_rank": 0,
    "rdzv_backend": "static",
    "gpu_ids": "all",
    "max_restarts": 0,
    "deepspeed_multinode_launcher": "standard",
    "rdzv_conf": None,
    "rdzv_id": None,
    "monitor_interval": None,
    "log_dir": None,
    "tee": None,
    "role": None,
    "tpu": None,
    "deepspeed_hostfile": None,
}
_PORT = 29500  # of torchrun
# Heading of options that need an engine → the engine.
_ENGINES = {"Slurm": "slurm", "MPI": "mpi", "Ray": "ray", "Kubernetes": "kubernetes", "Amazon SageMaker": "sagemaker"}


def check_cluster(config: LaunchConfig) -> None:
    """Check the options of an engine (`--slurm`, `--mpi`, …).

    Raises:
        ConfigurationError: An option needs another engine or has no effect with this one, `--num_processes` is
            missing, `--slurm_option` or the hostfile is not valid, or the output folder does not exist.
    """
    engine = config.engine
    for name, value in config.set_options().items():
        required_engine = _ENGINES.get(known_options()[name].group, engine)
        requests_nothing = value is False or (name, value) == ("mpirun_ccl", 1)  # as in files of `accelerate config`
        if required_engine != engine and not requests_nothing:
            raise ConfigurationError(f"--{name} needs --{required_engine} too.")
    if config.print and engine not in ("slurm", "mpi", "sagemaker"):
        raise ConfigurationError("--print needs --slurm, --mpi or --sagemaker too.")
    if engine is None:
        return
    for name, value in config.set_options().items():
        if not _has_effect(name, value, engine):
            raise ConfigurationError(f"--{name} {value} has no effect with --{engine}. Remove it.")
    if engine == "sagemaker":
        check_job(config)
    elif config.num_processes is None:
        raise ConfigurationError(
            f"--{engine} needs --num_processes too: the number on all machines, which is one for each GPU."
        )
    for option in (config.slurm_option or "").splitlines():
        if not option.startswith("-"):
            raise ConfigurationError(f"--slurm_option {option}: expected an option of sbatch, such as --exclusive.")
    folder = Path(config.slurm_output or "").parent
    # An absolute folder may exist only on the machines of the job, and Slurm replaces %j by the number of the job.
    is_known_later = config.print or folder.is_absolute() or "%" in str(folder)
    if not is_known_later and not folder.is_dir():
        raise ConfigurationError(
            f"--slurm_output {config.slurm_output}: the folder {folder} does not exist, and Slurm does not create it. "
            f"Run: mkdir -p {folder}"
        )
    if config.mpirun_hostfile and not Path(config.mpirun_hostfile).expanduser().is_file():
        raise ConfigurationError(f"--mpirun_hostfile {config.mpirun_hostfile} does not exist. Check the path.")


def _has_effect(name: str, value: object, engine: str) -> bool:
    """Return False for an option that `engine` would silently ignore, unless its value requests nothing."""
    if name == "max_restarts" and engine in ("ray", "kubernetes"):
        return True
    if engine == "sagemaker" and name in ("num_processes", "main_process_port"):
        return False  # the instances determine both
    if name == "main_process_ip" and value and engine != "mpi":
        return False
    return name not in _AGENT_OPTIONS or value in (False, _AGENT_OPTIONS[name])


def start_on_cluster(command: LaunchCommand) -> int:
    """Submit a job, start mpirun, run actors of Ray, or write a manifest. Return the exit code.

    mpirun replaces this process.
    """
    if command.config.engine == "kubernetes":
        return write_manifest(command)
    if command.config.engine == "sagemaker":
        return start_job(command)
    if command.config.engine == "slurm":
        return _submit(command)
    if command.config.engine == "ray":
        return _run_on_ray(command)
    words = mpirun_command(command)
    if command.config.print:
        print(shlex.join(words))
        return 0
    os.execvp(words[0], words)


def _run_on_ray(command: LaunchCommand) -> int:
    config = command.config
    job = RayJob(
        [*child.command(PARENT), *command.program],
        config.num_processes or 1,
        config.num_machines,
        gpus=0 if config.cpu else 1,
        cpus=config.num_cpu_threads_per_process or 1,
        variables=config.environment(),
        max_restarts=config.max_restarts or 0,
        address=config.ray_address,
    )
    try:
        run_on_ray(job)
    except WorkerError as error:
        print(f"\ntrainwright launch: {error}", file=sys.stderr)
        return 1
    return 0


def _submit(command: LaunchCommand) -> int:
    script = sbatch_script(command)
    if command.config.print:
        print(script, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise MissingPackageError(
            "--slurm: sbatch is missing. Run the command on a login node of the cluster, or add --print and pass the "
            "script to sbatch there."
        )
    return subprocess.run(["sbatch"], input=script, text=True, check=False).returncode


def sbatch_script(command: LaunchCommand) -> str:
    """Return the script for sbatch. Slurm sends SIGUSR1 to all ranks two minutes before the time limit."""
    config = command.config
    machines = config.num_machines or 1
    local = (config.num_processes or 1) // machines
    threads = config.num_cpu_threads_per_process
    values = {
        "job-name": Path(command.script).name,
        "nodes": machines,
        "ntasks-per-node": local,
        "gpus-per-node": None if config.cpu else local,
        "cpus-per-task": threads,
        "partition": config.slurm_partition,
        "account": config.slurm_account,
        "time": config.slurm_time,
        "output": config.slurm_output or "%x-%j.out",
        "open-mode": "append",
        "signal": "USR1@120",
    }
    options = [f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value is not None]
    options.append("--requeue")
    options += (config.slurm_option or "").splitlines()  # last, because the last of equal options counts
    for option in options:
        if not option.isprintable():  # a further line would be a command
            raise ConfigurationError(f"{option!r} is not one line of printable text, as a script for sbatch needs it.")
    variables = config.environment()
    if config.main_process_port:
        variables["MASTER_PORT"] = str(config.main_process_port)
    if threads is not None:
        variables["SRUN_CPUS_PER_TASK"] = str(threads)  # srun does not take it from sbatch (since 22.05)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    run = f"srun --kill-on-bad-exit=1 {shlex.join(command.program)}"
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "", *exports, run, ""])


def mpirun_command(command: LaunchCommand) -> list[str]:
    """Return the command of mpirun, for Open MPI, Intel MPI or MPICH."""
    config = command.config
    words = ["mpirun", "-n", str(config.num_processes)]
    hostfile = ""
    if config.mpirun_hostfile:
        hostfile = str(Path(config.mpirun_hostfile).expanduser())
    local = None
    if config.num_machines:
        local = (config.num_processes or 1) // config.num_machines
    variables = variables_to_send() | config.environment() | _address(config)
    variables["CCL_WORKER_COUNT"] = str(config.mpirun_ccl or 1)
    if _is_open_mpi():
        if hostfile:
            words += ["--hostfile", hostfile]
        if local is not None:
            words += ["--map-by", f"ppr:{local}:node"]
        words += ["--bind-to", "none"]  # the default is one core for each process
        if os.geteuid() == 0:
            words.append("--allow-run-as-root")
        for name, value in variables.items():
            words += ["-x", f"{name}={value}"]
    else:
        if hostfile:
            words += ["-f", hostfile]
        if local is not None:
            words += ["-ppn", str(local)]
        for name, value in variables.items():
            words += ["-genv", name, value]
    return [*words, *child.command(child.PARENT), *command.program]


def _is_open_mpi() -> bool:
    if shutil.which("mpirun") is None:
        raise MissingPackageError("--mpi: mpirun is missing. Install Open MPI (apt-get install openmpi-bin) or MPICH.")
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if re.search(r"Open MPI|OpenRTE|PRRTE", text):
        return True
    if re.search(r"Intel\(R\) MPI|HYDRA|MPICH", text):
        return False
    raise ConfigurationError(f"--mpi: mpirun is not of Open MPI, Intel MPI or MPICH: {text.strip()[:200]!r}.")


def _address(config: LaunchConfig) -> dict[str, str]:
    """Return the variables with the address of rank 0, which runs on the first machine of the hostfile."""
    hosts = []
    if config.mpirun_hostfile:
        for line in Path(config.mpirun_hostfile).expanduser().read_text().splitlines():
            text = line.strip()
            if text and not text.startswith("#"):
                hosts.append(re.split(r"[\s:]", text)[0])  # "node1 slots=2" of Open MPI, "node1:2" of MPICH
    first = hosts[0] if hosts else "127.0.0.1"
    has_several = len(set(hosts)) > 1
    if has_several and first in ("localhost", "127.0.0.1"):
        first = socket.gethostname()  # other machines cannot reach this one by that name
    port = config.main_process_port
    if not port:
        # A port that is free here may be in use on another first machine: use the same as torchrun.
        port = _PORT if has_several else free_port()
    return {"MASTER_ADDR": config.main_process_ip or first, "MASTER_PORT": str(port)}
