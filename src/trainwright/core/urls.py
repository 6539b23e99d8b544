"""Places on other machines: which paths are URLs, and what stands for them on this machine's disk."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TypeGuard

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")


def is_url(path: object) -> TypeGuard[str]:
    """Tell whether `path` is text such as `s3://bucket/run`, and not a place on this machine's disk."""
    return isinstance(path, str) and _URL.match(path) is not None


def last_part(url: str) -> str:
    """Return what stands behind the last slash: a checkpoint's name."""
    return url.rstrip("/").rpartition("/")[2]


def local_folder(root: Path, url: str) -> Path:
    """Return the folder below `root` that stands for `url`: readable, and another one for every URL."""
    url = url.rstrip("/")
    words = re.sub(r"[^A-Za-z0-9_.]+", "-", url.rpartition("@")[2]).strip("-.")[-60:]  # no password in a path
    return root / f"{words}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
