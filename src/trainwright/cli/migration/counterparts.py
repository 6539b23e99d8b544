"""Counterparts of other libraries' names, and advice for names without one."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from trainwright.cli.configs.foreign_config import own_name
from trainwright.core.names.foreign_names import LIBRARIES, answer, canonical

FACE = "trainwright"


def counterpart(path: str) -> str | None:
    """Return the full name of the counterpart of a foreign path; a library's top package is this one."""
    if canonical(path) in ("lightning", "lightning.pytorch", "accelerate", "accelerate.utils"):
        return FACE
    return own_name(path)


def own_object(path: str) -> Any:
    """Return the object with a full name."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def is_module(path: str) -> bool:
    """Return whether a full name is that of a module."""
    return path == FACE or inspect.ismodule(own_object(path))


def advice(path: str) -> str:
    """Return the advice for a foreign path without a counterpart."""
    name, library = path.rpartition(".")[2], LIBRARIES[path.partition(".")[0]]
    return answer(name, library) or f"{path} has no counterpart here; see docs/migration.md."


def instead(own: str, name: str) -> str:
    """Return the end of a sentence with the replacement of an argument that a class does not have."""
    if own == "trainwright.Accelerator":
        from trainwright.trainer.accelerator.settings import ELSEWHERE

        return f". Instead: {ELSEWHERE[name]}." if name in ELSEWHERE else "."
    return "; see docs/migration.md."
