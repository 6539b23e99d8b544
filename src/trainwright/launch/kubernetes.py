"""Manifests for Kubernetes: PyTorchJob and TrainJob of Kubeflow, and JobSet. Every pod runs torchrun."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.launch.launch_config import LaunchConfig
from trainwright.launch.reading import LaunchCommand

_GRACE_S = 60  # longer than the 30 s that torchrun waits for its processes after SIGTERM
_PORT = 29500
_Mapping = dict[str, Any]


def write_manifest(command: LaunchCommand) -> int:
    """Write the manifest to standard output, or to `--kubernetes_output`. Return the exit code 0."""
    import yaml  # `--help` does without it

    text = yaml.safe_dump(manifest(command), sort_keys=False)
    output = command.config.kubernetes_output
    if output is None:
        print(text, end="")
        return 0
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--kubernetes_output cannot be written: {error}. Pass another path.") from error
    print(f"Submit the job with: kubectl create -f {output}")
    return 0


def manifest(command: LaunchCommand) -> _Mapping:
    """Return the manifest of a job. Raise ConfigurationError without an image, or for an invalid name."""
    config = command.config
    if not config.kubernetes_image:
        raise ConfigurationError("--kubernetes needs --kubernetes_image too.")
    name = config.kubernetes_name or re.sub(r"[^a-z0-9]+", "-", Path(command.script).stem.lower()).strip("-")[:40]
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise ConfigurationError(
            f"--kubernetes_name {name}: expected at most 40 letters (a-z), digits and dashes that begin with a letter."
        )
    metadata = {"name": name}
    if config.kubernetes_namespace:
        metadata["namespace"] = config.kubernetes_namespace
    build = {"trainjob": _train_job, "jobset": _job_set}.get(config.kubernetes_kind or "", _pytorch_job)
    api, kind, spec = build(config, _container(command), name)
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def _container(command: LaunchCommand) -> _Mapping:
    """Return the container that runs torchrun in each pod."""
    config = command.config
    kind = {"module": ["-m"], "program": ["--no-python"]}.get(command.kind, [])
    container: _Mapping = {
        "name": "node",
        "image": config.kubernetes_image,
        "command": ["torchrun", *kind, command.script, *command.arguments],
    }
    container["env"] = [{"name": name, "value": value} for name, value in config.environment().items()]
    limits = {} if config.cpu else {"nvidia.com/gpu": str(_local(config))}
    if config.num_cpu_threads_per_process:
        limits["cpu"] = str(config.num_cpu_threads_per_process * _local(config))
    if limits:
        container["resources"] = {"limits": limits}
    container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if config.kubernetes_claim:
        container["volumeMounts"].append({"name": "claim", "mountPath": _claim(config.kubernetes_claim)[1]})
    return container


def _local(config: LaunchConfig) -> int:
    """Return the number of processes of a machine."""
    return (config.num_processes or 1) // (config.num_machines or 1)


def _claim(text: str) -> tuple[str, str]:
    """Return the name of a volume claim and the folder where it is mounted."""
    name, _, folder = text.partition(":")
    if not name or not folder.startswith("/"):
        raise ConfigurationError(
            f"--kubernetes_claim {text}: expected the name of the claim and a folder, such as runs:/runs."
        )
    return name, folder


def _pod(config: LaunchConfig) -> _Mapping:
    """Return the properties of a pod except its container."""
    volumes: list[_Mapping] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]  # 64 MiB without it
    if config.kubernetes_claim:
        claim = {"claimName": _claim(config.kubernetes_claim)[0]}
        volumes.append({"name": "claim", "persistentVolumeClaim": claim})
    return {"terminationGracePeriodSeconds": _GRACE_S, "volumes": volumes}


# The functions below return `apiVersion`, `kind` and `spec` of a manifest. They change `container`.


def _pytorch_job(config: LaunchConfig, container: _Mapping, name: str) -> tuple[str, str, _Mapping]:
    if not container["env"]:
        del container["env"]
    container["name"] = "pytorch"  # the operator finds the container by this name
    template = {"spec": {**_pod(config), "containers": [container]}}
    policy = "OnFailure" if config.max_restarts else "Never"
    replicas = {}
    for role, count in {"Master": 1, "Worker": (config.num_machines or 1) - 1}.items():
        if count:
            # A copy, because YAML writes an object that appears twice as a reference.
            replicas[role] = {"replicas": count, "restartPolicy": policy, "template": deepcopy(template)}
    spec = {
        "nprocPerNode": str(_local(config)),
        "runPolicy": {"backoffLimit": config.max_restarts or 0},
        "pytorchReplicaSpecs": replicas,
    }
    return "kubeflow.org/v1", "PyTorchJob", spec


def _train_job(config: LaunchConfig, container: _Mapping, name: str) -> tuple[str, str, _Mapping]:
    # `trainer` has no field for the name and the mounts of the container, so a patch adds them to the pod.
    mounts = container.pop("volumeMounts")
    pod = {**_pod(config), "containers": [{"name": container.pop("name"), "volumeMounts": mounts}]}
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    container["env"] += _variables(PET_MAX_RESTARTS=config.max_restarts or 0)
    trainer = {
        **container,
        "numNodes": config.num_machines or 1,
        "numProcPerNode": _local(config),
    }
    if "resources" in trainer:
        trainer["resourcesPerNode"] = trainer.pop("resources")
    spec = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": trainer,
        "runtimePatches": [
            {"manager": "trainwright", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
        ],
    }
    return "trainer.kubeflow.org/v1alpha1", "TrainJob", spec


def _job_set(config: LaunchConfig, container: _Mapping, name: str) -> tuple[str, str, _Mapping]:
    machines = config.num_machines or 1
    container["env"] += _variables(
        PET_NNODES=machines,
        PET_NPROC_PER_NODE=_local(config),
        PET_MASTER_ADDR=f"{name}-node-0-0.{name}",
        PET_MASTER_PORT=config.main_process_port or _PORT,
    )
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container["env"].append({"name": "PET_NODE_RANK", "valueFrom": index})
    job = {
        "parallelism": machines,
        "completions": machines,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # one failed pod restarts all
        "template": {"spec": {**_pod(config), "restartPolicy": "Never", "containers": [container]}},
    }
    spec = {
        "failurePolicy": {"maxRestarts": config.max_restarts or 0},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
    }
    return "jobset.x-k8s.io/v1alpha2", "JobSet", spec


def _variables(**values: object) -> list[_Mapping]:
    return [{"name": name, "value": str(value)} for name, value in values.items()]
