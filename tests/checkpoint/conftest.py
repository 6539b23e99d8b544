"""Thousands of small files are written here; waiting for the disk each time would take longer than everything else."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take the waiting out of `os.fsync`; returns the paths that it was called for, in order."""
    paths: list[str] = []

    def fsync(handle: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{handle}") if os.path.isdir("/proc/self/fd") else str(handle))

    monkeypatch.setattr(os, "fsync", fsync)
    return paths
