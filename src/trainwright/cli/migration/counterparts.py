"""What a name of another library is here, and what to write where it is not."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from trainwright.cli.configs.foreign_config import own_name
from trainwright.core.names.foreign_names import LIBRARIES, answer, canonical

FACE = "trainwright"


def counterpart(path: str) -> str | None:
    """Return the full name here of a foreign path, a library's own package being this one."""
    if canonical(path) in ("lightning", "lightning.pytorch", "accelerate", "accelerate.utils"):
        return FACE
    return own_name(path)


def own_object(path: str) -> Any:
    """Return what a full name here stands for."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def is_module(path: str) -> bool:
    """Tell whether a full name here is that of a module."""
    return path == FACE or inspect.ismodule(own_object(path))


def advice(path: str) -> str:
    """Say what to do about a foreign path that has no counterpart."""
    name, library = path.rpartition(".")[2], LIBRARIES[path.partition(".")[0]]
    return answer(name, library) or f"{path} has no counterpart here; see docs/migration.md."


def instead(own: str, name: str) -> str:
    """Say, to end a sentence, what to write for an argument that a class here does not have."""
    if own == "trainwright.Accelerator":
        from trainwright.trainer.accelerator.settings import ELSEWHERE

        return f". Instead: {ELSEWHERE[name]}." if name in ELSEWHERE else "."
    return "; see docs/migration.md."
