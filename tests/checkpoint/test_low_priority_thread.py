from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwright.checkpoint.disk import low_priority_file
from trainwright.checkpoint.disk.durable import CHUNK_BYTES, DISK_BLOCK_BYTES, FileEntry
from trainwright.checkpoint.disk.low_priority_file import LowPriorityFile
from trainwright.checkpoint.disk.low_priority_thread import LowPriorityThread
from trainwright.checkpoint.format.manifests import hash_file


@pytest.fixture
def quiet() -> Iterator[LowPriorityThread]:
    quiet = LowPriorityThread()
    quiet.start()
    yield quiet
    quiet.end()


HEAD, BODY, TAIL = 2 * DISK_BLOCK_BYTES, CHUNK_BYTES + 2**20, 100
SIZE = HEAD + BODY + TAIL


@pytest.fixture
def body() -> Iterator[memoryview]:
    """Bytes that begin a page."""
    memory = mmap.mmap(-1, BODY + TAIL)
    memory.write(os.urandom(BODY + TAIL))
    with memoryview(memory) as view:
        yield view


def is_direct(handle: int) -> bool:
    return bool(fcntl.fcntl(handle, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def write(path: Path, pieces: list[bytes | memoryview], quiet: LowPriorityThread) -> FileEntry:
    with LowPriorityFile(path, size=sum(len(piece) for piece in pieces), quiet=quiet) as file:
        for piece in pieces:
            file.write(piece)
    return file.entry


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, refused: bool) -> list[tuple[bool, int, str]]:
    """Record each write: past the page cache, how many bytes, in which thread."""
    found: list[tuple[bool, int, str]] = []
    pwrite = os.pwrite

    def record(handle: int, data: memoryview, position: int) -> int:
        if refused and is_direct(handle):
            raise OSError(errno.EINVAL, "some file systems open a file so, and refuse to write it")
        found.append((is_direct(handle), len(data), threading.current_thread().name))
        return pwrite(handle, data, position)

    monkeypatch.setattr(os, "pwrite", record)
    return found


@pytest.mark.parametrize("refused", [False, True])
def test_a_large_file_holds_its_bytes_and_the_disk_fetches_whole_blocks_itself(
    tmp_path: Path, quiet: LowPriorityThread, body: memoryview, written: list[tuple[bool, int, str]], refused: bool
) -> None:
    head = os.urandom(HEAD)
    entry = write(tmp_path / "a", [head, body], quiet)
    assert (tmp_path / "a").read_bytes() == head + bytes(body)
    assert entry == FileEntry(SIZE, hash_file(tmp_path / "a"))
    assert max(size for _, size, _ in written) <= CHUNK_BYTES
    if not refused and low_priority_file._open_direct(tmp_path / "a") is not None:  # this file system takes such writes
        assert sum(size for direct, size, _ in written if direct) >= BODY


def fail() -> None:
    raise OSError("broken")


def test_the_first_error_is_raised_once_and_what_came_after_it_is_dropped(quiet: LowPriorityThread) -> None:
    found: list[int] = []
    held = threading.Event()
    quiet.put(lambda: held.wait(30))
    quiet.put(fail)
    quiet.put(lambda: found.append(1))
    held.set()
    with pytest.raises(OSError, match="broken"):
        quiet.finish()
    quiet.finish()
    assert found == []
