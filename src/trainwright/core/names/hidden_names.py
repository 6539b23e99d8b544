"""Names behind those that users see: of checkpoints that are being written or deleted, and of wrapped parameters."""

from __future__ import annotations

import re

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<role>tmp|old|del)-[0-9a-f]{16}")


def split_hidden(name: str) -> tuple[str, str] | None:
    """Return the visible name and the role in a hidden name of ours; None for any other name."""
    match = _HIDDEN.fullmatch(name)
    return (match["name"], match["role"]) if match else None


# What torch.compile, activation checkpointing and FSDP1 put between the dots of a parameter's name.
_WRAPPER = re.compile(r"(^|\.)(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers added: `net._orig_mod.weight` → `net.weight`."""
    return _WRAPPER.sub("", name).removeprefix(".")
