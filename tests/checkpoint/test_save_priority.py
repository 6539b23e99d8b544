"""Asynchronous saves run at low priority beside training."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from tests.checkpoint.test_overlapped_copy import Wide
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import regression_loader
from trainwright import ModelCheckpoint
from trainwright.checkpoint import AsyncWriter, Snapshot, read_checkpoint, verify
from trainwright.checkpoint.disk import durable, host_buffers, low_priority_file, low_priority_thread
from trainwright.checkpoint.disk.durable import CHUNK_BYTES, DISK_BLOCK_BYTES
from trainwright.checkpoint.disk.host_copies import LaterCopy

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="priorities of single threads, as Linux has them")


class Watched:
    """An XXH3 that notes how much each call takes, and in what kind of thread.

    Attributes:
        seen: bytes, the thread's name and its scheduling policy.
    """

    seen: list[tuple[int, str, int]]

    def __init__(self) -> None:
        self._real = xxhash.xxh3_128()

    def update(self, piece: memoryview) -> None:
        policy = os.sched_getscheduler(0) if sys.platform == "linux" else 0
        self.seen.append((len(piece), threading.current_thread().name, policy))
        self._real.update(piece)

    def hexdigest(self) -> str:
        return self._real.hexdigest()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, int]]:
    Watched.seen = []
    monkeypatch.setattr(durable, "xxhash", SimpleNamespace(xxh3_128=Watched))
    return Watched.seen


def large(step: int = 1) -> Snapshot:
    """Return 24 MB of weights in several blocks of memory's worth of pieces."""
    generator = torch.Generator().manual_seed(step)
    return Snapshot(
        state={"step": step, "epoch": 0},
        model={str(i): torch.randn(1_000_001, generator=generator) for i in range(6)},
        kind="weights",
    )


@linux_only
def test_a_save_runs_in_two_threads_at_the_lowest_priority_in_bounded_chunks(
    tmp_path: Path, writer: AsyncWriter, hashed: list[tuple[int, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_xxh3, threads = Watched.update, set[str]()

    def update(self: Watched, piece: memoryview) -> None:
        threads.update(thread.name for thread in threading.enumerate() if thread.name.startswith("trainwright"))
        real_xxh3(self, piece)

    monkeypatch.setattr(Watched, "update", update)
    writer.submit(tmp_path / "a", large())
    while writer.is_writing:  # waiting in it would have the work done at once
        time.sleep(0.01)
    heavy = [(size, thread, policy) for size, thread, policy in hashed if size >= 2**20]
    assert sum(size for size, _, _ in heavy) >= 20_000_000
    assert {(thread, policy) for _, thread, policy in heavy} == {("trainwright-quiet", os.SCHED_IDLE)}
    assert max(size for size, _, _ in heavy) <= CHUNK_BYTES
    working = {"trainwright-checkpoint", "trainwright-quiet"}
    assert threads <= {*working, "trainwright-checkpoint-exit"}  # the last one waits for the interpreter to exit
    assert verify(tmp_path / "a") == []


def test_a_large_save_is_written_with_direct_io(
    tmp_path: Path, writer: AsyncWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct: list[int] = []
    pieces = low_priority_file.LowPriorityFile._write_direct

    def count(file: low_priority_file.LowPriorityFile, piece: memoryview, position: int) -> int:
        if low_priority_file._address(piece) % DISK_BLOCK_BYTES == 0 and position % DISK_BLOCK_BYTES == 0:
            direct.append(len(piece) - len(piece) % DISK_BLOCK_BYTES)
        return pieces(file, piece, position)

    monkeypatch.setattr(low_priority_file.LowPriorityFile, "_write_direct", count)
    monkeypatch.setattr(host_buffers, "BLOCK_BYTES", 4 * 2**20)  # a file lies in several
    snapshot = large()
    writer.submit(tmp_path / "a", snapshot)
    writer.wait()
    total = sum(tensor.nbytes for tensor in (snapshot.model or {}).values())
    assert sum(direct) >= total - DISK_BLOCK_BYTES
    assert verify(tmp_path / "a") == []
    found = dict(read_checkpoint(tmp_path / "a").model or {})
    assert all(torch.equal(found[name], tensor) for name, tensor in (snapshot.model or {}).items())


@pytest.mark.slow
def test_waiting_for_a_save_finishes_it_without_the_low_priority_thread(
    tmp_path: Path, writer: AsyncWriter, hashed: list[tuple[int, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = threading.Event()
    monkeypatch.setattr(low_priority_thread, "run_at_lowest_priority", lambda: fed.wait(60))
    writer.submit(tmp_path / "a", large())
    timer = threading.Timer(1.0, fed.set)  # the thread itself has to end too
    timer.start()
    writer.wait()
    timer.join()
    assert {thread for _, thread, _ in hashed} == {"trainwright-checkpoint"}
    assert verify(tmp_path / "a") == []


@pytest.mark.parametrize("cores", [1, 2])
def test_copies_are_delayed_only_if_a_core_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    later: list[LaterCopy] = []

    class Counted(LaterCopy):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            later.append(self)

    monkeypatch.setattr(host_buffers, "LaterCopy", Counted)
    monkeypatch.setattr(low_priority_thread, "usable_cores", lambda: cores)
    checkpoint = ModelCheckpoint(every_n_train_steps=2)
    quiet_trainer(max_epochs=1, default_root_dir=tmp_path, callbacks=[checkpoint]).fit(Wide(), regression_loader(16, 4))
    assert bool(later) is (cores > torch.get_num_threads())
    assert verify(Path(checkpoint.last_model_path or checkpoint.best_model_path)) == []
