"""Hidden names of checkpoints that are being written or deleted, and names of wrapped parameters."""

from __future__ import annotations

import os
import re
from pathlib import Path

# tmp: a checkpoint that is being written, or a reserved name. old: a checkpoint that a new one replaces. del: one that
# is being deleted.
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<role>tmp|old|del)-[0-9a-f]{16}")


def split_hidden(name: str) -> tuple[str, str] | None:
    """Return name and role (tmp, old, del) of a hidden name `.{name}.{role}-{16 hex digits}`, or None."""
    match = _HIDDEN.fullmatch(name)
    return (match["name"], match["role"]) if match else None


def names_in(folder: Path | None) -> frozenset[str]:
    """Return the names in a folder that a new checkpoint cannot have, including those that any run is writing.

    The result contains `.` if the folder exists.
    """
    if folder is None or not folder.is_dir():
        return frozenset()
    return frozenset([os.curdir, *os.listdir(folder)]) | claimed_names(folder)


def claimed_names(folder: Path | None) -> frozenset[str]:
    """Return the names of checkpoints in a folder that are being written or that a running fit has reserved."""
    if folder is None or not folder.is_dir():
        return frozenset()
    claimed = set()
    for entry in os.listdir(folder):
        hidden = split_hidden(entry)
        if hidden is not None:
            name, role = hidden
            if role == "tmp":
                claimed.add(name)
    return frozenset(claimed)


# Parts that torch.compile, activation checkpointing and FSDP1 add between the dots of a parameter's name.
_WRAPPER = re.compile(r"(^|\.)(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts added by wrappers: `net._orig_mod.weight` → `net.weight`."""
    return _WRAPPER.sub("", name).removeprefix(".")
