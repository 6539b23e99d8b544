"""Rules about what stands in a module: the blind loop, sizes, docstrings, swallowed exceptions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from tests.helpers.sources import Breach, Source

_BACKENDS = {
    "cuda", "nccl", "gloo", "mpi", "hccl", "mps", "xla", "xpu", "hpu", "npu", "tpu", "rocm",
    "ddp", "fsdp", "fsdp2", "deepspeed", "megatron", "zero1", "zero2", "zero3",
}  # fmt: skip
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_PLAIN_BASES = {"object", "ABC", "Protocol", "Generic", "Enum", "NamedTuple", "TypedDict", "Exception"}

_Function = ast.FunctionDef | ast.AsyncFunctionDef


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


def swallowing_breaches(source: Source) -> list[Breach]:
    """A broad `except` whose body is only `pass` hides whatever happens."""
    found = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        broad = node.type is None or any(
            name in ("Exception", "BaseException") for child in ast.walk(node.type) for name in _identifiers(child)
        )
        if broad and all(isinstance(statement, (ast.Pass, ast.Continue)) for statement in node.body):
            found.append(source.breach(node, "swallows every exception; name the one that is expected, or report it"))
    return found


def undocumented_names(sources: Iterable[Source]) -> list[Breach]:
    """Return the public classes, functions and methods without a docstring.

    A method may lack one where it overrides: a class of ours that documents it, or a class of another package.
    """
    sources = list(sources)
    classes = {
        node.name: node for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)
    }
    found = []
    for source in sources:
        if any(piece.startswith("_") for piece in source.module.split(".")):
            continue
        if ast.get_docstring(source.tree) is None:
            found.append(source.breach(1, "the module has no docstring"))
        for node in source.tree.body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
                continue
            if ast.get_docstring(node) is None:
                found.append(source.breach(node, f"{node.name} has no docstring"))
            if isinstance(node, ast.ClassDef):
                found += [
                    source.breach(method, f"{node.name}.{method.name} has no docstring")
                    for method in _undocumented_methods(node)
                    if not _inherits_docstring(node, method.name, classes)
                ]
    return found


def _undocumented_methods(node: ast.ClassDef) -> Iterator[_Function]:
    for child in node.body:
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) or child.name.startswith("_"):
            continue
        marks = {name for mark in child.decorator_list for part in ast.walk(mark) for name in _identifiers(part)}
        if ast.get_docstring(child) is None and not marks & {"overload", "setter", "deleter", "override"}:
            yield child


def _inherits_docstring(node: ast.ClassDef, method: str, classes: dict[str, ast.ClassDef]) -> bool:
    for base in node.bases:
        target = base.value if isinstance(base, ast.Subscript) else base
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        if name in _PLAIN_BASES or name == node.name:
            continue
        if name not in classes:
            return True  # a class of another package, which documents its own methods
        ours = classes[name]
        documented = any(
            isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            and child.name == method
            and ast.get_docstring(child) is not None
            for child in ours.body
        )
        if documented or _inherits_docstring(ours, method, classes):
            return True
    return False
