"""Remote folders of several kinds, and no waiting for the disk, on which thousands of small files are written."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator

import fsspec
import pytest

from trainwright.checkpoint import AsyncWriter, set_fault_hook

S3 = pytest.mark.requires("moto", "its server stands for S3")


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(autouse=True)
def _no_fault_hook_left() -> Iterator[None]:
    yield
    set_fault_hook(None)


@pytest.fixture
def writer() -> Iterator[AsyncWriter]:
    """Return an asynchronous writer, which is closed afterwards."""
    writer = AsyncWriter()
    yield writer
    writer.close()


@pytest.fixture
def memory() -> Iterator[str]:
    url = f"memory://test-{secrets.token_hex(4)}"
    yield url
    files, root = fsspec.core.url_to_fs(url)
    if files.exists(root):
        files.rm(root, recursive=True)


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None  # by the arguments
        address = next(filter(None, (re.search(r"http://[\d.:]+", line) for line in process.stderr)))
        # Nobody reads the log of requests: a full pipe would block the server.
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        yield address.group()
        process.kill()
        reader.join()


@pytest.fixture
def s3(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of an empty bucket. Child processes reach it, too."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    files = fsspec.filesystem("s3")
    bucket = f"test-{secrets.token_hex(4)}"
    files.mkdir(bucket)
    yield f"s3://{bucket}"
    type(files).clear_instance_cache()


@pytest.fixture(params=["memory", pytest.param("s3", marks=S3)])
def url(request: pytest.FixtureRequest) -> str:
    """Return a remote folder of each kind in turn; it does not exist yet."""
    return f"{request.getfixturevalue(request.param)}/run"
