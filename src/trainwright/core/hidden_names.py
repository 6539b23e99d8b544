"""The hidden names of checkpoints that are being written, replaced or deleted."""

from __future__ import annotations

import re

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<role>tmp|old|del)-[0-9a-f]{16}")


def split_hidden(name: str) -> tuple[str, str] | None:
    """Return the visible name and the role in a hidden name of ours; None for any other name."""
    match = _HIDDEN.fullmatch(name)
    return (match["name"], match["role"]) if match else None
