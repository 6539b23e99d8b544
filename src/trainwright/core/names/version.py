"""The installed version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("trainwright")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"
