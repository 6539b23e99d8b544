"""Remote folders of several kinds, and no waiting for the disk.

Thousands of small files are written here; waiting for the disk each time would take longer than everything else.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.checkpoint.webhdfs_server import SERVED, FileServer, file_server


@pytest.fixture(autouse=True)
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take the waiting out of `os.fsync`; returns the paths that it was called for, in order."""
    paths: list[str] = []

    def fsync(handle: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{handle}") if os.path.isdir("/proc/self/fd") else str(handle))

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


@pytest.fixture
def memory() -> Iterator[str]:
    """Return the URL of a folder in fsspec's own memory."""
    url = f"memory://test-{secrets.token_hex(4)}"
    yield url
    files, root = fsspec.core.url_to_fs(url)
    if files.exists(root):
        files.rm(root, recursive=True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    """Run an HTTP file server; connections are closed with it."""
    root = tmp_path / "served"
    root.mkdir()
    with file_server(root) as running:
        yield running
        client = fsspec.core.url_to_fs(running.url)[0]
        client.session.close()
        client.clear_instance_cache()


@pytest.fixture(params=["memory", pytest.param("http", marks=SERVED), "disk"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a remote folder of each kind in turn; it does not exist yet."""
    if request.param == "memory":
        return f"{request.getfixturevalue('memory')}/run"
    if request.param == "http":
        return f"{request.getfixturevalue('server').url}/run"
    return f"file://{tmp_path}/remote/run"
