"""A run's folder: which checkpoint is the newest, which names are free, what is entered in the index."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.snapshots import write_small
from trainwright.checkpoint.format.manifests import FoundCheckpoint, open_checkpoint, open_or_error
from trainwright.checkpoint.run_folder import RunFolder
from trainwright.core.errors import CheckpointError, TrainwrightWarning


def _damage(path: Path) -> None:
    (path / "trainer.json").write_text("{}")


def test_a_candidate_that_is_not_accepted_is_not_read(tmp_path: Path) -> None:
    first = write_small(tmp_path, 1, "first")
    _damage(write_small(tmp_path, 2, "second"))  # no warning of it
    found = RunFolder(tmp_path).newest(accepts=lambda found: found.manifest.step < 2)
    assert found is not None
    assert found.path == first


def test_one_that_cannot_be_judged_is_damaged(tmp_path: Path) -> None:
    def refuse(found: FoundCheckpoint) -> bool:
        raise CheckpointError("its trainer part makes no sense")

    write_small(tmp_path, 1, "only")
    with pytest.warns(TrainwrightWarning, match="skipping the damaged checkpoint .*only: its trainer part"):
        assert RunFolder(tmp_path).newest(accepts=refuse) is None
    with pytest.raises(CheckpointError, match="on_damaged='fall_back'"):
        RunFolder(tmp_path).newest(accepts=refuse, on_damaged="error")


def test_candidates_may_be_elsewhere(tmp_path: Path) -> None:
    elsewhere = write_small(tmp_path / "elsewhere", 1, "a")
    folder = RunFolder(tmp_path / "run")
    found = folder.newest([open_or_error(elsewhere)])
    assert found is not None
    assert found.path == elsewhere
    assert folder.newest() is None


def test_only_what_the_run_has_written_is_listed(tmp_path: Path) -> None:
    mine, folder = write_small(tmp_path, 1, "mine"), RunFolder(tmp_path, run="me")
    write_small(tmp_path, 2, "other")
    assert folder.listed(lambda entry: True) == []
    for _ in range(2):  # the second finds it entered
        folder.enter(open_checkpoint(mine))
    assert [path for path, _ in folder.listed(lambda entry: entry.step == 1)] == [mine]
    assert (folder.find(1), folder.find(2)) == (mine, None)


def test_a_name_of_another_run_gets_a_version_and_a_reserved_one_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, run="me")
    folder.enter(open_checkpoint(write_small(tmp_path, 1, "mine")))
    write_small(tmp_path, 2, "other")
    assert folder.free_name("mine") == "mine"  # to be replaced
    assert folder.free_name("other") == "other-v1"
    placeholder = folder.reserve("next")
    assert placeholder is not None
    assert folder.free_name("next") == "next-v1"
    placeholder.rmdir()
    assert folder.free_name("next") == "next"


def test_a_link_moves_in_one_step_and_never_replaces_a_checkpoint(tmp_path: Path) -> None:
    first, second = write_small(tmp_path, 1, "first"), write_small(tmp_path, 2, "second")
    folder = RunFolder(tmp_path)
    for target in (first, second):
        folder.link("last", target.name)
        assert (tmp_path / "last").resolve() == target
    with pytest.raises(CheckpointError, match="is not replaced by a link"):
        folder.link("first", "second")
