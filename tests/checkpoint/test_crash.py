"""Processes that are killed, and machines that lose power, in the middle of a write or a deletion."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.snapshots import same, small_snapshot, write_small
from trainwright.checkpoint import (
    RunIndex,
    Snapshot,
    clean_stale,
    find_checkpoints,
    newest_valid,
    read_checkpoint,
    set_fault_hook,
    write_checkpoint,
)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SNAPSHOTS = {step: small_snapshot(step) for step in (1, 2)}


class Crash:
    """A fault hook that ends the process at the n-th event, as on a machine that loses power.

    Files that are not synced lose their second half, names that are not synced into their folder disappear.
    """

    def __init__(self, at: int) -> None:
        self.left = at
        self.unsynced_files: set[Path] = set()
        self.unsynced_names: set[Path] = set()

    def __call__(self, event: str, path: Path) -> None:
        if event in ("open", "mkdir"):
            self.unsynced_names.add(path)
        if event == "open":
            self.unsynced_files.add(path)
        elif event == "fsync":
            self.unsynced_files.discard(path)
        elif event == "rename":
            self.unsynced_files = {self.renamed(file, path) for file in self.unsynced_files}
            # The name itself is not among them: without it the rename has not happened, and that is the point before.
            self.unsynced_names = {self.renamed(name, path) for name in self.unsynced_names} - {path}
        elif event == "fsync_folder":
            self.unsynced_names = {name for name in self.unsynced_names if name.parent != path}
        if self.left == 0:
            self.lose_power()
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    @staticmethod
    def renamed(path: Path, target: Path) -> Path:
        if path.exists() or not path.is_relative_to(target.parent):
            return path
        _, *below = path.relative_to(target.parent).parts
        return target.joinpath(*below)

    def lose_power(self) -> None:
        for file in self.unsynced_files:
            if file.exists():
                os.truncate(file, file.stat().st_size // 2)
        for name in self.unsynced_names:
            if name.is_dir():
                shutil.rmtree(name)
            else:
                name.unlink(missing_ok=True)


def is_killed(work: Callable[[], object], crash: Crash) -> bool:
    """Run `work` in a forked process with `crash` as its fault hook; return False if it came to its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: fork in a process with threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            set_fault_hook(crash)
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def check_loads(folder: Path, steps: set[int]) -> int:
    """Check that the newest checkpoint is one of `steps`, whole and exact; warnings are errors here."""
    newest = newest_valid(folder)
    assert newest is not None
    back = read_checkpoint(newest)
    step: int = back.state["step"]
    assert step in steps
    expected: Snapshot = SNAPSHOTS[step]
    assert same(vars(back), {**vars(expected), "model": dict(expected.model or {})})
    return step


def hidden_entries(folder: Path) -> list[str]:
    return [entry for entry in os.listdir(folder) if entry.startswith(".") and entry != ".index.json"]


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_after_a_power_loss_at_points_of_a_write_the_newest_checkpoint_loads(every: int, tmp_path: Path) -> None:
    seen: list[int] = []
    for at in range(0, 1000, every):
        folder = tmp_path / str(at)
        write_checkpoint(folder / "last", SNAPSHOTS[1])
        killed = is_killed(lambda folder=folder: write_checkpoint(folder / "last", SNAPSHOTS[2]), Crash(at))  # type: ignore[misc]
        seen.append(check_loads(folder, {1, 2}))
        clean_stale(folder)
        assert hidden_entries(folder) == []
        assert check_loads(folder, {1, 2}) == seen[-1]
        if not killed:
            break
    assert at > 40
    # Once the new one has been seen it never goes away again, and in the end it is there.
    assert seen == sorted(seen)
    assert seen[-1] == 2


def test_after_a_power_loss_at_every_point_of_a_deletion_the_rest_loads(tmp_path: Path) -> None:
    for at in range(100):
        folder = tmp_path / str(at)
        index = RunIndex(folder)
        for step in (1, 2):
            index.add(write_small(folder, step))
        write_checkpoint(folder / "step-00000002", SNAPSHOTS[2])
        index.add(folder / "step-00000002")
        killed = is_killed(lambda index=index: index.delete("step-00000001"), Crash(at))  # type: ignore[misc]
        assert check_loads(folder, {2}) == 2
        clean_stale(folder)
        assert hidden_entries(folder) == []
        listed = [entry.name for entry in RunIndex(folder).entries()]
        assert listed == [found.path.name for found in find_checkpoints(folder)]
        if not killed:
            break
    assert at > 5
    assert listed == ["step-00000002"]
