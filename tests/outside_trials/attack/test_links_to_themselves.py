"""A file or folder of a checkpoint that is a link to itself is damage like any other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.snapshots import write_small
from trainwright.checkpoint import check_checkpoint, newest_valid, read_checkpoint, verify, whole_checkpoint
from trainwright.cli.main import main
from trainwright.core.errors import CheckpointError, TrainwrightWarning


def loop(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    "name", ["manifest.json", "trainer.json", "trainer.safetensors", "model", "rng/rank-00000.json"]
)
def test_a_link_to_itself_is_damage_and_gives_way(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier, damaged = write_small(tmp_path, 1), write_small(tmp_path, 2)
    loop(damaged / name)
    for read in (read_checkpoint, check_checkpoint):
        with pytest.raises(CheckpointError):
            read(damaged)
    assert verify(damaged)
    assert main(["checkpoint", "verify", str(damaged)]) == 1
    assert "damaged" in capsys.readouterr().out
    with pytest.warns(TrainwrightWarning, match=damaged.name):
        assert newest_valid(tmp_path) == earlier
    with pytest.warns(TrainwrightWarning, match="Falling back"):
        assert whole_checkpoint(damaged, on_damaged="fall_back") == earlier


def test_a_link_last_that_leads_to_itself_is_passed_over(tmp_path: Path) -> None:
    earlier = write_small(tmp_path, 1)
    (tmp_path / "last").symlink_to("last")
    assert newest_valid(tmp_path) == earlier
    with pytest.raises((CheckpointError, FileNotFoundError), match="last"):
        read_checkpoint(tmp_path / "last")
