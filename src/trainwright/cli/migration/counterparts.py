"""Counterparts of the names of Lightning and Accelerate, and the advice for names without one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

from trainwright.cli.migration.program import FACE, root
from trainwright.core.names.foreign_names import LIBRARIES, answer, canonical, own_module, own_name

_TOP_PACKAGES = ("lightning", "lightning.pytorch", "accelerate", "accelerate.utils")


def counterpart(path: str) -> str | None:
    """Return Trainwright's dotted name for a dotted name of Lightning or Accelerate, or None if there is none.

    The counterpart of a library's top package is `trainwright`.
    """
    if canonical(path) in _TOP_PACKAGES:
        return FACE
    if path.endswith(".__version__") and LIBRARIES[root(path)] == "Lightning":
        return None  # Trainwright has the version of Accelerate's interface, but none of Lightning's
    return own_name(path)


def module_in_use(path: str, chains: Sequence[Sequence[Any]]) -> str | None:
    """Return the counterpart of an imported sub-module. None if no name that the program uses in it has one.

    `counterpart` finds no name for most sub-modules, because they are not among the names of their parent module.
    """
    for chain in chains:
        if len(chain) > 1 and counterpart(f"{path}.{chain[1].attr}"):
            return own_module(path)
    return None


class Found(NamedTuple):
    """The part of an expression that has a counterpart."""

    length: int  # how many of its attributes are in that part
    path: str  # dotted name of the counterpart


def longest_counterpart(path: str, attributes: Sequence[str], base: str) -> Found | None:
    """Return the longest part of `path.attribute.attribute` that has a counterpart, or None if it must be reported.

    `lightning` with `pytorch.Trainer.fit` has the counterpart `trainwright.Trainer`, of length 2.

    Args:
        path: dotted name of the imported module.
        attributes: the attribute accesses on it. `path` alone is not looked up.
        base: dotted name that the rewritten import binds.
    """
    for length in range(len(attributes), 0, -1):
        found = counterpart(".".join([path, *attributes[:length]]))
        if found is None:
            continue
        # `L.callbacks.Missing` has the counterpart of `L.callbacks` only. A module that lacks the rest is not enough.
        lacks_rest = is_module(found) and length < len(attributes)
        # A counterpart in another module cannot be reached from `base`.
        is_reachable = f"{found}.".startswith(f"{base}.")
        return Found(length, found) if is_reachable and not lacks_rest else None
    return None


def own_object(path: str) -> Any:
    """Import the object with a dotted name, such as `trainwright.Trainer`."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def is_module(path: str) -> bool:
    """Return whether a dotted name is the name of a module."""
    return path == FACE or inspect.ismodule(own_object(path))


def advice(path: str) -> str:
    """Return the advice for a dotted name in Lightning or Accelerate without a counterpart."""
    name = path.rpartition(".")[2]
    if name == "__version__":
        return f"{path} has no counterpart here: trainwright.__version__ is Trainwright's own. Delete the comparison."
    return answer(name, LIBRARIES[root(path)]) or f"{path} has no counterpart here; see docs/migration-names.md."


def instead(path: str, name: str) -> str:
    """Return the replacement of an argument `name` that the class `path` lacks, as the end of a sentence."""
    if path == "trainwright.Accelerator":
        from trainwright.accelerator.settings import ELSEWHERE

        return f". Instead: {ELSEWHERE[name]}." if name in ELSEWHERE else "."
    return "; see docs/migration-names.md."
