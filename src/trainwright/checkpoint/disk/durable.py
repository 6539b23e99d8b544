"""Durable writes: a file or folder is on the disk before another file, such as a manifest, refers to it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import xxhash

CHUNK_BYTES = 8 * 2**20  # read, hashed or written in one call
_WRITEBACK_BYTES = 32 * 2**20  # written between two requests to write them to the disk
_THREAD_FROM_BYTES = 16 * 2**20  # a thread slows smaller files down
DIRECT_FROM_BYTES = 4 * 2**20  # files of at least this size are aligned for writing with O_DIRECT
DISK_BLOCK_BYTES = 4096  # O_DIRECT needs addresses, offsets and lengths that are multiples of it

FaultHook = Callable[[str, Path], None]
_fault_hook: FaultHook | None = None
# Folders with new names that may not be on the disk. `make_folder(sync=False)` adds them, and `sync_new_folders` syncs
# them.
_unsynced: list[Path] = []


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        size: length of the file in bytes.
        xxh3_128: XXH3 128-bit hash of the file, as 32 hexadecimal digits. The hash detects damage, not forgery.
    """

    size: int
    xxh3_128: str


def set_fault_hook(hook: FaultHook | None) -> None:
    """Call `hook(event, path)` after every disk operation, to simulate crashes in tests. None removes the hook.

    The hook may raise or kill the process. Events: `"mkdir"`, `"open"`, `"write"`, `"fsync"`,
    `"fsync_folder"`, `"rename"`, `"link"`, `"delete"`.
    """
    global _fault_hook
    _fault_hook = hook


def fault_point(event: str, path: Path) -> None:
    """Call the hook of `set_fault_hook`, if there is one, after the operation `event` on `path`."""
    if _fault_hook is not None:
        _fault_hook(event, path)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Return a context that adds `path` to system errors without a file name, such as errors of an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class HashingFile:
    """A new file that is hashed while it is written, and synced to the disk when it is closed.

    Args:
        path: path of the file, which must not exist.
        size: number of bytes that will be written, if known. Large files are hashed in a second thread. Default: 0,
            which hashes in the calling thread.

    Attributes:
        entry: size and hash of the written bytes. Set by `finish` or at the end of the `with` block. Until then, the
            size is 0 and the hash is empty.
    """

    def __init__(self, path: Path, *, size: int = 0) -> None:
        self.path = path
        self.entry = FileEntry(0, "")
        self._hash = _Hash(in_thread=size >= _THREAD_FROM_BYTES)
        self._size = 0  # bytes that `write` has received
        self._synced = False  # set by `sync`, so that the end of the `with` block does not sync again
        self._written_back = 0  # bytes that the system has begun to write to the disk

    def __enter__(self) -> HashingFile:
        self._file = open(self.path, "xb", buffering=0)
        try:
            fault_point("open", self.path)
        except BaseException:
            self._file.close()  # __exit__ is not called for what __enter__ raises
            raise
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`, which must not change before the file is closed if a second thread hashes it."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            self._hash.update(chunk)
            written = 0
            with naming(self.path):
                while written < len(chunk):  # an unbuffered write may be partial
                    written += self._file.write(chunk[written:])
            self._size += len(chunk)
            self._start_writeback()
            fault_point("write", self.path)

    def _start_writeback(self) -> None:
        """Let the system write the bytes added since the last call to the disk. Does not wait for the disk."""
        start = self._written_back
        count = self._size - start
        if count < _WRITEBACK_BYTES or not hasattr(os, "posix_fadvise"):
            return
        # On Linux this starts to write pages that are not on the disk yet; these pages stay cached. It is a hint, which
        # a file system may reject.
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._file.fileno(), start, count, os.POSIX_FADV_DONTNEED)
        self._written_back = self._size

    def finish(self) -> None:
        """Set `entry` to the size and hash of the written bytes. Nothing may be written afterwards."""
        self.entry = FileEntry(self._size, self._hash.finish())

    def sync(self) -> None:
        """Wait until the file's bytes are on the disk. Its name is on the disk once its folder has been synced."""
        with naming(self.path):
            os.fsync(self._file.fileno())
        self._synced = True
        fault_point("fsync", self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            self.finish()  # after an error too, to end the hashing thread
            if kind is None and not self._synced:
                self.sync()


class _Hash:
    """The XXH3 hash of consecutive chunks. With `in_thread`, a second thread computes it, at most one chunk later.

    xxhash releases the GIL, so that a chunk is hashed while it is written.
    """

    def __init__(self, *, in_thread: bool) -> None:
        self._digest = xxhash.xxh3_128()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainwright-hash") if in_thread else None
        self._last: Future[None] | None = None  # the chunk that the thread hashes, or has hashed last

    def update(self, chunk: memoryview) -> None:
        """Add a chunk, which must not change before `finish`."""
        if self._pool is None:
            self._digest.update(chunk)
            return
        if self._last is not None:
            self._last.result()
        self._last = self._pool.submit(self._digest.update, chunk)

    def finish(self) -> str:
        """End the thread and return the hash in hexadecimal. May be called twice."""
        if self._pool is not None:
            self._pool.shutdown()
        return self._digest.hexdigest()


def write_file(path: Path, data: bytes) -> FileEntry:
    """Write `data` to the new file `path`, wait until it is on the disk, and return its size and hash.

    Raises FileExistsError if the file exists.
    """
    with HashingFile(path) as file:
        file.write(data)
    return file.entry


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in `folder` are on the disk, if the file system supports that."""
    if os.name == "nt":
        return  # Windows cannot sync a folder; its journal preserves the order of renames
    handle = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(handle)
    except OSError as error:
        # Network file systems that cannot sync folders raise these.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)
    fault_point("fsync_folder", folder)


def make_folder(folder: Path, *, sync: bool = True) -> None:
    """Create `folder` and missing parents, and sync their names. With `sync=False`, call `sync_new_folders` later.

    Raises:
        FileExistsError: the name is that of a file.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent, sync=sync)
    try:
        folder.mkdir()
    except FileExistsError:
        # Another process may create the same folder at the same time. A file with this name is an error.
        if not folder.is_dir():
            raise
    fault_point("mkdir", folder)
    if sync:
        sync_folder(folder.parent)
    else:
        _unsynced.append(folder.parent)


def sync_new_folders() -> None:
    """Sync the names of the folders that `make_folder(sync=False)` has created."""
    while _unsynced:
        with contextlib.suppress(FileNotFoundError, IndexError):  # deleted, or synced by another thread
            sync_folder(_unsynced.pop())


def rename(source: Path, target: Path) -> None:
    """Rename `source` to `target` in the same folder and wait until the new name is on the disk.

    A file or an empty folder at `target` is replaced.

    Raises:
        OSError: `target` is a folder that is not empty.
    """
    os.replace(source, target)
    fault_point("rename", target)
    sync_folder(target.parent)


def hidden(path: Path, role: str) -> Path:
    """Return an unused hidden path beside `path`. See `staging` for the roles `"tmp"`, `"old"` and `"del"`."""
    return path.with_name(f".{path.name}.{role}-{os.urandom(8).hex()}")


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file's content atomically. After a crash, the file has either the old or the new content."""
    temporary = hidden(path, "tmp")
    try:
        write_file(temporary, data)
        rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
