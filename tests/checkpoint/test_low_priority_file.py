"""Files that are written beside the training, past the page cache where the system takes that."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainwright.checkpoint import set_fault_hook
from trainwright.checkpoint.disk import low_priority_file
from trainwright.checkpoint.disk.durable import CHUNK_BYTES, DISK_BLOCK_BYTES, FileEntry
from trainwright.checkpoint.disk.low_priority_file import LowPriorityFile
from trainwright.checkpoint.disk.low_priority_thread import LowPriorityThread
from trainwright.checkpoint.format.manifests import hash_file

HEAD, BODY, TAIL = 2 * DISK_BLOCK_BYTES, CHUNK_BYTES + 2**20, 100
SIZE = HEAD + BODY + TAIL


@pytest.fixture
def quiet() -> Iterator[LowPriorityThread]:
    quiet = LowPriorityThread()
    quiet.start()
    yield quiet
    quiet.end()


@pytest.fixture(autouse=True)
def _no_hook_left() -> Iterator[None]:
    yield
    set_fault_hook(None)


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
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int, str]]:
    """Record each write: past the page cache, how many bytes, in which thread."""
    found: list[tuple[bool, int, str]] = []
    pwrite = os.pwrite

    def record(handle: int, data: memoryview, position: int) -> int:
        found.append((is_direct(handle), len(data), threading.current_thread().name))
        return pwrite(handle, data, position)

    monkeypatch.setattr(os, "pwrite", record)
    return found


def test_a_large_file_holds_its_bytes_and_the_disk_fetches_whole_blocks_itself(
    tmp_path: Path, quiet: LowPriorityThread, body: memoryview, written: list[tuple[bool, int, str]]
) -> None:
    head = os.urandom(HEAD)
    entry = write(tmp_path / "a", [head, body], quiet)
    assert (tmp_path / "a").read_bytes() == head + bytes(body)
    assert entry == FileEntry(SIZE, hash_file(tmp_path / "a"))
    assert max(size for _, size, _ in written) <= CHUNK_BYTES
    if low_priority_file._open_direct(tmp_path / "a") is not None:  # this file system takes such writes
        assert sum(size for direct, size, _ in written if direct) >= BODY


@pytest.mark.parametrize("head", [b"", b"x" * 100], ids=["place", "head"])
def test_bytes_at_any_place_and_address_are_written(
    tmp_path: Path, quiet: LowPriorityThread, body: memoryview, head: bytes
) -> None:
    pieces = [head, body[1 : 2**20 + 1], body[: 5 * 2**20], body[7:]]
    entry = write(tmp_path / "a", list(pieces), quiet)
    assert (tmp_path / "a").read_bytes() == b"".join(pieces)
    assert entry.xxh3_128 == hash_file(tmp_path / "a")


@pytest.mark.parametrize("where", ["open", "write"])
def test_a_system_that_refuses_has_the_quiet_thread_write_through_the_page_cache(
    tmp_path: Path,
    quiet: LowPriorityThread,
    body: memoryview,
    written: list[tuple[bool, int, str]],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    record, system_open = os.pwrite, os.open

    def refuse_write(handle: int, data: memoryview, position: int) -> int:
        if is_direct(handle):
            raise OSError(errno.EINVAL, "Invalid argument")
        return record(handle, data, position)

    def refuse_open(path: Path, flags: int, *rest: int) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return system_open(path, flags, *rest)

    monkeypatch.setattr(os, "pwrite", refuse_write) if where == "write" else monkeypatch.setattr(
        os, "open", refuse_open
    )
    entry = write(tmp_path / "a", [body], quiet)
    assert (tmp_path / "a").read_bytes() == bytes(body)
    assert entry.xxh3_128 == hash_file(tmp_path / "a")
    assert {(direct, thread) for direct, _, thread in written} == {(False, "trainwright-quiet")}


@pytest.mark.parametrize("in_quiet", [False, True])
def test_an_error_while_writing_is_raised_and_nothing_is_written_afterwards(
    tmp_path: Path, quiet: LowPriorityThread, body: memoryview, monkeypatch: pytest.MonkeyPatch, in_quiet: bool
) -> None:
    def fail(event: str, path: Path) -> None:
        if event == "write":
            raise OSError(errno.ENOSPC, "No space left on device")

    if in_quiet:
        monkeypatch.setattr(low_priority_file, "_open_direct", lambda path: None)
    set_fault_hook(fail)
    handles = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a", [body], quiet)
    assert not handles or len(os.listdir("/proc/self/fd")) == handles
    set_fault_hook(None)
    assert write(tmp_path / "b", [body], quiet).size == len(body)
