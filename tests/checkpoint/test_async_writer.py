from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.snapshots import same, small_snapshot
from trainwright.checkpoint import (
    AsyncWriter,
    Snapshot,
    newest_valid,
    read_checkpoint,
    set_fault_hook,
    write_checkpoint,
)
from trainwright.core.errors import CheckpointError


class Gate:
    """A fault hook that holds the writing thread at its first write until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, event: str, path: Path) -> None:
        if event == "write":
            self.reached.set()
            assert self.opened.wait(30)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    set_fault_hook(gate)
    yield gate
    gate.opened.set()


def as_read(snapshot: Snapshot) -> dict[str, object]:
    return {**vars(snapshot), "model": dict(snapshot.model or {})}


def test_the_write_is_not_part_of_the_submit_and_later_changes_do_not_reach_the_file(
    tmp_path: Path, writer: AsyncWriter, gate: Gate
) -> None:
    snapshot = small_snapshot(3)
    expected = copy.deepcopy(snapshot)
    path = writer.submit(tmp_path / "a", snapshot)  # returns although no byte can be written
    assert gate.reached.wait(30)
    assert writer.is_writing
    assert not path.exists()
    for value in snapshot.model.values():  # type: ignore[union-attr]
        value.fill_(-1.0)
    for state in snapshot.optimizers[0]["state"].values():
        for value in state.values():
            value.fill_(-1.0)
    snapshot.optimizers[0]["groups"][0]["lr"] = 99.0
    snapshot.trainer["callbacks"]["best"] = -1.0
    snapshot.trainer["mean"].fill_(-1.0)
    snapshot.state["step"] = 99
    snapshot.rng[0]["torch"].zero_()
    snapshot.metrics["loss"] = -1.0
    gate.opened.set()
    writer.wait()
    assert same(vars(read_checkpoint(path)), as_read(expected))


def test_an_error_of_the_write_is_raised_once_by_the_next_save_and_names_the_path(
    tmp_path: Path, writer: AsyncWriter
) -> None:
    def fail(event: str, path: Path) -> None:
        if event == "write" and any(step.startswith(".failing.") for step in path.parts):
            raise OSError(28, "No space left on device")

    write_checkpoint(tmp_path / "earlier", small_snapshot(1))
    set_fault_hook(fail)
    writer.submit(tmp_path / "failing", small_snapshot(2))
    with pytest.raises(CheckpointError, match=r"failing could not be written .*OSError: .*No space left") as caught:
        writer.submit(tmp_path / "next", small_snapshot(3))
    assert isinstance(caught.value.__cause__, OSError)
    assert os.listdir(tmp_path) == ["earlier"]
    assert newest_valid(tmp_path) == tmp_path / "earlier"
    writer.wait()
    writer.submit(tmp_path / "next", small_snapshot(3))
    writer.wait()
    assert newest_valid(tmp_path) == tmp_path / "next"
