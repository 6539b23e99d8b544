"""A mapped file is read into memory when it is asked for, and not asked for again while it is there."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch

from trainwright.bigmodels.weights import stored_weights
from trainwright.bigmodels.weights.stored_weights import MappedFile


def test_what_is_in_memory_is_asked_for_once_and_what_was_dropped_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(4 * 2**20))
    calls: list[int] = []
    populate = stored_weights.populate
    monkeypatch.setattr(stored_weights, "populate", lambda *args: calls.append(args[1]) or populate(*args))
    file = MappedFile(path)
    for _ in range(3):
        file.load(100, 3 * 2**20)
    assert len(calls) == 1
    file.load(0, 2**20)  # another part
    assert len(calls) == 2
    monkeypatch.setattr(MappedFile, "_is_in_memory", lambda *_: False)  # as when the system has needed the memory
    file.load(100, 3 * 2**20)
    assert len(calls) == 3


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="asks the page cache")
def test_a_part_is_in_memory_once_it_was_read(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(4 * 2**20))
    with path.open("rb") as other:
        os.fsync(other.fileno())
        os.posix_fadvise(other.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file = MappedFile(path)
        if file._is_in_memory(0, 4 * 2**20):
            pytest.skip("the file system keeps it in memory whatever it is told")
        file.load(0, 4 * 2**20)
        assert file._is_in_memory(0, 4 * 2**20)


def test_a_copy_of_a_mapped_file_has_the_file_s_values_and_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(2**16))
    file = MappedFile(path)
    whole = file.tensor(0, torch.uint8, (file.num_bytes,))
    expected = whole.clone()
    whole[0] += 1
    path.unlink()
    twin = copy.deepcopy(file)
    found = twin.tensor(0, torch.uint8, (file.num_bytes,))
    assert torch.equal(found, expected)
    found.zero_()
    assert torch.equal(whole[1:], expected[1:])
