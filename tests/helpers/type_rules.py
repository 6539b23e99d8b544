"""The rules on annotations, suppressions and probing, as functions of the package's sources."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator

from tests.helpers.sources import Breach, Source

_REASONED = re.compile(r"#\s*type:\s*ignore\[[\w\-, ]+\]\s+#\s*\S.*\w")


def parameters(source: Source) -> Iterator[tuple[ast.arg, bool]]:
    """Yield each annotated parameter, and whether its annotation is `Any` and nothing else."""
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            rest = [argument for argument in (given.vararg, given.kwarg) if argument is not None]
            for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs, *rest]:
                if argument.annotation is not None:
                    yield argument, _is_any(argument.annotation)


def any_parameters(source: Source) -> list[Breach]:
    """Return the parameters that say `Any` and so nothing."""
    return [source.breach(found, f"{found.arg}: Any") for found, is_any in parameters(source) if is_any]


def any_share(sources: Iterable[Source]) -> float:
    """Return the share of annotated parameters that are bare `Any`, in percent."""
    found = [is_any for source in sources for _, is_any in parameters(source)]
    return 100 * sum(found) / max(len(found), 1)


def bare_ignores(source: Source) -> list[Breach]:
    """Return the suppressed type errors without a code, or without a reason behind it."""
    found = [(line, text) for line, text in _comments(source) if re.search(r"#\s*type:\s*ignore", text)]
    return [source.breach(line, text) for line, text in found if not _REASONED.search(text)]


def skipped_formats(source: Source) -> list[Breach]:
    """Return the places that the formatter is kept from."""
    marks = ("fmt: skip", "fmt: off")
    return [source.breach(line, text) for line, text in _comments(source) if any(mark in text for mark in marks)]


def own_names(sources: Iterable[Source]) -> set[str]:
    """Return every attribute and method that a class of the project declares in its body or sets on `self`."""
    names: set[str] = set()
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                names.update(_declared(node))
    return names


def probes(source: Source, names: set[str]) -> list[Breach]:
    """Return each question whether an object has an attribute that the project's own classes declare."""
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            asked = node.args[1]
            asks = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
            if asks and isinstance(asked, ast.Constant) and asked.value in names:
                found.append(source.breach(node, f'{node.func.id}({ast.unparse(node.args[0])}, "{asked.value}")'))
    return found


def _is_any(annotation: ast.expr) -> bool:
    if isinstance(annotation, ast.Constant):
        return annotation.value in ("Any", "typing.Any")
    name = annotation.attr if isinstance(annotation, ast.Attribute) else getattr(annotation, "id", None)
    return name == "Any"


def _comments(source: Source) -> list[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def _declared(found: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(found):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node in found.body:
            yield node.name
        elif isinstance(node, ast.AnnAssign) and node in found.body and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign) and node in found.body:
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr
