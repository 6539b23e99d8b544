"""A file that is written beside the training: past the page cache where that is possible, and hashed quietly."""

from __future__ import annotations

import contextlib
import errno
import os
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np
import xxhash

from trainwright.checkpoint.disk.durable import (
    CHUNK_BYTES,
    DIRECT_FROM_BYTES,
    DISK_BLOCK_BYTES,
    FileEntry,
    fault_point,
    naming,
)
from trainwright.checkpoint.disk.quiet_thread import QuietThread


class QuietFile:
    """A new file whose bytes stay in memory until it is closed; otherwise as `HashingFile`.

    Writing through the page cache copies every byte in the processor that the training needs. Large files whose
    memory and place are multiples of a disk block are therefore written by the disk itself (`O_DIRECT`), which takes
    about a tenth of the time in the processor; the system's refusal costs nothing but that. What remains for the
    processor is left to the quiet thread.

    Args:
        path: must not exist.
        size: how many bytes are going to be written.
        quiet: hashes, and writes what goes through the page cache.

    Attributes:
        entry: size and hash of the bytes written, once the `with` block has ended without an error.
    """

    def __init__(self, path: Path, *, size: int, quiet: QuietThread) -> None:
        self.path = path
        self.entry = FileEntry(0, "")
        self._quiet = quiet
        self._planned = size
        self._digest = xxhash.xxh3_128()
        self._size = 0
        self._synced = False
        self._direct: int | None = None

    def __enter__(self) -> QuietFile:
        self._file = open(self.path, "xb", buffering=0)
        try:
            fault_point("open", self.path)
        except BaseException:
            self._file.close()  # __exit__ is not called for what __enter__ raises
            raise
        if self._planned >= DIRECT_FROM_BYTES:
            self._direct = _open_direct(self.path)
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`, which must not change before the file is closed."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            piece = view[start : start + CHUNK_BYTES]
            self._quiet.put(partial(self._digest.update, piece))
            position, self._size = self._size, self._size + len(piece)
            done = self._write_direct(piece, position)
            if done == len(piece):
                continue
            rest = partial(self._write_cached, piece[done:], position + done)
            if self._direct is None:
                self._quiet.put(rest)
            else:
                rest()  # the header, and what is left of a block at the end

    def _write_direct(self, piece: memoryview, position: int) -> int:
        """Write whole disk blocks; returns how many bytes that were, none if the system refuses."""
        count = len(piece) - len(piece) % DISK_BLOCK_BYTES
        aligned = position % DISK_BLOCK_BYTES == 0 and _address(piece) % DISK_BLOCK_BYTES == 0
        if self._direct is None or not count or not aligned:
            return 0
        written = 0
        try:
            with naming(self.path):
                while written < count:
                    more = os.pwrite(self._direct, piece[written:count], position + written)
                    written += more
                    if more % DISK_BLOCK_BYTES:  # the disk's end, perhaps: the rest tells, through the page cache
                        break
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._close_direct()
        if written:
            fault_point("write", self.path)
        return written

    def _write_cached(self, piece: memoryview, position: int) -> None:
        written = 0
        with naming(self.path):
            while written < len(piece):  # a raw file may take less than it is given
                if hasattr(os, "pwrite"):
                    written += os.pwrite(self._file.fileno(), piece[written:], position + written)
                else:  # nothing is written directly there, and so everything in order
                    written += self._file.write(piece[written:])
        # On Linux this starts the writing to the disk, see `HashingFile`.
        if self._direct is None and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._file.fileno(), position, len(piece), os.POSIX_FADV_DONTNEED)
        fault_point("write", self.path)

    def sync(self) -> None:
        """Wait until the file's bytes are on the disk; its name is when its folder has been synced."""
        if self._direct is None:
            self._quiet.finish()
        with naming(self.path):
            os.fsync(self._file.fileno())
        self._synced = True
        fault_point("fsync", self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            try:
                if kind is None:
                    if not self._synced:
                        self.sync()
                    self._quiet.finish()
                    self.entry = FileEntry(self._size, self._digest.hexdigest())
            finally:
                self._quiet.drop()  # after an error: nothing may be written any more
                self._close_direct()

    def _close_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


def _open_direct(path: Path) -> int | None:
    """Open a file for writing past the page cache; None where that is not possible."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "pwrite"):
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return None


def _address(piece: memoryview) -> int:
    return int(np.frombuffer(piece, dtype=np.uint8).ctypes.data)
