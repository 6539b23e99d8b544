"""Which of DeepSpeed's compiled operations this machine can have."""

from __future__ import annotations

import ctypes.util
import shutil

import pytest


def needs_operation(name: str) -> pytest.MarkDecorator:
    """Return a mark that skips tests where an operation cannot be compiled (see `compile_deepspeed`)."""
    usable = shutil.which("g++") is not None
    if name == "AsyncIOBuilder":
        usable &= ctypes.util.find_library("aio") is not None
    return pytest.mark.skipif(not usable, reason=f"DeepSpeed's {name} needs g++, and libaio-dev for disks")
