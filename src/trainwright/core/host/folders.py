"""Folders: checks for write access, URLs, and locks that end with the process that holds them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeGuard

from trainwright.core.errors import ConfigurationError


def check_writable(folder: Path) -> None:
    """Check that a folder is writable or can be created. Leaves no files.

    An existing folder with write access is not changed, not even its modification time.

    Raises:
        ConfigurationError: the folder is not writable and cannot be created.
    """
    folder = folder.absolute()
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):  # also false on a read-only disk
        return
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    # Create a folder, for the system's own reason of a failure. This also fails if `nearest` is a file.
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".trainwright-", dir=nearest))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigurationError(
            f"cannot write into {folder}: {nearest}: {reason}. Pass another dirpath or Trainer(default_root_dir=…)."
        ) from error


# `s3://bucket`, or a chain of fsspec such as `simplecache::s3://bucket`. At least two letters, unlike `C:` of Windows.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")


def is_url(path: object) -> TypeGuard[str]:
    """Return whether `path` is a URL such as `s3://bucket/run` rather than a local path."""
    return isinstance(path, str) and _URL.match(path) is not None


def last_part(url: str) -> str:
    """Return the part of a checkpoint's URL after the last slash, which is the checkpoint's name."""
    return url.rstrip("/").rpartition("/")[2]


def parent_url(url: str) -> str:
    """Return the part of a checkpoint's URL before the last slash, which is the checkpoint's parent folder."""
    return url.rstrip("/").rpartition("/")[0]


def local_folder(root: Path, url: str) -> Path:
    """Return the path below `root` for local copies of `url`. Its name is readable, unique, and without passwords."""
    url = url.rstrip("/")
    without_password = url.rpartition("@")[2]
    words = re.sub(r"[^A-Za-z0-9_.]+", "-", without_password).strip("-.")[-60:]
    digest = hashlib.sha256(url.encode()).hexdigest()[:8]
    return root / f"{words}-{digest}"


@contextlib.contextmanager
def mark_in_use(folder: Path) -> Iterator[None]:
    """Mark `folder` as in use by this process until the context or the process ends; see `is_in_use`.

    On a file system without locks, and on Windows, the folder is not marked: a cleaner may delete it at any time.
    """
    with _lockable(folder) as lock:
        # `is_in_use` of another process locks the folder for a moment.
        _lock_within(lock, "LOCK_SH", patience_s=1.0)
        yield


@contextlib.contextmanager
def lock_folder(folder: Path, *, patience_s: float = 10.0) -> Iterator[None]:
    """Return a context that locks `folder` against other processes that call this function.

    Blocks until no other process is in the context. After `patience_s` seconds, the context is entered without the
    lock, because a stopped process never leaves the context. On a file system without locks, and on Windows, the
    context is entered without the lock immediately.
    """
    with _lockable(folder) as lock:
        _lock_within(lock, "LOCK_EX", patience_s)
        yield


def is_in_use(folder: Path) -> bool:
    """Return whether a running process has marked `folder` by `mark_in_use`. False without locks, as on Windows."""
    with _lockable(folder) as lock:
        try:
            lock("LOCK_EX")
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
        return False


def _lock_within(lock: Callable[[str], None], kind: str, patience_s: float) -> None:
    """Call `lock(kind)` until it succeeds, for at most `patience_s` seconds. Return also without the lock."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            lock(kind)
            return
        except BlockingIOError:  # another process has the lock
            time.sleep(0.002)
        except OSError:  # a file system without locks
            return


@contextlib.contextmanager
def _lockable(folder: Path) -> Iterator[Callable[[str], None]]:
    """Yield a function that locks a folder without waiting, and unlock the folder at the end. No effect on Windows.

    The function receives `"LOCK_SH"` (shared) or `"LOCK_EX"` (exclusive). It raises a BlockingIOError if another
    process has the lock, and another OSError on a file system without locks.
    """
    if os.name == "nt":
        yield lambda kind: None
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        yield lambda kind: fcntl.flock(handle, getattr(fcntl, kind) | fcntl.LOCK_NB)
    finally:
        # Closing alone does not unlock the folder while processes exist that were forked in the context.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
