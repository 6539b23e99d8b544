"""Error messages for wrong configurations and command lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwright.cli.main import main

PROJECT = """
import torch
from trainwright import DataModule, TaskModule


class Encoder(torch.nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()


class Task(TaskModule):
    def __init__(self, lr: float = 0.1, width: int | None = None, encoder: torch.nn.Module | None = None) -> None:
        super().__init__()


class Data(DataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        try:
            {}[batch_size]
        except KeyError as error:
            raise TypeError(f"no batches of {batch_size}") from error
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mistaken.py").write_text(PROJECT)
    (tmp_path / "config.yaml").write_text(
        "task: {class_path: mistaken.Task}\ndata: {class_path: mistaken.Data}\ntrainer: {logger: false}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("mistaken", None)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("task.lrr=3", "task.lrr: mistaken.Task has no argument 'lrr'. Did you mean 'lr'?"),
        ("task.lr=fast", "task.lr=fast: expected float."),
        ("data.batch_sze=3", "data.batch_sze: mistaken.Data has no argument 'batch_sze'. Did you mean 'batch_size'?"),
        ("task=mistaken.Taks", "task=mistaken.Taks: the module 'mistaken' has no 'Taks'. Did you mean 'Task'?"),
        ("task=mistaken.Data", "task=mistaken.Data is not a TaskModule. Name a sub-class of TaskModule."),
        ("task=misteken.Task", "task=misteken.Task cannot be imported: No module named 'misteken'."),
        (
            "task.encoder=mistaken.Encoder task.encoder.widht=3",
            "task.encoder.widht: mistaken.Encoder has no argument 'widht'. Did you mean 'width'?",
        ),
        ("trainer.max_epochs=many", "trainer.max_epochs=many: expected int or null."),
        (
            "trainer.callbacks+=EarlyStoping",
            "trainer.callbacks=EarlyStoping: write the path of a class, such as module.Class. Did you mean "
            "'EarlyStopping'?",
        ),
        ("tsk.lr=3", "unrecognized arguments: --tsk.lr=3. Did you mean 'task.lr'?"),
    ],
)
def test_a_mistake_is_an_error_with_the_key_and_the_expected_type(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--config", "config.yaml", *words.split()]) == 2
    assert capsys.readouterr().err == f"trainwright: error: {says}\n"


@pytest.mark.usefixtures("project")
def test_an_error_in_a_constructor_is_raised_unchanged() -> None:
    with pytest.raises(TypeError, match=r"^no batches of 8$") as caught:
        main(["fit", "--config", "config.yaml"])
    assert isinstance(caught.value.__cause__, KeyError)
    frames = [Path(str(entry.path)).name for entry in caught.traceback]
    assert frames[-1] == "mistaken.py"
    assert "_typehints.py" not in frames


def one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_a_new_project_in_an_impossible_folder_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("x")
    for name in ("loop/project", "loop", "file/project", "x" * 300):
        one_line(["new", str(tmp_path / name)], capsys)
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a: " + b"{b: " * 20_000 + b"1" + b"}" * 20_000, "nested too deeply"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"a: 2026-13-45\n", "cannot be read"),
    ],
    ids=["mappings", "not UTF-8", "no date"],
)
def test_an_unreadable_configuration_is_an_error_of_one_line(
    text: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_bytes(text)
    assert message in one_line(["fit", "--config", str(tmp_path / "c.yaml")], capsys)
