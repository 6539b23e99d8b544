from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.snapshots import write_small
from trainwright.checkpoint import find_checkpoints, newest_valid, read_checkpoint, verify
from trainwright.core.errors import CheckpointError, TrainwrightWarning

_FILES = [
    "manifest.json", "model/model-00001-of-00001.safetensors", "model/model.safetensors.index.json",
    "optimizer/optimizer-00000.json", "optimizer/optimizer-00000.safetensors", "rng/rank-00000.json",
    "rng/rank-00000.safetensors", "trainer.json", "trainer.safetensors",
]  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_small(tmp_path / "run", 5)


def is_refused(path: Path, file: str) -> None:
    """Check that damage to `file` is reported by its name, and that the checkpoint neither loads nor counts."""
    problems = verify(path)
    assert problems
    assert file in " ".join(problems)
    with pytest.raises(CheckpointError, match=os.path.basename(file)):
        read_checkpoint(path)
    with pytest.warns(TrainwrightWarning, match=os.path.basename(file)):
        assert newest_valid(path.parent) is None


def _flip(file: Path, where: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(where * (len(data) - 1))] ^= 0x10
    file.write_bytes(data)


def _replace(file: Path, make: Callable[[Path], Any]) -> None:
    file.unlink()
    make(file)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a flipped bit at the end": lambda file: _flip(file, 1.0),
    "a byte less": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "deleted": Path.unlink,
    "a folder": lambda file: _replace(file, Path.mkdir),
    "a pipe, which does not block": lambda file: _replace(file, os.mkfifo),
}


@pytest.mark.parametrize("file", _FILES)
def test_a_changed_byte_of_any_file_is_found(checkpoint: Path, file: str) -> None:
    _flip(checkpoint / file, 0.5)
    is_refused(checkpoint, file)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_any_kind_is_found(checkpoint: Path, damage: str) -> None:
    DAMAGES[damage](checkpoint / "trainer.json")
    is_refused(checkpoint, "trainer.json")


@pytest.mark.parametrize("file", ["manifest.json", "trainer.json"])
def test_a_file_that_is_a_link_out_of_the_checkpoint_is_refused(checkpoint: Path, tmp_path: Path, file: str) -> None:
    shutil.move(checkpoint / file, tmp_path / "elsewhere")
    (checkpoint / file).symlink_to(tmp_path / "elsewhere")
    problems = verify(checkpoint)
    assert len(problems) == 1
    assert "outside" in problems[0]
    with pytest.raises(CheckpointError, match="outside"):
        read_checkpoint(checkpoint)


def test_an_unknown_part_is_an_error_that_lists_the_parts(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'optimiser', expected some of trainer, model, optimizer, rng"):
        read_checkpoint(checkpoint, parts=["optimiser"])


def test_a_folder_that_cannot_be_read_is_not_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small(tmp_path, 10, "a")
    (tmp_path / "lost+found").mkdir()
    real_stat = os.stat

    def stat(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if "lost+found/" in str(path):  # chmod has no effect for root
            raise PermissionError(13, "Permission denied", str(path))
        return real_stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert [found.path.name for found in find_checkpoints(tmp_path)] == ["a"]


def test_checkpoints_are_found_in_order_of_their_steps_and_not_of_their_names(tmp_path: Path) -> None:
    for step, name in [(10, "a"), (9, "z"), (100, "m")]:
        write_small(tmp_path, step, name)
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("x")
    assert [(found.path.name, found.manifest.step) for found in find_checkpoints(tmp_path)] == [
        ("z", 9),
        ("a", 10),
        ("m", 100),
    ]
