"""`trainwright config default`, `update`, `show`, `to-fsdp2`, and what `env` shows of it; `tpu-config`."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trainwright.cli.main import main
from trainwright.launch.launch import has_no_devices
from trainwright.launch.reading import read_file


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.launch.config_file.device_count", lambda: 0)


def _fails(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


def test_default_writes_the_file_that_launch_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "default", "--mixed_precision", "bf16"]) == 0
    assert "Start a script with it: trainwright launch script.py" in capsys.readouterr().out
    assert read_file(None)[1] == {"cpu": True, "num_machines": 1, "num_processes": 1, "mixed_precision": "bf16"}
    _fails(["config", "default"], "exists. Delete it", capsys)
    assert read_file(None)[1]["mixed_precision"] == "bf16"


def test_update_keeps_values_and_the_kind_of_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: multi_npu\nfp16: true\nnum_processes: 2\n"
        "main_training_function: main\ndynamo_backend: INDUCTOR\nmain_process_ip: null\n"
    )
    values = read_file(file)[1]
    assert main(["config", "update", "--config_file", str(file)]) == 0
    assert "Omitted, because they set nothing: main_training_function" in capsys.readouterr().out
    assert read_file(file)[1] == values
    assert yaml.safe_load(file.read_text()) == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_NPU",
        "dynamo_config": {"dynamo_backend": "INDUCTOR"},
        "mixed_precision": "fp16",
        "num_processes": 2,
    }
    before = file.read_text()
    assert main(["config", "update", "--config_file", str(file)]) == 0
    assert file.read_text() == before


def test_show_names_the_origin_of_each_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show"]) == 0
    assert capsys.readouterr().out == "no configuration file\n"
    file = tmp_path / "a.yaml"
    file.write_text("num_processes: 2\nmixed_precision: no\n")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert main(["config", "show", "--config_file", str(file)]) == 0
    variable = "the variable ACCELERATE_MIXED_PRECISION"
    assert capsys.readouterr().out.splitlines() == [
        str(file),
        f"num_processes=2 ({file})",
        f"mixed_precision=bf16 ({variable})",
        f"mixed_precision=bf16 of {variable} is used, not no of {file}.",
    ]


def test_to_fsdp2_writes_another_file_or_replaces_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "1.yaml", tmp_path / "2.yaml"
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_use_orig_params: true}\n"
    before.write_text(text)
    command = ["to-fsdp2", "--config_file", str(before)]
    _fails(command, "pass --output_file with a path, or --overwrite", capsys)
    assert main([*command, "--output_file", str(after)]) == 0
    assert "Omitted, because FSDP2 does not have them: fsdp_use_orig_params" in capsys.readouterr().out
    assert before.read_text() == text
    assert yaml.safe_load(after.read_text())["fsdp_config"] == {"fsdp_version": 2, "fsdp_reshard_after_forward": False}
    _fails([*command, "--output_file", str(after)], "exists. Pass --overwrite", capsys)
    assert main([*command, "--overwrite"]) == 0
    assert before.read_text() == after.read_text()


def test_env_shows_the_configuration_or_what_is_wrong_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*arguments: str) -> list[str]:
        assert main(["env", "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)["configuration"]

    assert shown() == ["no configuration file"]
    main(["config", "default"])
    capsys.readouterr()
    assert shown()[1] == f"cpu=True ({tmp_path}/cache/trainwright/default_config.yaml)"
    (tmp_path / "a.yaml").write_text("services: 1")
    assert "has the unknown key 'services'" in shown("--config_file", str(tmp_path / "a.yaml"))[0]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--help"],
        ["config", "show"],
        ["launch", "--num_processes", "2", "--help"],
        ["to-fsdp2", "--help"],
        pytest.param(["env"], marks=pytest.mark.skipif(not has_no_devices(), reason="torch names the devices")),
    ],
)
def test_these_commands_import_no_torch(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom trainwright.cli.main import main\n"
        f"code = main({arguments!r})\nslow = {{'torch', 'numpy', 'questionary', 'prompt_toolkit'}} & set(sys.modules)\n"
        "sys.exit(f'imported: {slow}' if slow else code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "start", "pod", "commands"),
    [
        (["--tpu_name", "a", "--tpu_zone", "z", "--command", "echo 1", "--command", "echo 2"], ["gcloud"], "a",
         "echo 1; echo 2"),
        (["--config_file", "{file}", "--use_alpha"], ["gcloud", "alpha"], "pod", "ls; pwd"),
        (["--config_file", "{file}", "--command_file", "{commands}"], ["gcloud"], "pod", "make; make test"),
        (["--config_file", "{text}"], ["gcloud"], "pod", "echo hi"),
    ],
)  # fmt: skip
def test_tpu_config_prints_its_command(
    options: list[str], start: list[str], pod: str, commands: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("tpu_name: pod\ntpu_zone: z\ncommands: [ls, pwd]\ncommand_file: null\n")
    (tmp_path / "commands").write_text("make\n\nmake test\n")
    (tmp_path / "text.yaml").write_text("tpu_name: pod\ntpu_zone: z\ncommands: echo hi\n")
    names = {
        "{file}": str(tmp_path / "a.yaml"),
        "{commands}": str(tmp_path / "commands"),
        "{text}": str(tmp_path / "text.yaml"),
    }
    assert main(["tpu-config", "--debug", *(names.get(word, word) for word in options)]) == 0
    last = ["--zone", "z", "--command", f"cd /usr/share; {commands}", "--worker", "all"]
    assert shlex.split(capsys.readouterr().out) == [*start, "compute", "tpus", "tpu-vm", "ssh", pod, *last]


def test_gcloud_is_run_or_its_absence_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["tpu-config", "--tpu_name", "a", "--tpu_zone", "z", "--command", "ls"]
    assert main(command) == 2
    assert "gcloud is missing" in capfd.readouterr().err
    (tmp_path / "gcloud").write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    (tmp_path / "gcloud").chmod(0o755)
    assert main(command) == 3
    assert capfd.readouterr().out == "compute tpus tpu-vm ssh a --zone z --command cd /usr/share; ls --worker all\n"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--command", "ls"], "needs --tpu_name and --tpu_zone"),
        (["--tpu_name", "a", "--tpu_zone", "z"], "no command was given"),
        (["--tpu_name", "a", "--tpu_zone", "z", "--command_file", "/no/such"], "cannot be read"),
    ],
)
def test_tpu_config_names_what_is_missing(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tpu-config", *options]) == 2
    assert text in capsys.readouterr().err
