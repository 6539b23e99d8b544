"""Configurations, folders and names that cannot be are one line, before anything is run or written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trainwright.callbacks import ModelCheckpoint
from trainwright.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from trainwright.cli.main import main
from trainwright.core.errors import ConfigurationError
from trainwright.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger

_BILLION = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


def one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(b"a: " + b"[" * 20_000 + b"]" * 20_000, "nested too deeply", marks=pytest.mark.exhaustive),
        (b"a: " + b"{b: " * 20_000 + b"1" + b"}" * 20_000, "nested too deeply"),
        (b"trainer: &a\n  x: *a\n", "is used inside the value that it refers to"),
        (b"task: &a [1, *a]\n", "is used inside the value that it refers to"),
        (_BILLION.encode(), "more than 100000 values"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"a: 2026-13-45\n", "cannot be read"),
        (b"a: " + b"9" * 5000, "cannot be read"),
        (b"x" * 2**23, "has more than"),
    ],
    ids=["lists", "mappings", "loop", "loop of a list", "shared", "not UTF-8", "no date", "digits", "long"],
)
def test_a_configuration_that_cannot_be_read_is_one_line(
    text: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_bytes(text)
    assert message in one_line(["fit", "--config", str(tmp_path / "c.yaml")], capsys)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="there is no /dev/zero")
def test_a_device_is_not_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("/dev/zero", str(tmp_path)):
        assert "is not a file" in one_line(["fit", "--config", path], capsys)


def test_a_new_project_in_a_loop_of_links_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("x")
    for path in (
        tmp_path / "loop" / "project",
        tmp_path / "loop",
        tmp_path / "file" / "project",
        tmp_path / ("x" * 300),
    ):
        one_line(["new", str(path)], capsys)
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]


@pytest.mark.parametrize(
    "filename",
    ["", ".", "..", ".hidden", "a/b", "../a", "a\\b", "a\0b", "a:b", "a\nb", "\ud800", "x" * 300, "index.json",
     "{epoch:zzz}", "{epoch:>99999999999}", "{epoch:>300}", "{a\\b}", "{", "{epoch"],
)  # fmt: skip
@pytest.mark.parametrize("make", [ModelCheckpoint, OnExceptionCheckpoint])
def test_a_checkpoints_name_that_cannot_be_is_found_at_construction(make: Any, filename: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="filename="):
        make(tmp_path, filename=filename)


@pytest.mark.parametrize(
    "filename", ["{epoch}", "{epoch:02d}-{val/loss:.2f}", "best model {step:>4}", "é-{loss:.3e}", "{x:b}", "{x:,.1f}"]
)
def test_a_checkpoints_name_that_can_be_is_taken(filename: str, tmp_path: Path) -> None:
    ModelCheckpoint(tmp_path, filename=filename)


@pytest.mark.parametrize("make", [CSVLogger, JSONLinesLogger, TensorBoardLogger])
@pytest.mark.parametrize("value", ["../../up", "..", "a/../../b", "/etc/x", "a\0b", "..\\up"])
@pytest.mark.parametrize("argument", ["name", "version"])
def test_a_logger_does_not_write_outside_of_its_folder(make: Any, argument: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{argument}=.* points outside of the logger's folder"):
        make(tmp_path / "logs", **{argument: value})
    assert not os.listdir(tmp_path)


def test_a_loggers_event_folder_stays_below_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="sub_dir"):
        TensorBoardLogger(tmp_path, sub_dir="../../up")


def test_a_logger_may_have_folders_of_several_steps(tmp_path: Path) -> None:
    assert CSVLogger(tmp_path, name="group/experiment", version="seed/1").log_dir == str(
        tmp_path / "group/experiment/seed/1"
    )
