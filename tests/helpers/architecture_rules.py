"""The rules of the architecture that no linter knows: layers, cycles, a loop that knows no engine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from tests.helpers.sources import PARTS, Breach, Import, Source

# The command and the templates use the package as a user does; what lies below them names the file.
_MAY_USE_THE_FACE = {"cli", "templates"}
_BELOW_STRATEGIES = {"core", "callbacks", "profilers", "loggers", "data", "checkpoint", "processes"}
_BELOW_TRAINER = _BELOW_STRATEGIES | {"strategies", "bigmodels"}
_MAY_IMPORT = {
    "core": {"core"},
    "callbacks": {"core", "callbacks"},
    "profilers": {"core", "profilers"},
    "loggers": {"core", "loggers"},
    "data": {"core", "data"},
    "checkpoint": {"core", "checkpoint"},
    "processes": {"core", "processes"},
    "optimizers": {"core", "optimizers"},
    "generation": {"core", "generation"},
    "commands": {"cli", "launch"},
    "utilities": {"core", "callbacks", "data", "utilities"},
    "strategies": _BELOW_STRATEGIES | {"strategies"},
    "bigmodels": _BELOW_TRAINER,
    "accelerator": _BELOW_TRAINER | {"accelerator", "generation"},
    "trainer": _BELOW_TRAINER | {"trainer"},
    "utils": _BELOW_TRAINER | {"accelerator", "launch", "utils"},
    "launch": _BELOW_TRAINER | {"accelerator", "trainer", "launch"},
    "cli": _BELOW_TRAINER | {"accelerator", "trainer", "launch", "cli"},
    "templates": set(PARTS),
}

_BACKENDS = {
    "cuda", "nccl", "gloo", "mpi", "hccl", "mps", "xla", "xpu", "hpu", "npu", "tpu", "rocm",
    "ddp", "fsdp", "fsdp2", "deepspeed", "megatron", "zero1", "zero2", "zero3",
}  # fmt: skip
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z0-9]+")


def layer_breaches(source: Source) -> list[Breach]:
    """Law 1: an import points only downward, in functions and for types too, and names its home."""
    found = []
    for entry in source.imports:
        if entry.root in PARTS:
            found.append(
                source.breach(
                    entry.line,
                    f"bare import of {entry.root!r} makes a second copy of its classes; "
                    f"import trainwright.{entry.root}",
                )
            )
        elif entry.root == "trainwright" and source.part:
            pieces = entry.target.split(".")
            part = pieces[1] if len(pieces) > 1 else ""
            if part not in PARTS:
                if source.part in _MAY_USE_THE_FACE:
                    continue
                found.append(
                    source.breach(
                        entry.line,
                        f"import of {entry.target!r} from the package's public face; "
                        "import it from the file where it lives",
                    )
                )
            elif part not in _MAY_IMPORT[source.part]:
                found.append(source.breach(entry.line, f"{source.part} must not import {part} ({entry.target})"))
    return found


def import_cycles(sources: Iterable[Source]) -> list[str]:
    """Law 1: the imports, in functions and for types too, have no cycle; returns each as `a -> b -> a`."""
    by_name = {source.module: source for source in sources}
    edges = {name: _imported_modules(source, by_name) for name, source in by_name.items()}
    cycles: list[str] = []
    state: dict[str, str] = {}

    def visit(name: str, path: list[str]) -> None:
        state[name] = "open"
        for target in edges[name]:
            if state.get(target) == "open":
                cycle = [*path[path.index(target) :], target]
                cycles.append(" -> ".join(cycle))
            elif target not in state:
                visit(target, [*path, target])
        state[name] = "done"

    for name in sorted(edges):
        if name not in state and name != "trainwright":  # the public face names everything, lazily
            visit(name, [name])
    return cycles


def _imported_modules(source: Source, by_name: dict[str, Source]) -> list[str]:
    homes = {_home(entry, by_name) for entry in source.imports}
    return sorted(home for home in homes if home not in (None, source.module))


def _home(entry: Import, by_name: dict[str, Source]) -> str | None:
    """Return the module of ours that an import statement loads, if any."""
    if entry.target in by_name:
        return entry.target
    parent = entry.target.rpartition(".")[0]
    return parent if parent in by_name and parent != "trainwright" else None


def blind_loop_breaches(source: Source) -> list[Breach]:
    """Law 3: trainer/ and callbacks/ ask a strategy for what differs; they know no engine and no kind of device."""
    if source.part not in ("trainer", "callbacks"):
        return []
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and _called_name(node) in ("isinstance", "issubclass") and len(node.args) > 1:
            asked = [name for child in ast.walk(node.args[1]) for name in _identifiers(child)]
            found += [source.breach(node, f"asks for the type {name}") for name in asked if name.endswith("Strategy")]
        for name in _identifiers(node):
            found += [source.breach(node, f"the name {name!r} is a backend's") for _ in _backends_in(name)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in source.docstrings:
            found += [
                source.breach(node, f"the string names the backend {word!r}") for word in _backends_in(node.value)
            ]
    return found


def _called_name(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _identifiers(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.arg, ast.keyword)):
        yield node.arg or ""
    elif isinstance(node, ast.alias):
        yield from node.name.split(".")


def _backends_in(text: str) -> list[str]:
    words = {word.lower() for word in _WORD.findall(text)} | set(re.split(r"[^a-z0-9]+", text.lower()))
    return sorted(words & _BACKENDS)
