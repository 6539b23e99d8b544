"""Processes of a run on a Ray cluster: one actor for each rank, in a placement group.

Each actor starts one program, with the variables that torchrun would set, on the machine where Ray has placed the
actor. Ray sends the program's output to the driver. If a program or an actor fails, all others are ended. All are
started again if restarts are left.
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

PARENT, WORK = "{parent}", "{work}"  # in a command: the actor's process, and the file with the work
_OPTIONS = ("max_restarts", "cpus")
_READY_S = 120.0  # for the placement group, once the cluster is known to have the resources
_CONNECT_S = 5.0
_GRACE_S = 10.0
_LOOK_S = 0.2


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
        address: address of the cluster. Default: None, which is a running cluster, or else a new local cluster.
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


class _RankActor:
    """Actor that runs the program of one rank."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def place(self, gpu_ids: Sequence[Any]) -> tuple[str, str, int, list[str]]:
        """Return the name and address of this machine, a free port, and the IDs of this actor's GPUs."""
        ray = require_package("ray", purpose="this actor", install="ray")
        ids = [*gpu_ids, *ray.get_gpu_ids()]
        node = ray.get_runtime_context().get_node_id()
        return node, ray.util.get_node_ip_address(), free_port(), [str(i) for i in ids]

    def run(
        self, command: Sequence[str], variables: Mapping[str, str], work: bytes | None
    ) -> tuple[int, str, bytes | None]:
        """Run the program until it ends. Return its exit code, its traceback (or `""`), and its result (or None)."""
        with tempfile.TemporaryDirectory(prefix="trainwright-ray-") as folder:
            file = Path(folder, "work.pkl")
            if work is not None:
                file.write_bytes(work)
            words = [word.replace(PARENT, str(os.getpid())).replace(WORK, str(file)) for word in command]
            files = {RESULT_FILE: str(file.with_suffix(".result"))}
            self._process = subprocess.Popen(words, env={**environment(), **variables, **files})
            code = self._process.wait()
            errors = [each.read_text() for each in Path(folder).glob("error-*.txt")]
            result = file.with_suffix(".result")
            return code, "\n".join(errors), result.read_bytes() if result.exists() else None

    def stop(self) -> None:
        """End the program by SIGTERM."""
        if self._process is not None:
            self._process.terminate()


def run_on_ray(job: RayJob) -> bytes | None:
    """Run the processes of a job until all have ended. Return the bytes that rank 0 passed to `write_result`, or None.

    Raises:
        ConfigurationError: the cluster lacks the resources. No process has been started.
        WorkerError: a process has failed, and no restart is left.
    """
    ray = require_package("ray", purpose="starting processes on Ray", install="ray")
    with _connected(ray, job), _placement(ray, job) as group:
        name = secrets.token_hex(8)
        for attempt in range(job.max_restarts + 1):
            common = {
                JOB: name,
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
            }
            failure, result = _run_attempt(ray, job, group, common)
            if failure is None:
                return result
            if attempt < job.max_restarts:
                again = f"Restart {attempt + 1} of {job.max_restarts}."
                warnings.warn(f"{failure.strip().splitlines()[-1]} {again}", TrainwrightWarning, stacklevel=2)
        raise WorkerError(failure or "")


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
    of_process = {"CPU": job.cpus, **({"GPU": job.gpus} if job.gpus else {})}
    available = ray.cluster_resources()
    for resource, count in of_process.items():
        if available.get(resource, 0) < count * job.num_processes:
            raise ConfigurationError(
                f"{job.num_processes} processes of {count} {resource} need {count * job.num_processes}, and the Ray "
                f"cluster has {available.get(resource, 0):g}. Start fewer processes, or add machines."
            )
    bundles = [of_process] * job.num_processes
    strategy = "PACK"
    if job.num_machines is not None:
        local = job.num_processes // job.num_machines
        bundles = [{name: count * local for name, count in of_process.items()}] * job.num_machines
        strategy = "STRICT_SPREAD" if job.num_machines > 1 else "STRICT_PACK"
        alive = sum(bool(node["Alive"]) for node in ray.nodes())
        if alive < job.num_machines:
            raise ConfigurationError(f"num_machines={job.num_machines}, but the Ray cluster has {alive}. Use fewer.")
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


def _run_attempt(ray: Any, job: RayJob, group: Any, common: Mapping[str, str]) -> tuple[str | None, bytes | None]:
    """Start all ranks and wait for them. Return the first failure, if any, and the result of rank 0."""
    path = {"env_vars": {"PYTHONPATH": import_path()}}
    scheduling = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    per_bundle = job.num_processes // len(group.bundle_specs)
    actors = [
        ray.remote(_RankActor)
        .options(
            num_cpus=job.cpus,
            num_gpus=job.gpus,
            max_concurrency=2,  # `stop` runs beside `run`
            runtime_env=path,
            scheduling_strategy=scheduling(group, placement_group_bundle_index=i // per_bundle),
        )
        .remote()
        for i in range(job.num_processes)
    ]
    try:
        try:
            places = ray.get([actor.place.remote([]) for actor in actors])
        except ray.exceptions.RayActorError as error:
            return f"an actor did not start: {error}", None
        ranked = _ranked(actors, places)
        waiting = {}
        for rank, (actor, variables) in enumerate(ranked):
            given = {**common, **job.variables, **variables, "PYTHONPATH": import_path()}
            waiting[actor.run.remote(list(job.command), given, job.work)] = rank
        return _wait(ray, waiting, [actor for actor, _ in ranked])
    finally:
        for actor in actors:
            ray.kill(actor)  # its program ends with it


def _ranked(
    actors: Sequence[Any], places: Sequence[tuple[str, str, int, list[str]]]
) -> list[tuple[Any, dict[str, str]]]:
    """Order actors by machine, and return each with the variables of its rank."""
    machines: dict[str, list[int]] = {}
    for i, (node, *_) in enumerate(places):
        machines.setdefault(node, []).append(i)
    order = [i for members in machines.values() for i in members]
    _, address, port, _ = places[order[0]]
    found: list[tuple[Any, dict[str, str]]] = []
    for group_rank, members in enumerate(machines.values()):
        # Ranks of a machine see all of its GPUs, as with torchrun: LOCAL_RANK is the index.
        gpus = [gpu for i in members for gpu in places[i][3]]
        for local_rank, i in enumerate(members):
            variables = {
                "RANK": str(len(found)),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(len(actors)),
                "LOCAL_WORLD_SIZE": str(len(members)),
                "GROUP_RANK": str(group_rank),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            }
            found.append((actors[i], variables | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})))
    return found


def _wait(ray: Any, waiting: dict[Any, int], actors: Sequence[Any]) -> tuple[str | None, bytes | None]:
    result: bytes | None = None
    failures: list[str] = []
    ended_by_us = False
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=_GRACE_S if failures else None)
        if not done:
            break  # they did not end by SIGTERM
        rank = waiting.pop(done[0])
        try:
            code, error, found = ray.get(done[0])
        except ray.exceptions.RayError as error_of_ray:
            code = 1
            error = str(error_of_ray).splitlines()[0]
            found = None
        if rank == 0:
            result = found
        if code:
            failures.append(error or f"rank {rank} ended with exit code {code}.")
            if not ended_by_us:
                ended_by_us = True
                for actor in actors:
                    with contextlib.suppress(ray.exceptions.RayError):
                        actor.stop.remote()
    return (failures[0] if failures else None), result


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
    found: dict[str, Any] = {}
    for word in launcher.split(":")[1:]:
        name, _, value = word.partition("=")
        if name not in _OPTIONS or not value.isdigit():
            raise ConfigurationError(
                f"launcher={launcher!r}: {word!r} is not an option.{nearest(name, _OPTIONS)} Write, for example, "
                f"'ray:max_restarts=2'. Options: {', '.join(_OPTIONS)}, each a whole number."
            )
        found[name] = int(value)
    return found
