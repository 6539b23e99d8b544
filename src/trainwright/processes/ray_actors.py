"""Processes of a run on a Ray cluster: one actor for each rank, in a placement group.

Each actor starts one program, with the variables that torchrun would set, on the machine where Ray has placed the
actor. Ray sends the program's output to the driver. If a program or an actor fails, all others are ended. All are
started again while the number of restarts is below `max_restarts`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError, TrainwrightWarning, WorkerError, nearest, require_package
from trainwright.core.process import JOB, RESULT_FILE, environment, variable
from trainwright.processes.launcher import free_port, import_path

PARENT = "{parent}"  # in a command: the process ID of the actor
WORK = "{work}"  # in a command: the file with the work
_OPTIONS = ("max_restarts", "cpus")  # of `parse_launcher`
_READY_S = 120.0  # for the placement group, once the cluster is known to have the resources
_CONNECT_S = 5.0  # for one connection to the address of a cluster
_GRACE_S = 10.0  # for programs to end after SIGTERM


@dataclass(frozen=True, slots=True)
class RayJob:
    """Processes to run on Ray.

    Attributes:
        command: program and arguments of each process. `PARENT` and `WORK` are replaced.
        num_processes: processes on all machines.
        num_machines: number of machines over which the processes are divided evenly. Default: None, which lets Ray
            place them.
        gpus: GPUs of each process, 0 or 1. Default: 0.
        cpus: CPU cores of each process. Default: 1.
        variables: further environment variables. Default: none.
        max_restarts: number of times that all processes are started again after a failure. Default: 0.
        address: address of the cluster. Ignored if this process is already connected to a cluster. Default: None, which
            is a running cluster, or else a new local cluster.
        work: content of the file `WORK`. Default: None, for a command without `WORK`.
    """

    command: Sequence[str]
    num_processes: int
    num_machines: int | None = None
    gpus: int = 0
    cpus: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    address: str | None = None
    work: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of an actor in the cluster."""

    node: str  # Ray's ID of the machine
    address: str  # of the machine
    port: int  # free on the machine
    gpus: list[str]  # IDs of the actor's GPUs


class _RankActor:
    """Actor that runs the program of one rank."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def place(self) -> _Place:
        """Return the place of this actor."""
        ray = require_package("ray", purpose="this actor", install="ray")
        return _Place(
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            port=free_port(),
            gpus=[str(gpu) for gpu in ray.get_gpu_ids()],
        )

    def run(
        self, command: Sequence[str], variables: Mapping[str, str], work: bytes | None
    ) -> tuple[int, str, bytes | None]:
        """Run the program until it ends. Return its exit code, its traceback (or `""`), and its result (or None)."""
        with tempfile.TemporaryDirectory(prefix="trainwright-ray-") as folder:
            work_file = Path(folder, "work.pkl")
            result_file = Path(folder, "work.result")
            if work is not None:
                work_file.write_bytes(work)
            words = [word.replace(PARENT, str(os.getpid())).replace(WORK, str(work_file)) for word in command]
            all_variables = {**environment(), **variables, RESULT_FILE: str(result_file)}
            self._process = subprocess.Popen(words, env=all_variables)
            code = self._process.wait()
            # `trainwright.processes.worker` writes tracebacks beside the work.
            errors = [file.read_text() for file in Path(folder).glob("error-*.txt")]
            result = result_file.read_bytes() if result_file.exists() else None
            return code, "\n".join(errors), result

    def stop(self) -> None:
        """End the program by SIGTERM."""
        if self._process is not None:
            self._process.terminate()


def run_on_ray(job: RayJob) -> bytes | None:
    """Run the processes of a job until all have ended. Return the bytes that rank 0 passed to `write_result`, or None.

    Raises:
        ConfigurationError: the cluster cannot be reached or lacks the resources. No process has been started.
        MissingPackageError: ray is not installed.
        WorkerError: a process has failed, and no restart is left.
    """
    ray = require_package("ray", purpose="starting processes on Ray", install="ray")
    with _connected(ray, job), _placement(ray, job) as group:
        name = secrets.token_hex(8)
        failure: str | None = None
        for attempt in range(job.max_restarts + 1):
            variables = {
                JOB: name,
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
            }
            failure, result = _run_attempt(ray, job, group, variables)
            if failure is None:
                return result
            if attempt < job.max_restarts:
                headline = failure.strip().splitlines()[-1]  # the last line of a traceback names the error
                text = f"{headline} Restart {attempt + 1} of {job.max_restarts}."
                warnings.warn(text, TrainwrightWarning, stacklevel=2)
        assert failure is not None  # each attempt has failed
        raise WorkerError(failure)


@contextlib.contextmanager
def _connected(ray: Any, job: RayJob) -> Iterator[None]:
    """Context manager that connects to a cluster, or starts a local one, unless this process is connected already."""
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": True, "logging_level": "WARNING"}
    try:
        _check_address(job.address or "")
        ray.init(address=job.address or "auto", **options)
    except ConnectionError as error:
        if job.address is not None:
            raise ConfigurationError(f"the Ray cluster at {job.address} cannot be reached: {error}") from error
        # No cluster runs here. Ray places actors by a count of CPUs, which may exceed the cores of the machine.
        cpus = max(os.cpu_count() or 1, job.num_processes * job.cpus)
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **options)
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Connect to an address of the form host:port once. Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error


@contextlib.contextmanager
def _placement(ray: Any, job: RayJob) -> Iterator[Any]:
    """Context manager that reserves the resources of a job, and yields Ray's placement group."""
    of_process = {"CPU": job.cpus}
    if job.gpus:
        of_process["GPU"] = job.gpus
    available = ray.cluster_resources()
    for resource, count in of_process.items():
        num_needed = count * job.num_processes
        num_available = available.get(resource, 0)
        if num_available < num_needed:
            raise ConfigurationError(
                f"{job.num_processes} processes of {count} {resource} need {num_needed}, and the Ray "
                f"cluster has {num_available:g}. Start fewer processes, or add machines."
            )
    if job.num_machines is None:
        bundles = [of_process] * job.num_processes
        strategy = "PACK"
    else:
        num_alive = sum(bool(node["Alive"]) for node in ray.nodes())
        if num_alive < job.num_machines:
            raise ConfigurationError(
                f"num_machines={job.num_machines}, but the Ray cluster has {num_alive}. Use fewer."
            )
        # One bundle per machine, because Ray spreads bundles and not actors.
        num_local = job.num_processes // job.num_machines
        of_machine = {name: count * num_local for name, count in of_process.items()}
        bundles = [of_machine] * job.num_machines
        strategy = "STRICT_SPREAD" if job.num_machines > 1 else "STRICT_PACK"
    group = ray.util.placement_group(bundles, strategy=strategy)
    try:
        if not group.wait(_READY_S):
            raise ConfigurationError(
                f"the Ray cluster did not free {bundles} within {_READY_S:g} s. Other jobs use them, or no machine has "
                "enough. Start fewer processes, or try again when the other jobs have ended."
            )
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _run_attempt(ray: Any, job: RayJob, group: Any, variables: Mapping[str, str]) -> tuple[str | None, bytes | None]:
    """Start all ranks and wait for them. Return the first failure and the result of rank 0, or None for each."""
    actors = _start_actors(ray, job, group)
    try:
        try:
            places = ray.get([actor.place.remote() for actor in actors])
        except ray.exceptions.RayActorError as error:
            return f"an actor did not start: {error}", None
        rank_by_call = {}
        actors_by_rank = []
        for rank, (index, variables_of_rank) in enumerate(_ranks(places)):
            actor = actors[index]
            all_variables = {**variables, **job.variables, **variables_of_rank, "PYTHONPATH": import_path()}
            rank_by_call[actor.run.remote(list(job.command), all_variables, job.work)] = rank
            actors_by_rank.append(actor)
        return _wait(ray, rank_by_call, actors_by_rank)
    finally:
        for actor in actors:
            ray.kill(actor)  # ends the actor's program, too


def _start_actors(ray: Any, job: RayJob, group: Any) -> list[Any]:
    """Start an actor for each process. Their order says nothing about ranks."""
    num_per_bundle = job.num_processes // len(group.bundle_specs)
    actors = []
    for index in range(job.num_processes):
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index // num_per_bundle
        )
        actor_class = ray.remote(_RankActor).options(
            num_cpus=job.cpus,
            num_gpus=job.gpus,
            max_concurrency=2,  # `stop` is called while `run` runs
            runtime_env={"env_vars": {"PYTHONPATH": import_path()}},
            scheduling_strategy=strategy,
        )
        actors.append(actor_class.remote())
    return actors


def _ranks(places: Sequence[_Place]) -> list[tuple[int, dict[str, str]]]:
    """Assign consecutive ranks to the actors of each machine. Return the actor's index and variables of each rank."""
    machines: dict[str, list[int]] = {}
    for index, place in enumerate(places):
        machines.setdefault(place.node, []).append(index)
    main = places[0]  # of rank 0, because its machine is the first in `machines`
    ranks: list[tuple[int, dict[str, str]]] = []
    for group_rank, members in enumerate(machines.values()):
        # Ranks of a machine see all of its GPUs, as with torchrun: LOCAL_RANK is the index.
        gpus: list[str] = []
        for index in members:
            gpus.extend(places[index].gpus)
        for local_rank, index in enumerate(members):
            variables = {
                "RANK": str(len(ranks)),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_WORLD_SIZE": str(len(members)),
                "GROUP_RANK": str(group_rank),
                "MASTER_ADDR": main.address,
                "MASTER_PORT": str(main.port),
            }
            if gpus:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            ranks.append((index, variables))
    return ranks


def _wait(ray: Any, rank_by_call: dict[Any, int], actors: Sequence[Any]) -> tuple[str | None, bytes | None]:
    """Wait until all calls of `run` have returned. End the other programs after the first failure."""
    result: bytes | None = None
    first_failure: str | None = None
    while rank_by_call:
        timeout_s = None if first_failure is None else _GRACE_S
        done, _ = ray.wait(list(rank_by_call), num_returns=1, timeout=timeout_s)
        if not done:
            break  # the programs did not end by SIGTERM; the caller kills their actors
        rank = rank_by_call.pop(done[0])
        try:
            code, error, result_of_rank = ray.get(done[0])
        except ray.exceptions.RayError as error_of_ray:
            code = 1
            error = str(error_of_ray).splitlines()[0]
            result_of_rank = None
        if rank == 0:
            result = result_of_rank
        if code != 0 and first_failure is None:
            first_failure = error or f"rank {rank} ended with exit code {code}."
            for actor in actors:
                with contextlib.suppress(ray.exceptions.RayError):
                    actor.stop.remote()
    return first_failure, result


def write_result(result: bytes) -> None:
    """Write the result of this rank to the file that its actor reads."""
    file = variable(RESULT_FILE)
    assert file is not None  # an actor has started this process
    Path(file).write_bytes(result)


def parse_launcher(launcher: str) -> dict[str, Any]:
    """Return the options in a Trainer's argument `launcher`, such as `"ray:max_restarts=2:cpus=4"`.

    Raises:
        ConfigurationError: an option is unknown, or its value is not a whole number.
    """
    options: dict[str, Any] = {}
    for word in launcher.split(":")[1:]:
        name, _, value = word.partition("=")
        if name not in _OPTIONS or not value.isdigit():
            raise ConfigurationError(
                f"launcher={launcher!r}: {word!r} is not an option.{nearest(name, _OPTIONS)} Write, for example, "
                f"'ray:max_restarts=2'. Options: {', '.join(_OPTIONS)}, each a whole number."
            )
        options[name] = int(value)
    return options
