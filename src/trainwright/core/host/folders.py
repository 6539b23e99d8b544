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
    """Check that a folder is writable or can be created. Leaves no files. Raises a ConfigurationError if the check
    fails. An existing folder with write access is not changed, not even its modification time.
    """
    folder = folder.absolute()
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):  # also false on a read-only disk
        return
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".trainwright-", dir=nearest))
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigurationError(
            f"cannot write into {folder}: {nearest}: {why}. Pass another dirpath or Trainer(default_root_dir=…)."
        ) from error


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
    words = re.sub(r"[^A-Za-z0-9_.]+", "-", url.rpartition("@")[2]).strip("-.")[-60:]  # no password in a path
    return root / f"{words}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


@contextlib.contextmanager
def mark_in_use(folder: Path) -> Iterator[None]:
    """Mark `folder` as in use by this process until the context or the process ends; see `is_in_use`."""
    with _lockable(folder) as lock:
        # A file system without locks only loses the protection against a cleaner that runs at the same moment.
        with contextlib.suppress(OSError):
            lock("LOCK_SH")
        yield


@contextlib.contextmanager
def lock_folder(folder: Path, *, patience_s: float = 10.0) -> Iterator[None]:
    """Return a context that locks `folder` against other processes that call this function.

    Blocks until no other process is in the context. After `patience_s` seconds, the context is entered without the
    lock, because a stopped process never leaves the context. The same holds at once on a file system without locks.
    """
    with _lockable(folder) as lock:
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            try:
                lock("LOCK_EX")
                break
            except BlockingIOError:
                time.sleep(0.002)
            except OSError:
                break
        yield


def is_in_use(folder: Path) -> bool:
    """Return whether a running process has called `mark_in_use`. False on a file system without locks."""
    with _lockable(folder) as lock:
        try:
            lock("LOCK_EX")
        except OSError as error:  # a file system without locks raises another one
            return isinstance(error, BlockingIOError)
        return False


@contextlib.contextmanager
def _lockable(folder: Path) -> Iterator[Callable[[str], None]]:
    """Yield a function that locks a folder without waiting, and unlock the folder at the end. No effect on Windows."""
    if os.name == "nt":
        yield lambda kind: None
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        yield lambda kind: fcntl.flock(handle, getattr(fcntl, kind) | fcntl.LOCK_NB)
    finally:
        # Closing alone would leave a lock with processes that were forked while it was held.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
