"""Uses of the Trainer and the Accelerator in a program that have no counterpart."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from trainwright.cli.configs.foreign_config import own_name
from trainwright.core.names.foreign_names import LIBRARIES, answer, canonical

FACE = "trainwright"


@dataclass(frozen=True, order=True)
class Unsettled:
    """Manual change that a rewrite requires: a 1-based line, and what to do there."""

    line: int
    text: str


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
        from trainwright.accelerator.settings import ELSEWHERE

        return f". Instead: {ELSEWHERE[name]}." if name in ELSEWHERE else "."
    return "; see docs/migration.md."


_FOLDERS = ("best_model_path", "last_model_path")


def find_unanswered(code: bytes) -> list[Unsettled]:
    """Return attributes of these objects that do not exist here, by line, and reads of a checkpoint as a file. An
    object is identified by the names that it is assigned to, anywhere in the program.
    """
    tree = ast.parse(code)
    paths = dict(_imported(tree))
    made = dict(_made(tree, paths))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _dotted(node.value) in made:
            text = _about(made[_dotted(node.value)], node.attr)
            if text is not None:
                found.append(Unsettled(node.lineno, text))
        if paths and isinstance(node, ast.Call) and _dotted(node.func) == "torch.load":
            named = {each.attr for given in node.args for each in ast.walk(given) if isinstance(each, ast.Attribute)}
            if named & set(_FOLDERS):
                text = "a checkpoint is a folder here: load_from_checkpoint of your task reads it, torch.load does not."
                found.append(Unsettled(node.lineno, text))
    return found


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield local name → foreign path of imports from the other libraries."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] in LIBRARIES:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in LIBRARIES:
                    root = alias.name.partition(".")[0]
                    yield (alias.asname, alias.name) if alias.asname else (root, root)


def _made(tree: ast.AST, paths: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name → `"Trainer"` or `"Accelerator"` for names assigned from a call of these classes."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Call):
            continue
        local, _, rest = _dotted(node.value.func).partition(".")
        own = counterpart(f"{paths[local]}.{rest}".removesuffix(".")) if local in paths else None
        if own in ("trainwright.Trainer", "trainwright.Accelerator"):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((name, own.rpartition(".")[2]) for target in targets if (name := _dotted(target)))


def _about(kind: str, name: str) -> str | None:
    """Return the advice for an attribute that our object does not have; None if it has it."""
    if kind != "Trainer":
        return None  # an Accelerator has all of them
    from trainwright.trainer.lightning_names import INTERNALS
    from trainwright.trainer.trainer import Trainer

    if name not in INTERNALS:
        return None  # also attributes assigned in __init__, or set by the program
    return None if hasattr(Trainer, name) else f"trainer.{name} does not exist here: {INTERNALS[name]}."


def _dotted(node: ast.AST) -> str:
    """Return the text of a dotted name; empty for anything else."""
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""
