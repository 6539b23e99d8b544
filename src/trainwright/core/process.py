"""Detection of this process's rank and world size from the launcher's environment variables.

Known launchers are torchrun (and launchers that set its variables), Slurm's srun, MPI (Open MPI, MPICH, Intel MPI) and
none. The result, a `Topology`, contains the variables that were read. `Trainer(launcher=...)` overrides a wrong
detection. No other module reads environment variables.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from trainwright.core.errors import ConfigurationError, TrainwrightWarning, unknown

LauncherName = Literal["auto", "torchrun", "slurm", "mpi", "none"]

# Environment variables that this package sets for processes that it starts.
STARTED_BY_TRAINER = "TRAINWRIGHT_STARTED_BY_TRAINER"  # set in ranks that a Trainer has started; differs for each start
# Name of a job, the same in all attempts. Set by Ray's launcher and by `trainwright launch --min_nodes`.
JOB = "TRAINWRIGHT_JOB"
# Set by `trainwright launch --min_nodes`: number of processes of all machines. Fewer run after a machine has left.
ALL_PROCESSES = "TRAINWRIGHT_ALL_PROCESSES"
RESULT_FILE = "TRAINWRIGHT_RESULT_FILE"  # set by Ray's launcher: the file into which rank 0 writes its result

RAY = "ray"
_LAUNCHERS: tuple[LauncherName, ...] = ("auto", "torchrun", "slurm", "mpi", "none")


@dataclass(frozen=True, slots=True)
class Topology:
    """Rank of this process among all processes of a run, and the address of rank 0.

    Attributes:
        launcher: the detected launcher. `"none"` for one process, also if Slurm's variables are ignored.
        rank: rank among all processes.
        world_size: number of all processes.
        local_rank: rank among the processes of this node.
        local_world_size: number of processes on this node.
        node_rank: rank of this node among the nodes.
        num_nodes: number of nodes.
        master_addr: host of rank 0. None if the launcher does not set it.
        master_port: port of rank 0. None if the launcher does not set it.
        evidence: the variables that were read, as `"RANK=0"`, or the reason why Slurm's variables are ignored.
    """

    launcher: LauncherName
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str | None = None
    master_port: int | None = None
    evidence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or self.local_rank < 0:
            raise ConfigurationError(
                f"the launcher's variables contradict each other: {self}. Unset them or pass launcher='none'."
            )

    def __str__(self) -> str:
        where = f"rank {self.rank} of {self.world_size}, node {self.node_rank} of {self.num_nodes}"
        return f"{where}, launcher {self.launcher} ({'; '.join(self.evidence) or 'no launcher variables'})"


def detect(launcher: str = "auto", environ: Mapping[str, str] | None = None) -> Topology:
    """Detect the topology of this process.

    Args:
        launcher: the launcher whose variables are read: `"torchrun"`, `"slurm"` or `"mpi"`. `"none"` and `"ray"` mean
            one process. Default: `"auto"`, the first of these whose variables are set, or one process.
        environ: environment variables. Default: None, those of this process.

    Raises:
        ConfigurationError: the launcher is unknown, its variables are not set, or values contradict each other.
    """
    env = os.environ if environ is None else environ
    if is_ray(launcher):
        launcher = "none"
    if launcher not in _LAUNCHERS:
        raise unknown("launcher", launcher, (*_LAUNCHERS, RAY))
    if launcher == "none":
        return Topology("none", evidence=("launcher='none'",))
    if launcher != "auto":
        topology = _read(launcher, env)
        if topology is None:
            raise ConfigurationError(
                f"launcher={launcher!r}, but its variables are not set ({_REQUIRED[launcher]}). "
                "Start the script with that launcher or leave launcher='auto'."
            )
        return topology
    reason_against_slurm = _slurm_not_used(env)
    # torchrun comes first: in a job of Slurm, srun starts torchrun on each node, and torchrun starts the ranks.
    for name in ("torchrun", "slurm", "mpi"):
        if name == "slurm" and reason_against_slurm:
            continue
        topology = _read(name, env)
        if topology is not None:
            return topology
    return Topology("none", evidence=(reason_against_slurm,) if reason_against_slurm else ())


# The variables that a launcher must set, for error messages.
_REQUIRED = {
    "torchrun": "RANK, WORLD_SIZE, LOCAL_RANK",
    "slurm": "SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID",
    "mpi": "OMPI_COMM_WORLD_RANK or PMI_RANK, with _SIZE",
}


# Variables of the rank, the world size, the local rank and the local world size. The first two are required.
_VARIABLES: dict[str, tuple[tuple[str, ...], ...]] = {
    "torchrun": (("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),),
    "mpi": (  # Open MPI, MVAPICH2, and MPICH or Intel MPI
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ),
}


def _read(launcher: str, env: Mapping[str, str]) -> Topology | None:
    """Return the topology from a launcher's variables. None if the rank or the world size is not set."""
    if launcher == "slurm":
        return _from_slurm(env)
    for names in _VARIABLES[launcher]:
        rank_name, world_name, local_rank_name, local_world_name = names
        if rank_name not in env or world_name not in env:
            continue
        rank = _integer(env, rank_name)
        world = _integer(env, world_name)
        local_world = _integer(env, local_world_name, world)
        # Variables that are not set are computed for nodes with equal numbers of processes and consecutive ranks.
        per_node = max(local_world, 1)
        node_rank = rank // per_node
        if launcher == "torchrun":
            names = (*names, "GROUP_RANK")
            node_rank = _integer(env, "GROUP_RANK", _integer(env, "NODE_RANK", node_rank))
        return Topology(
            "torchrun" if launcher == "torchrun" else "mpi",
            rank=rank,
            world_size=world,
            local_rank=_integer(env, local_rank_name, rank % per_node),
            local_world_size=local_world,
            node_rank=node_rank,
            num_nodes=max(world // per_node, 1),
            master_addr=env.get("MASTER_ADDR"),
            master_port=_integer(env, "MASTER_PORT") if "MASTER_PORT" in env else None,
            evidence=tuple(f"{each}={env[each]}" for each in names if each in env),
        )
    return None


def _from_slurm(env: Mapping[str, str]) -> Topology | None:
    """Return the topology from Slurm's variables. None if the rank or the world size is not set.

    Variables of the step, that is of one call of srun, have precedence over those of the whole job (allocation).
    """
    if "SLURM_PROCID" not in env or ("SLURM_NTASKS" not in env and "SLURM_STEP_NUM_TASKS" not in env):
        return None
    world = _integer(env, "SLURM_STEP_NUM_TASKS", _integer(env, "SLURM_NTASKS", 1))
    nodes = _integer(
        env, "SLURM_STEP_NUM_NODES", _integer(env, "SLURM_NNODES", _integer(env, "SLURM_JOB_NUM_NODES", 1))
    )
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID")
    job = _integer(env, "SLURM_JOB_ID", 0)
    return Topology(
        "slurm",
        rank=_integer(env, "SLURM_PROCID"),
        world_size=world,
        local_rank=_integer(env, "SLURM_LOCALID", 0),
        local_world_size=max(world // max(nodes, 1), 1),
        node_rank=_integer(env, "SLURM_NODEID", 0),
        num_nodes=nodes,
        master_addr=env.get("MASTER_ADDR")
        or _first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "")),
        # Jobs that share a node must not share a port: derive it from the job's number.
        master_port=_integer(env, "MASTER_PORT", 15000 + job % 20000),
        evidence=tuple(f"{n}={env[n]}" for n in names if n in env),
    )


def _slurm_not_used(env: Mapping[str, str]) -> str:
    """Return why Slurm's variables do not describe this process, such as an interactive shell. Empty if they may."""
    if not any(name.startswith("SLURM_") for name in env):
        return ""
    if "SLURM_STEP_ID" not in env:
        return "inside a Slurm allocation but not started by srun (no SLURM_STEP_ID): one process"
    if "SLURM_PTY_PORT" in env or env.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return "inside an interactive Slurm shell (SLURM_PTY_PORT or SLURM_JOB_NAME): one process"
    return ""


def check_address(topology: Topology) -> None:
    """Raise a ConfigurationError if the address of rank 0 is required but not set. Ranks would wait for it forever."""
    needs_address = topology.world_size > 1
    if topology.launcher == "mpi":
        needs_address = topology.num_nodes > 1  # on one node, 127.0.0.1 is used; mpirun sets no address
    if needs_address and topology.master_addr is None:
        raise ConfigurationError(
            f"the variable MASTER_ADDR is not set, so that rank {topology.rank} of {topology.world_size} does not know "
            "the address of rank 0. Set it to rank 0's host, and MASTER_PORT to a free port there, on every rank; or "
            f"pass launcher='none' for a run of one process. Found: {', '.join(topology.evidence)}."
        )


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable as an integer. If it is not set, return `default`, or raise an error if this is None."""
    text = env.get(name)
    if text is None:
        if default is None:
            raise ConfigurationError(f"the variable {name} is not set. Set it, or pass launcher='none'.")
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"the variable {name}={text!r} is not an integer. Correct or unset it.") from None


def _first_host(nodes: str) -> str | None:
    """Return the first host of a Slurm node list: `node[003-007,9],b1` → `node003`."""
    match = re.match(r"([^\[,]+)(?:\[([0-9]+))?", nodes)
    return None if match is None else match.group(1) + (match.group(2) or "")


def is_ray(launcher: str) -> bool:
    """Return whether a Trainer's argument `launcher` names Ray, as in `"ray"` or `"ray:max_restarts=2"`."""
    return launcher.partition(":")[0] == RAY


def started_by_trainer(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a Trainer started this process as one of its ranks."""
    return STARTED_BY_TRAINER in (os.environ if environ is None else environ)


def describe(topology: Topology) -> str:
    """Return a description of this process's rank and launcher for the user."""
    if started_by_trainer():
        return f"rank {topology.rank} of {topology.world_size}, in processes that the Trainer has started"
    return str(topology)


@dataclass(frozen=True, slots=True)
class Job:
    """Job of this process according to the environment variables of its launcher."""

    name: str | None  # the same in every attempt of the job, and unique; None if the launcher sets no unique name
    attempt: int  # number of restarts by the launcher; 0 in the first attempt


def job(environ: Mapping[str, str] | None = None) -> Job:
    """Return the job of this process. The attempt counts restarts by torchrun and requeues by Slurm."""
    env = os.environ if environ is None else environ
    if JOB in env:
        attempt = _integer(env, "TORCHELASTIC_RESTART_COUNT")
        if ALL_PROCESSES in env:
            # torchrun does not count a restart because a machine has joined. A new machine even counts from 0.
            # Treat every attempt as a restart.
            attempt = max(attempt, 1)
        return Job(env[JOB], attempt)
    if "TORCHELASTIC_RESTART_COUNT" in env and STARTED_BY_TRAINER not in env:
        # torchrun's run id is "none" by default, so that it does not identify a job.
        return Job(None, _integer(env, "TORCHELASTIC_RESTART_COUNT"))
    number = slurm_job(env)
    if number is not None:
        return Job(f"slurm-{number}", _integer(env, "SLURM_RESTART_COUNT", 0))
    return Job(None, 0)


def slurm_job(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the id of this process's Slurm job, as scontrol accepts it. None if srun did not start this process."""
    env = os.environ if environ is None else environ
    if "SLURM_JOB_ID" not in env or _slurm_not_used(env):
        return None
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env["SLURM_JOB_ID"]


def in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel (not IPython in a terminal)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def has_widgets() -> bool:
    """Return whether this process is a Jupyter kernel with ipywidgets, which draw bars without control characters."""
    return in_notebook() and importlib.util.find_spec("ipywidgets") is not None


def is_interactive() -> bool:
    """Return whether this process is interactive: a notebook, IPython, or Python's own prompt (also `python -i`)."""
    ipython = sys.modules.get("IPython")
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return True
    return ipython is not None and ipython.get_ipython() is not None


def variable(name: str, default: str | None = None) -> str | None:
    """Return the value of an environment variable, or `default` if it is not set. For the topology, use `detect`."""
    return os.environ.get(name, default)


def variables(prefix: str) -> dict[str, str]:
    """Return the environment variables whose names begin with `prefix`."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def environment() -> dict[str, str]:
    """Return a copy of the environment, for a process that the launcher starts."""
    return dict(os.environ)


def on_terminal() -> bool:
    """Return whether standard output is open and a terminal."""
    output = sys.stdout
    return output is not None and not getattr(output, "closed", False) and output.isatty()


def try_output(output: Callable[..., object], *args: object, **options: object) -> bool:
    """Call `output`, which writes to standard output, and return True. Warn and return False if the write fails."""
    try:
        output(*args, **options)
    except (OSError, ValueError, AttributeError) as error:
        # A closed file raises a ValueError, and a missing one (`sys.stdout` is None) an AttributeError. With a usable
        # output, these are errors of `output` itself.
        is_output_closed = getattr(sys.stdout, "closed", True)
        if not isinstance(error, OSError) and not is_output_closed:
            raise
        warnings.warn(
            f"Standard output cannot be written ({error}): progress is not shown.", TrainwrightWarning, stacklevel=2
        )
        return False
    return True
