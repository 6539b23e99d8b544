"""Manifests for Kubernetes, checked with the models that Kubeflow publishes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from trainwright.core.errors import ConfigurationError
from trainwright.launch.launch import launch

_needs_models = pytest.mark.requires("kubeflow_trainer_api", reason="the schemas of Kubeflow Trainer 2.3 and JobSet")
_COMMAND = (
    "--kubernetes --kubernetes_image lab/train:1 --num_machines 2 --num_processes 8 --num_cpu_threads_per_process 4 "
    "--mixed_precision bf16 --max_restarts 3 --kubernetes_claim runs:/runs --kubernetes_namespace lab "
)


def _manifest(capsys: pytest.CaptureFixture[str], words: str = "") -> dict[str, Any]:
    assert launch(f"{_COMMAND} {words} /app/Train_it.py --lr 1".split()) == 0
    found: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    assert found["metadata"] == {"name": "train-it", "namespace": "lab"}
    return found


def _check(model: str, content: dict[str, Any]) -> None:
    """Check that a model of `kubeflow_trainer_api` has all keys of `content`, with values of these types."""
    import kubeflow_trainer_api.models as models  # type: ignore[import-untyped]  # the package has no py.typed

    found = getattr(models, model).from_dict(content)  # a model ignores unknown keys
    assert found.to_dict() == content


def _check_container(found: dict[str, Any], **variables: str) -> None:
    assert found["image"] == "lab/train:1"
    assert found["command"] == ["torchrun", "/app/Train_it.py", "--lr", "1"]
    values = {one["name"]: one.get("value") for one in found["env"]}
    assert values.items() >= {"ACCELERATE_MIXED_PRECISION": "bf16", "OMP_NUM_THREADS": "4", **variables}.items()


_LIMITS = {"limits": {"nvidia.com/gpu": "4", "cpu": "16"}}
_MOUNTS = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "claim", "mountPath": "/runs"}]


def _check_pod(pod: dict[str, Any]) -> None:
    assert pod["terminationGracePeriodSeconds"] > 30  # preemption_grace
    assert pod["volumes"][1] == {"name": "claim", "persistentVolumeClaim": {"claimName": "runs"}}
    assert pod["containers"][0]["volumeMounts"] == _MOUNTS


@pytest.mark.slow
@_needs_models
def test_a_pytorch_job(capsys: pytest.CaptureFixture[str]) -> None:
    found = _manifest(capsys)
    assert (found["apiVersion"], found["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = found["spec"]
    # The keys and types of KubeflowOrgV1PyTorchJobSpec, RunPolicy and ReplicaSpec in kubeflow-training 1.9.4.
    assert spec["nprocPerNode"] == "4"
    assert spec["runPolicy"] == {"backoffLimit": 3}
    assert spec.keys() == {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs"}
    assert spec["pytorchReplicaSpecs"].keys() == {"Master", "Worker"}
    for replica in spec["pytorchReplicaSpecs"].values():
        assert replica.keys() == {"replicas", "restartPolicy", "template"}
        assert (replica["replicas"], replica["restartPolicy"]) == (1, "OnFailure")
        _check("IoK8sApiCoreV1PodTemplateSpec", replica["template"])
        pod = replica["template"]["spec"]
        _check_pod(pod)
        (container,) = pod["containers"]
        assert (container["name"], container["resources"]) == ("pytorch", _LIMITS)
        _check_container(container)


@_needs_models
def test_a_train_job(capsys: pytest.CaptureFixture[str]) -> None:
    found = _manifest(capsys, "--kubernetes_kind trainjob")
    _check("TrainerV1alpha1TrainJob", found)
    trainer = found["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["resourcesPerNode"]) == (2, 4, _LIMITS)
    _check_container(trainer, PET_MAX_RESTARTS="3")
    (patch,) = found["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    _check_pod(job["template"]["spec"]["template"]["spec"])


@_needs_models
def test_a_job_set(capsys: pytest.CaptureFixture[str]) -> None:
    found = _manifest(capsys, "--kubernetes_kind jobset")
    _check("JobsetV1alpha2JobSet", found)
    assert found["spec"]["failurePolicy"] == {"maxRestarts": 3}
    (replicated,) = found["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (2, 2, 0)
    pod = job["template"]["spec"]
    _check_pod(pod)
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "train-it-node-0-0.train-it"}
    _check_container(pod["containers"][0], **variables, PET_MASTER_PORT="29500")
    rank = pod["containers"][0]["env"][-1]
    assert rank["name"] == "PET_NODE_RANK"
    assert "job-completion-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--kubernetes --num_processes 2", "needs --kubernetes_image too"),
        (f"{_COMMAND} --kubernetes_claim runs", "--kubernetes_claim runs: expected the name of the claim"),
        (f"{_COMMAND} --kubernetes_name 4_u", "--kubernetes_name 4_u: expected at most 40 letters"),
        (f"{_COMMAND} --kubernetes_output /no/job.yaml", "cannot be written"),
        (f"{_COMMAND} --kubernetes_kind pod", "Known: pytorchjob, trainjob, jobset"),
    ],
)
def test_options_that_do_not_fit_are_errors(words: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        launch([*words.split(), "train.py"])
