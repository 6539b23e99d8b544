"""The index of a run: any change of its bytes is noticed, and it is rebuilt from the manifests."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

import pytest

from tests.checkpoint.snapshots import write_small
from trainwright.checkpoint import IndexEntry, RunIndex
from trainwright.core.errors import TrainwrightWarning


def make_index(folder: Path) -> list[IndexEntry]:
    index = RunIndex(folder, run="0123456789abcdef")
    for step, loss in enumerate([0.5, 0.25, 0.75], 1):
        kind = "weights" if step == 3 else "full"
        trainer = {} if step == 3 else {"run_id": "0123456789abcdef"}
        index.add(write_small(folder, step, metrics={"loss": loss}, kind=kind, trainer=trainer))
    return index.entries()


def test_every_flipped_bit_of_an_index_is_noticed_and_mended(tmp_path: Path) -> None:
    entries = make_index(tmp_path)
    file = tmp_path / "index.json"
    whole = file.read_bytes()
    numbers = random.Random(1)
    for place in numbers.sample(range(len(whole)), 150):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << numbers.randrange(8)
        file.write_bytes(damaged)
        with pytest.warns(TrainwrightWarning, match="rebuilt from the manifests"):
            found = RunIndex(tmp_path, run="0123456789abcdef").entries()
        # The weights say nothing of their run: they are kept if the index still names them rightly, and else left.
        assert found in (entries, entries[:2])
        assert RunIndex(tmp_path, run="0123456789abcdef").best("loss") == entries[1]


def test_an_index_without_a_seal_is_read_in_silence_and_sealed_by_the_next_save(tmp_path: Path) -> None:
    entries = make_index(tmp_path)
    values = json.loads((tmp_path / "index.json").read_text())
    assert len(values.pop("seal")) == 32
    (tmp_path / "index.json").write_text(json.dumps(values, indent=2) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index = RunIndex(tmp_path, run="0123456789abcdef")
        assert index.entries() == entries
        index.add(write_small(tmp_path, 4))
    assert "seal" in json.loads((tmp_path / "index.json").read_text())


def test_a_damaged_index_that_may_not_be_written_is_used_as_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = make_index(tmp_path)
    (tmp_path / "index.json").write_text("{")

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("trainwright.checkpoint.retention.replace_file", refuse)
    with pytest.warns(TrainwrightWarning, match="rebuilt"):
        assert RunIndex(tmp_path, run="0123456789abcdef").entries() == entries[:2]
