"""Training jobs of Amazon SageMaker: options, the estimator, and the processes of containers."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.launch.sagemaker_signatures import RECORDED, signatures
from trainwright.core.errors import ConfigurationError
from trainwright.launch import sagemaker
from trainwright.launch.launch import launch
from trainwright.launch.sagemaker import container_options
from trainwright.processes.launcher import free_port

_COMMAND = ("--config_file", "sm.yaml", "train.py")
# A file of `accelerate config`.
_FILE = """
base_job_name: accelerate-sagemaker-1
compute_environment: AMAZON_SAGEMAKER
distributed_type: DATA_PARALLEL
ec2_instance_type: ml.g5.12xlarge
iam_role_name: arn:aws:iam::1:role/train
image_uri: null
mixed_precision: bf16
num_machines: 2
profile: null
py_version: py312
pytorch_version: 2.8.0
region: us-east-1
transformers_version: 4.56.2
use_cpu: false
dynamo_config: {dynamo_backend: INDUCTOR}
additional_args: {use_spot_instances: true, max_wait: 7200, environment: {A: b}}
"""


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_DEFAULT_REGION", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    Path("train.py").write_text("")
    Path("requirements.txt").write_text("trainwright\n")
    Path("sm.yaml").write_text(_FILE)


class _Sdk:
    """In place of sagemaker, boto3 and botocore: estimators with the recorded arguments, and a session."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.session = mock.Mock(region_name="us-east-1")
        self.failure: Exception | None = None
        self.jobs: list[dict[str, Any]] = []
        self.errors = types.SimpleNamespace(
            BotoCoreError=type("BotoCoreError", (Exception,), {}), ClientError=type("ClientError", (Exception,), {})
        )
        self.status = type("UnexpectedStatusException", (ValueError,), {})
        modules = {
            "boto3": types.SimpleNamespace(Session=mock.Mock(return_value=self.session)),
            "botocore.exceptions": self.errors,
            "sagemaker": types.SimpleNamespace(Session=lambda session: ("cloud", session)),
            "sagemaker.local": types.SimpleNamespace(LocalSession=lambda session: ("local", session)),
            "sagemaker.exceptions": types.SimpleNamespace(UnexpectedStatusException=self.status),
        }
        for path, names in json.loads(RECORDED.read_text()).items():
            module, _, name = path.rpartition(".")
            modules[module] = types.SimpleNamespace(**{name: self._estimator(path, names)})
        monkeypatch.setattr(sagemaker, "require_package", lambda module, **_: modules[module])
        monkeypatch.setattr(sagemaker, "version", lambda _: "2.257.7")

    def _estimator(self, path: str, names: dict[str, list[str]]) -> type:
        sdk = self

        class Estimator:
            model_data = "s3://bucket/model.tar.gz"

            def __init__(self, **given: Any) -> None:
                assert given.keys() <= set(names["arguments"])
                source = {file.name: file.read_text() for file in Path(given["source_dir"]).iterdir()}
                sdk.jobs.append({"class": path, "source": source, **given})

            def fit(self, inputs: Any) -> None:
                assert names["fit"][0] == "inputs"
                sdk.jobs[-1]["inputs"] = inputs
                if sdk.failure is not None:
                    raise sdk.failure

        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names["arguments"]]
        Estimator.__init__.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # of a function
        return Estimator


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> _Sdk:
    return _Sdk(monkeypatch)


def test_a_file_of_accelerate_starts_a_job_with_the_launcher_on_each_host(
    sdk: _Sdk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch([*_COMMAND, "--lr", "1e-3", "--epochs", "3", "--save", "True", "--name=a"]) == 0
    (job,) = sdk.jobs
    source = job.pop("source")
    assert source.keys() == {"train.py", "requirements.txt", "sm.yaml", "trainwright_sagemaker.py"}
    assert "start_processes(['train.py', *sys.argv[1:]])" in source["trainwright_sagemaker.py"]
    del job["source_dir"]
    assert job == {
        "class": "sagemaker.huggingface.HuggingFace",
        "entry_point": "trainwright_sagemaker.py",
        "role": "arn:aws:iam::1:role/train",
        "instance_type": "ml.g5.12xlarge",
        "instance_count": 2,
        "image_uri": None,
        "py_version": "py312",
        "pytorch_version": "2.8.0",
        "transformers_version": "4.56.2",
        "base_job_name": "accelerate-sagemaker-1",
        "hyperparameters": {"lr": 0.001, "epochs": 3, "save": True, "name": "a"},
        "environment": {
            "ACCELERATE_USE_CPU": "false",
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
            "A": "b",
        },
        "metric_definitions": [],
        "debugger_hook_config": False,
        "use_spot_instances": True,
        "max_wait": 7200,
        "sagemaker_session": ("cloud", sdk.session),
        "inputs": None,
    }
    assert "s3://bucket/model.tar.gz" in capsys.readouterr().out


def _options(*more: str) -> list[str]:
    words = "--sagemaker --ec2_instance_type local --iam_role_name train --image_uri lab/train:1"
    return [*words.split(), *more]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--sagemaker train.py", "--sagemaker needs --ec2_instance_type too"),
        ("--region us-east-1 train.py", "--region needs --sagemaker too"),
        ("{} --num_processes 8 train.py", "--num_processes 8 has no effect with --sagemaker"),
        ("{} --num_machines 2 train.py", "needs --sagemaker_distributed_type DATA_PARALLEL too"),
        ("{} --sagemaker_distributed_type MODEL_PARALLEL train.py", "MODEL_PARALLEL is not supported"),
        ('{} --additional_args {"secret":1,"environment":{"AWS_SECRET_ACCESS_KEY":"abc"}} train.py', "KEY is not supp"),
        ('{} --additional_args {"max_wiat":1} train.py', "has no argument 'max_wiat'. Did you mean 'max_wait'"),
        ("{} --sagemaker_inputs_file requirements.txt train.py", ""),
        ("{} -m json", "runs a script whose name ends in .py"),
    ],
)
def test_wrong_options_are_refused_before_a_job_starts(words: str, text: str, sdk: _Sdk) -> None:
    argv = [word for part in words.split() for word in (_options() if part == "{}" else [part])]
    if not text:
        Path("requirements.txt").write_text("a\nb\n")
        text = "'b' has no tab"
    with pytest.raises(ConfigurationError) as caught:
        launch(argv)
    assert text in str(caught.value)
    assert "abc" not in str(caught.value)
    assert sdk.jobs == []


@pytest.mark.parametrize(
    ("change", "text"),
    [({"region_name": None}, "needs a region"), ({"get_credentials.return_value": None}, "no AWS credentials")],
)
def test_a_session_without_region_or_credentials_submits_nothing(change: dict[str, Any], text: str, sdk: _Sdk) -> None:
    sdk.session.configure_mock(**change)
    with pytest.raises(ConfigurationError, match=text):
        launch(_options("train.py"))
    assert sdk.jobs == []


_needs_sagemaker = pytest.mark.requires("sagemaker", reason="the estimators themselves")


@_needs_sagemaker
def test_the_recorded_arguments_are_those_of_the_package() -> None:
    assert json.loads(RECORDED.read_text()) == signatures()


def test_a_container_with_gpus_has_the_options_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_HOSTS", '["algo-1", "algo-2"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
    monkeypatch.setenv("SM_NUM_GPUS", "4")
    place = "--num_machines 2 --machine_rank 1 --main_process_ip algo-1 --main_process_port 7777"
    assert container_options() == ["--num_processes", "8", *place.split()]
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-3")
    with pytest.raises(ConfigurationError, match="SM_CURRENT_HOST=algo-3 is not among"):
        container_options()


_SCRIPT = """
import sys
import torch
from trainwright import Accelerator
accelerator = Accelerator()
total = int(accelerator.reduce(torch.tensor(accelerator.process_index + 1)))
open(f"rank-{accelerator.process_index}", "w").write(f"{total} {sys.argv[1:]}")
"""


@pytest.mark.engines
@pytest.mark.distributed
def test_the_containers_of_two_hosts_train_together(sdk: _Sdk) -> None:
    Path("train.py").write_text(_SCRIPT)
    assert launch([*_COMMAND, "--lr", "0.1"]) == 0
    Path("trainwright_sagemaker.py").write_text(sdk.jobs[0]["source"]["trainwright_sagemaker.py"])
    hosts = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_NUM_GPUS": "0"}
    hosts |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    runs = [
        subprocess.Popen(
            [sys.executable, "trainwright_sagemaker.py", "--lr", "0.1"],
            env=os.environ | hosts | {"SM_CURRENT_HOST": host},
        )
        for host in ("algo-1", "algo-2")
    ]
    assert [run.wait(120) for run in runs] == [0, 0]
    for rank in range(2):
        assert Path(f"rank-{rank}").read_text() == "3 ['--lr', '0.1']"
