"""A9: what a killed parent of several processes has left in the temporary folder is removed at the next start."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from trainwright.core.host.folders import held
from trainwright.processes import launcher
from trainwright.processes.worker import end_with


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def _left_over(folder: Path, name: str, *, age_s: float) -> Path:
    work = folder / name
    work.mkdir()
    (work / "work.pkl").write_bytes(b"the task and its data")
    os.utime(work, (time.time() - age_s,) * 2)
    return work


def test_the_next_start_removes_what_nobody_holds(tmp_path: Path) -> None:
    left = _left_over(tmp_path, "trainwright-work-abc", age_s=3600)
    used = _left_over(tmp_path, "trainwright-work-def", age_s=3600)
    young = _left_over(tmp_path, "trainwright-work-ghi", age_s=0)
    others = _left_over(tmp_path, "trainwright-abc", age_s=3600)
    (tmp_path / "trainwright-work-link").symlink_to(others)
    with held(used):
        launcher._remove_left_over()
    assert not left.exists()
    assert used.exists()
    assert young.exists()
    assert list(others.iterdir())


def test_a_start_begins_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = _left_over(tmp_path, "trainwright-work-abc", age_s=3600)

    def start(self: object, *_: object) -> None:
        raise OSError("no process can be started")

    monkeypatch.setattr(launcher._Children, "start", start)
    with pytest.raises(OSError, match="no process"):
        launcher.run_in_processes(lambda: None, 2)
    assert not left.exists()
    assert not list(tmp_path.iterdir())


def test_a_process_whose_parent_was_killed_removes_it_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = _left_over(tmp_path, "trainwright-work-abc", age_s=0)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit):
        end_with(ended.pid, work)
    assert not work.exists()
