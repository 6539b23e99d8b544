from __future__ import annotations

import math
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.snapshots import write_small
from trainwright.checkpoint import IndexEntry, RunIndex
from trainwright.checkpoint.format.layout import RUN_INDEX
from trainwright.checkpoint.format.staging import clean_stale
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.host.folders import lock_folder


def index_with(folder: Path, metrics: list[float], **options: Any) -> RunIndex:
    index = RunIndex(folder, **options)
    for step, value in enumerate(metrics, start=1):
        index.add(write_small(folder, step, f"s{step}", metrics={"loss": value}))
    return index


def test_added_checkpoints_are_listed_by_step_also_by_a_new_process(tmp_path: Path) -> None:
    index = RunIndex(tmp_path)
    for step in (3, 1, 2):
        index.add(write_small(tmp_path, step, kind="weights" if step == 2 else "full"))
    entries = RunIndex(tmp_path).entries()
    assert [entry.name for entry in entries] == ["step-00000001", "step-00000002", "step-00000003"]
    assert [(entry.step, entry.kind) for entry in entries] == [(1, "full"), (2, "weights"), (3, "full")]
    assert entries[0].metrics == {"loss": 1.0}
    assert index.last() == entries[-1]


@pytest.mark.parametrize(
    ("values", "mode", "order"),
    [
        ([math.nan, 8, 7, 5], "min", ["s4", "s3", "s2", "s1"]),
        ([math.nan, 5, 7, 8], "max", ["s4", "s3", "s2", "s1"]),
        ([1, 1, math.inf, -math.inf], "min", ["s4", "s1", "s2", "s3"]),
        ([1, 1], "max", ["s1", "s2"]),
    ],
)
def test_checkpoints_rank_by_a_metric_with_nan_last_and_the_earlier_of_equals_first(
    tmp_path: Path, values: list[float], mode: Any, order: list[str]
) -> None:
    index = index_with(tmp_path, values)
    assert [entry.name for entry in index.ranked("loss", mode)] == order
    best = index.best("loss", mode)
    assert best is not None
    assert best.name == order[0]


def test_the_newest_run_is_the_one_that_wrote_last(tmp_path: Path) -> None:
    assert RunIndex.of_newest_run(tmp_path) is None
    older, newer = RunIndex(tmp_path, run="older"), RunIndex(tmp_path, run="newer")
    older.add(write_small(tmp_path, 9))
    newer.add(write_small(tmp_path, 2))
    newest = RunIndex.of_newest_run(tmp_path)
    assert newest is not None
    assert [(newest.run, entry.step) for entry in newest.entries()] == [("newer", 2)]
    shutil.rmtree(tmp_path / newer.entries()[0].name)
    left = RunIndex.of_newest_run(tmp_path)
    assert left is not None
    assert left.run == "older"
    with pytest.raises(CheckpointError, match="the folder of this index"):
        older.add(write_small(tmp_path / "elsewhere", 1))


def make_index(folder: Path) -> list[IndexEntry]:
    index = RunIndex(folder, run="0123456789abcdef")
    for step, loss in enumerate([0.5, 0.25, 0.75], 1):
        kind = "weights" if step == 3 else "full"
        trainer = {} if step == 3 else {"run_id": "0123456789abcdef"}
        index.add(write_small(folder, step, metrics={"loss": loss}, kind=kind, trainer=trainer))
    return index.entries()


def test_an_index_of_an_earlier_version_is_read_and_renamed(tmp_path: Path) -> None:
    index = index_with(tmp_path, [1.0, 2.0])
    entries = index.entries()
    index.path.rename(tmp_path / "index.json")
    assert index.entries() == entries
    assert not index.path.exists()
    index.delete(entries[0].name)
    assert index.entries() == entries[1:]
    assert {path.name for path in tmp_path.iterdir()} == {".index.json", entries[1].name}


@pytest.mark.slow
def test_every_flipped_bit_of_an_index_is_detected_and_repaired(tmp_path: Path) -> None:
    entries = make_index(tmp_path)
    file = tmp_path / ".index.json"
    whole = file.read_bytes()
    numbers = random.Random(1)
    for place in numbers.sample(range(len(whole)), 50):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << numbers.randrange(8)
        file.write_bytes(damaged)
        with pytest.warns(TrainwrightWarning, match="rebuilt from the manifests"):
            found = RunIndex(tmp_path, run="0123456789abcdef").entries()
        # The weights say nothing of their run: they are kept if the index still names them rightly, and else left.
        assert found in (entries, entries[:2])
        assert RunIndex(tmp_path, run="0123456789abcdef").best("loss") == entries[1]


def test_cleaning_waits_for_an_index_that_another_process_is_writing(tmp_path: Path) -> None:
    new_index = tmp_path / f".{RUN_INDEX}.tmp-{'0' * 16}"
    with lock_folder(tmp_path):  # as `RunIndex.add`
        new_index.write_text("{}")
        cleaner = threading.Thread(target=clean_stale, args=(tmp_path,))
        cleaner.start()
        cleaner.join(0.3)
        assert new_index.exists()
        new_index.rename(tmp_path / RUN_INDEX)
    cleaner.join()
    assert (tmp_path / RUN_INDEX).exists()
