"""Several ranks that write one checkpoint: what rank 0 waits for, and what it says when it waits in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.checkpoint.cutting import cut_snapshot
from tests.checkpoint.snapshots import same, small_snapshot
from trainwright.checkpoint import Contents, Crew, Draft, plan_share, read_checkpoint, set_fault_hook, verify
from trainwright.core.errors import CheckpointError

WORLD = 3


class Ranks:
    """Three ranks of one process over a store in memory, and a draft that they write."""

    def __init__(self, folder: Path, timeout_s: float = 60.0) -> None:
        self.store = dist.HashStore()  # type: ignore[attr-defined]  # public, not re-exported
        self.crews = [Crew(self.store, rank=r, world_size=WORLD, timeout_s=timeout_s) for r in range(WORLD)]
        parts = cut_snapshot(small_snapshot(1), WORLD)
        self.shares: list[Contents] = [plan_share(part, rank) for rank, part in enumerate(parts)]
        self.draft = Draft(folder / "a")
        self.draft.make_folders(self.shares[0])

    def write(self, rank: int) -> None:
        if rank == 0:
            self.crews[0].write_and_publish(self.draft, self.shares[0])
        else:
            self.crews[rank].write_share(self.draft.folder, self.shares[rank])


def _after(seconds: float, work: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        time.sleep(seconds)
        work()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_rank_zero_publishes_once_the_last_rank_has_reported(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.write(2)
    thread = _after(0.2, lambda: ranks.write(1))
    ranks.write(0)
    thread.join()
    assert verify(tmp_path / "a") == []
    assert same(read_checkpoint(tmp_path / "a").optimizers, small_snapshot(1).optimizers)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert ranks.store.num_keys() == 0


def test_a_rank_that_reports_nothing_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, timeout_s=0.3)
    ranks.write(2)
    with pytest.raises(CheckpointError, match=r"rank 1 of 3 did not report its files within 0.3 s"):
        ranks.write(0)
    assert not list(tmp_path.iterdir())


def test_a_rank_that_cannot_write_is_named_with_its_reason(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)

    def full(event: str, path: Path) -> None:
        if event == "write":
            raise OSError(28, "No space left on device", str(path))

    set_fault_hook(full)
    ranks.write(1)  # it tells rank 0 and goes on
    set_fault_hook(None)
    with pytest.raises(CheckpointError, match=r"rank 1 could not write its files: OSError: .*No space left"):
        ranks.write(0)  # without waiting for rank 2
    assert not list(tmp_path.iterdir())


def test_after_a_failure_rank_zero_does_not_wait_for_long(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    thread = _after(0.1, lambda: ranks.crews[0].hurry(0.1))
    with pytest.raises(CheckpointError, match=r"rank 1, 2 of 3 did not report its files before the run failed"):
        ranks.write(0)
    thread.join()


def test_a_file_that_rank_zero_does_not_see_is_named(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for rank in (1, 2):
        ranks.write(rank)
    (ranks.draft.folder / "model" / "rank-00002.json").unlink()
    with pytest.raises(CheckpointError, match=r"rank 2 wrote model/rank-00002.json .* file system that all"):
        ranks.write(0)


def test_a_report_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.store.set(f"{ranks.draft.folder.name.rpartition('-')[2]}/1", '{"files": {"../x": [1, "0"]}}')
    with pytest.raises(CheckpointError, match="outside its folder"):
        ranks.write(0)


def test_a_store_that_is_gone_is_an_error_of_the_rank(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.crews[1]._store = None  # type: ignore[assignment]  # any error
    with pytest.raises(CheckpointError, match="rank 1 cannot report its files to rank 0"):
        ranks.write(1)
    ranks.draft.close()
