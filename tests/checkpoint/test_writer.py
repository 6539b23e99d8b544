from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.checkpoint.snapshots import same, small_snapshot, write_small
from trainwright.checkpoint import clean_stale, newest_valid, read_checkpoint, set_fault_hook, verify, write_checkpoint
from trainwright.checkpoint.disk.durable import hidden, make_folder, replace_file
from trainwright.core.errors import CheckpointError


def test_a_snapshot_comes_back_as_it_was_written(tmp_path: Path) -> None:
    snapshot = small_snapshot(12, rng=[{"python": (1, (2, 3), None)}, {"torch": torch.get_rng_state()}], world_size=2)
    path = write_checkpoint(tmp_path / "new" / "folder" / "step", snapshot)
    assert same(vars(read_checkpoint(path)), {**vars(snapshot), "model": dict(snapshot.model or {})})


def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("x")
    (tmp_path / "link").symlink_to(write_small(tmp_path, 1, "other"))
    for name in ("folder", "link"):
        with pytest.raises(CheckpointError, match="not replaced"):
            write_small(tmp_path, 2, name)
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "other"]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"trainer": {"callbacks": {"EarlyStopping": {"best": object()}}}}, r"callbacks\.EarlyStopping\.best is a"),
        ({"optimizers": [{"a": object()}]}, r"optimizer\[0\]\.a is a"),
        ({"model": {"w": torch.zeros(1, device="meta")}}, r"model\.w: a meta"),
        ({"trainer": {"progress": 1}}, "this name is reserved"),
        ({"kind": "partial"}, "expected one of full, weights"),
        ({"world_size": 2}, "world_size=2 got 1 RNG states"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_left_behind(tmp_path: Path, changes: dict, place: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(CheckpointError, match=place):
        write_small(tmp_path, **changes)
    assert os.listdir(tmp_path) == []


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, which pytest would take for its own."""


@pytest.mark.slow
def test_an_error_at_any_point_leaves_the_old_checkpoint_or_the_new_one_and_nothing_hidden(tmp_path: Path) -> None:
    for count in range(1000):
        folder = tmp_path / str(count)
        write_small(folder, 1, "last")
        seen = 0

        def fail(event: str, path: Path, count: int = count) -> None:
            nonlocal seen
            seen += 1
            if seen == count + 1:
                raise Interrupted(f"at {event} {path}")

        set_fault_hook(fail)
        try:
            write_small(folder, 2, "last")
            finished = True
        except Interrupted:
            finished = False
        set_fault_hook(None)
        assert newest_valid(folder) == folder / "last"
        assert os.listdir(folder) == ["last"]
        if finished:
            break
    assert count > 40  # mkdir, open, write, fsync, ... of nine files in four folders


def test_clean_stale_deletes_only_what_is_ours(tmp_path: Path) -> None:
    whole = write_small(tmp_path, 1)
    ours = [hidden(tmp_path / "step-00000002", role) for role in ("tmp", "del")] + [hidden(whole, "old")]
    for folder in ours:
        folder.mkdir()
        (folder / "trainer.json").write_text("{")
    temporary = hidden(tmp_path / "index.json", "tmp")
    temporary.write_text("{")
    foreign = [tmp_path / ".git", tmp_path / ".step.tmp-xyz", hidden(tmp_path / "thesis", "tmp")]
    for folder in foreign:
        folder.mkdir()
        (folder / "thesis.txt").write_text("x")
    plain = hidden(tmp_path / "notes.txt", "tmp")
    plain.write_text("x")
    link = hidden(tmp_path / "link", "tmp")
    link.symlink_to(whole)
    gone = clean_stale(tmp_path)
    assert sorted(gone) == sorted([*ours, temporary])
    assert sorted(tmp_path.iterdir()) == sorted([whole, *foreign, plain, link])
    assert verify(whole) == []


def test_replacing_a_small_file_keeps_the_old_bytes_on_an_error(tmp_path: Path) -> None:
    file = tmp_path / "index.json"
    replace_file(file, b"old")

    def fail(event: str, path: Path) -> None:
        if event == "fsync":
            raise OSError("disk full")

    set_fault_hook(fail)
    with pytest.raises(OSError, match="disk full"):
        replace_file(file, b"new")
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["index.json"]


def test_a_checkpoint_that_stepped_aside_is_read_and_then_put_back(tmp_path: Path) -> None:
    path = write_small(tmp_path, 7, "last")
    aside = hidden(path, "old")
    path.rename(aside)
    assert newest_valid(tmp_path) == aside
    assert read_checkpoint(path).state["step"] == 7
    clean_stale(tmp_path)
    assert os.listdir(tmp_path) == ["last"]
    assert verify(path) == []
    with pytest.raises(FileNotFoundError, match=r"Checkpoints in .*: last\."):
        read_checkpoint(tmp_path / "first")


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")
    make_folder(tmp_path / "new" / "folder")
    make_folder(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()
