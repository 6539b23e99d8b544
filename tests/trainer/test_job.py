"""What an earlier attempt at a job left, and whether it is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.snapshots import small_snapshot, write_small
from trainwright.checkpoint.run_folder import RunFolder
from trainwright.core.errors import TrainwrightWarning
from trainwright.trainer.checkpoints.auto_resume import Attempt
from trainwright.trainer.checkpoints.load_request import left_by_earlier


def _write(folder: Path, step: int, job: str) -> Path:
    return write_small(folder, step, trainer={**small_snapshot().trainer, "job": job})


def _left(attempt: Attempt, folder: Path) -> Path | None:
    found = left_by_earlier(attempt, RunFolder(folder))
    return None if found is None else found.path


def test_a_later_attempt_takes_the_newest_checkpoint_of_its_own_job(tmp_path: Path) -> None:
    mine = _write(tmp_path, 1, "mine")
    _write(tmp_path, 2, "another")
    assert _left(Attempt("mine", 1), tmp_path) == mine
    assert _left(Attempt("mine", 0), tmp_path) is None
    assert _left(Attempt("third", 1), tmp_path) is None


def test_a_damaged_one_is_passed_over_with_a_warning_that_names_it(tmp_path: Path) -> None:
    mine, damaged = _write(tmp_path, 1, "mine"), _write(tmp_path, 2, "mine")
    (damaged / "trainer.safetensors").write_bytes(b"")
    with pytest.warns(TrainwrightWarning, match=r"skipping the damaged .*step-00000002.*trainer\.safetensors"):
        assert _left(Attempt("mine", 1), tmp_path) == mine
