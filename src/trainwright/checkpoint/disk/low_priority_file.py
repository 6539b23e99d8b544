"""Files that are written during training: with O_DIRECT if possible, and hashed by a low-priority thread."""

from __future__ import annotations

import contextlib
import errno
import os
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np

from trainwright.checkpoint.disk.durable import (
    CHUNK_BYTES,
    DIRECT_FROM_BYTES,
    DISK_BLOCK_BYTES,
    HashingFile,
    fault_point,
    naming,
)
from trainwright.checkpoint.disk.low_priority_thread import LowPriorityThread


class LowPriorityFile(HashingFile):
    """A `HashingFile` that uses little processor time. Written data must stay in memory until the file is closed.

    The thread `quiet` hashes the data. Files of at least `DIRECT_FROM_BYTES` are written with `O_DIRECT` if the system
    supports it, which takes about a tenth of the processor time of the page cache. `O_DIRECT` needs addresses, offsets
    and lengths that are multiples of a disk block. All other data is written through the page cache.

    Args:
        path: the file to create.
        size: the number of bytes that will be written, by which `O_DIRECT` is chosen.
        quiet: the thread that hashes the data.
    """

    def __init__(self, path: Path, *, size: int, quiet: LowPriorityThread) -> None:
        super().__init__(path)
        self._quiet = quiet
        self._planned_size = size
        # Second file descriptor of the file, with O_DIRECT. None if the system does not support it or the file is
        # small. All data is then written through the page cache by `_quiet`.
        self._direct: int | None = None

    def __enter__(self) -> LowPriorityFile:
        super().__enter__()
        if self._planned_size >= DIRECT_FROM_BYTES:
            self._direct = _open_direct(self.path)
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`, which must not change before the file is closed."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            self._quiet.put(partial(self._hash.update, chunk))
            position = self._size  # of the chunk in the file
            self._size += len(chunk)
            num_written = self._write_direct(chunk, position)
            if num_written == len(chunk):
                continue
            write_rest = partial(self._write_cached, chunk[num_written:], position + num_written)
            if self._direct is None:
                self._quiet.put(write_rest)
            else:
                # The header, a chunk that is not aligned, the incomplete block at the end, or the rest on a full disk.
                write_rest()

    def _write_direct(self, chunk: memoryview, position: int) -> int:
        """Write a chunk's complete disk blocks with O_DIRECT. Return the number of these bytes, or 0.

        It is 0 without O_DIRECT, and for chunks whose position or address is not a multiple of a block, such as the
        header. It is lower if the disk is full or the file system rejects O_DIRECT.
        """
        count = len(chunk) - len(chunk) % DISK_BLOCK_BYTES  # 8292 bytes have 2 complete blocks: 8192 bytes
        is_aligned = position % DISK_BLOCK_BYTES == 0 and _address(chunk) % DISK_BLOCK_BYTES == 0
        if self._direct is None or not count or not is_aligned:
            return 0
        written = 0
        try:
            with naming(self.path):
                while written < count:
                    more = os.pwrite(self._direct, chunk[written:count], position + written)
                    written += more
                    if more % DISK_BLOCK_BYTES:  # the disk may be full: the page cache reports it
                        break
        except OSError as error:
            # The file system rejects O_DIRECT.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._close_direct()
        if written:
            fault_point("write", self.path)
        return written

    def _write_cached(self, chunk: memoryview, position: int) -> None:
        """Write a chunk at a position through the page cache."""
        written = 0
        with naming(self.path):
            while written < len(chunk):  # an unbuffered write may be partial
                if hasattr(os, "pwrite"):
                    written += os.pwrite(self._file.fileno(), chunk[written:], position + written)
                else:  # Windows has no O_DIRECT either, so that all writes are in order
                    written += self._file.write(chunk[written:])
        # Start writing to the disk, see `HashingFile._start_writeback`. With O_DIRECT, these are few bytes.
        if self._direct is None and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._file.fileno(), position, len(chunk), os.POSIX_FADV_DONTNEED)
        fault_point("write", self.path)

    def sync(self) -> None:
        """Wait until the file's bytes are on the disk. Its name is on the disk once its folder has been synced."""
        if self._direct is None:
            self._quiet.finish()  # it may still have data to write
        super().sync()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            try:
                if kind is None:
                    if not self._synced:
                        self.sync()
                    self._quiet.finish()  # before `finish`, since it may still have chunks to hash
                    self.finish()
            finally:
                self._quiet.drop()  # after an error, write nothing more
                self._close_direct()

    def _close_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


def _open_direct(path: Path) -> int | None:
    """Open a file for writing with O_DIRECT. Return None if the system does not support that."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "pwrite"):
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return None


def _address(chunk: memoryview) -> int:
    """Return the memory address of a chunk's first byte."""
    return int(np.frombuffer(chunk, dtype=np.uint8).ctypes.data)
