"""A mapped file is read into memory when it is asked for, and not asked for again while it is there."""

from __future__ import annotations

import copy
import mmap
import os
from pathlib import Path

import pytest
import torch

from trainwright.bigmodels.weights import mapped_file
from trainwright.bigmodels.weights.mapped_file import MappedFile
from trainwright.strategies.offload.advice import changed_pages


def test_what_is_in_memory_is_asked_for_once_and_what_was_dropped_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(4 * 2**20))
    calls: list[int] = []
    populate = mapped_file.populate
    monkeypatch.setattr(mapped_file, "populate", lambda *args: calls.append(args[1]) or populate(*args))
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


def _map_pages(path: Path, count: int) -> MappedFile:
    path.write_bytes(os.urandom(count * mmap.PAGESIZE - 7))
    file = MappedFile(path)
    file.load(0, file.num_bytes)
    return file


@pytest.mark.skipif(not os.access("/proc/self/pagemap", os.R_OK), reason="asks which pages are no longer the file's")
def test_only_pages_that_were_written_to_count_as_changed(tmp_path: Path) -> None:
    file = _map_pages(tmp_path / "weights", 9)
    whole = file.tensor(0, torch.uint8, (file.num_bytes,))
    assert changed_pages(whole.data_ptr(), file.num_bytes) == []
    for position in (3 * mmap.PAGESIZE + 5, file.num_bytes - 1):
        whole[position] += 1
    assert changed_pages(whole.data_ptr(), file.num_bytes) == [3 * mmap.PAGESIZE, 8 * mmap.PAGESIZE]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_copy_of_a_mapped_file_has_what_was_written_and_shares_nothing(
    is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _map_pages(tmp_path / "weights", 5)
    if not is_told:  # as on systems that do not say which pages have changed
        monkeypatch.setattr(mapped_file, "changed_pages", lambda _, size: list(range(0, size, mmap.PAGESIZE)))
    whole = file.tensor(0, torch.uint8, (file.num_bytes,))
    whole[mmap.PAGESIZE] += 1
    whole[-1] += 1
    expected = whole.clone()
    (tmp_path / "weights").unlink()
    twin = copy.deepcopy(file)
    found = twin.tensor(0, torch.uint8, (file.num_bytes,))
    assert torch.equal(found, expected)
    found.zero_()
    assert torch.equal(whole, expected)
    del file, whole
    found[:].fill_(1)
    twin.load(0, twin.num_bytes)
    assert bool((found == 1).all())
