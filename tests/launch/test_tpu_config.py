"""`trainwright tpu-config`: the command of gcloud that it builds."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from trainwright.cli.main import main

_START = ["compute", "tpus", "tpu-vm", "ssh"]


@pytest.mark.parametrize(
    ("options", "start", "pod", "commands"),
    [
        (["--tpu_name", "a", "--tpu_zone", "z", "--command", "echo 1", "--command", "echo 2"], ["gcloud"], "a",
         "echo 1; echo 2"),
        (["--config_file", "{file}", "--use_alpha"], ["gcloud", "alpha"], "pod", "ls; pwd"),
        (["--config_file", "{file}", "--command_file", "{commands}", "--install_accelerate"], ["gcloud"], "pod",
         "pip install -U accelerate; make; make test"),
        (["--config_file", "{file}", "--install_accelerate", "--accelerate_version", "1.2"], ["gcloud"], "pod",
         "pip install accelerate==1.2; ls; pwd"),
        (["--config_file", "{file}", "--install_accelerate", "--accelerate_version", "dev", "--command", "a"],
         ["gcloud"], "pod", "pip install git+https://github.com/huggingface/accelerate.git; a"),
    ],
)  # fmt: skip
def test_debug_prints_the_command(
    options: list[str], start: list[str], pod: str, commands: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("tpu_name: pod\ntpu_zone: z\ncommands: [ls, pwd]\ncommand_file: null\n")
    (tmp_path / "commands").write_text("make\nmake test\n")
    names = {"{file}": str(tmp_path / "a.yaml"), "{commands}": str(tmp_path / "commands")}
    assert main(["tpu-config", "--debug", *(names.get(word, word) for word in options)]) == 0
    last = ["--zone", "z", "--command", f"cd /usr/share; {commands}", "--worker", "all"]
    assert shlex.split(capsys.readouterr().out) == [*start, *_START, pod, *last]


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
def test_what_is_missing_is_said(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tpu-config", *options]) == 2
    assert text in capsys.readouterr().err
