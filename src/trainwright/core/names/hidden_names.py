"""Hidden names of checkpoints that are being written or deleted, and names of wrapped parameters."""

from __future__ import annotations

import os
import re
from pathlib import Path

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<role>tmp|old|del)-[0-9a-f]{16}")


def split_hidden(name: str) -> tuple[str, str] | None:
    """Return the visible name and the role of a hidden name; None for any other name."""
    match = _HIDDEN.fullmatch(name)
    return (match["name"], match["role"]) if match else None


def names_in(folder: Path | None) -> frozenset[str]:
    """Return the names that are taken in a folder, including checkpoints that any run is writing.

    The result contains `.` if the folder exists.
    """
    if folder is None or not folder.is_dir():
        return frozenset()
    return frozenset([os.curdir, *os.listdir(folder)]) | claimed_names(folder)


def claimed_names(folder: Path | None) -> frozenset[str]:
    """Return the names in a folder that a save or a running fit has reserved."""
    names = () if folder is None or not folder.is_dir() else os.listdir(folder)
    return frozenset(split[0] for split in map(split_hidden, names) if split and split[1] == "tmp")


# What torch.compile, activation checkpointing and FSDP1 put between the dots of a parameter's name.
_WRAPPER = re.compile(r"(^|\.)(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts added by wrappers: `net._orig_mod.weight` → `net.weight`."""
    return _WRAPPER.sub("", name).removeprefix(".")
