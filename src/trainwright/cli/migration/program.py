"""A program as text and as a syntax tree: which statement binds each name, and the edits of the text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.core.names.foreign_names import LIBRARIES

FACE = "trainwright"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# Nodes that bind their attribute `name`, which may be None.
_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, order=True)
class Unsettled:
    """Manual change that the user must make: a 1-based line number and an instruction."""

    line: int
    text: str


@dataclass(eq=False)
class Scope:
    """Names that are bound in a module, class, function or comprehension.

    Attributes:
        parent: the surrounding scope. None for the module.
        is_class: whether it is the body of a class.
        bound: name → the `Import` or the nodes of the syntax tree that bind it.
        outer: names that are declared global or nonlocal.
    """

    parent: Scope | None
    is_class: bool = False
    bound: dict[str, list[Any]] = field(default_factory=dict)
    outer: set[str] = field(default_factory=set)

    def bind(self, name: str, node: object) -> None:
        """Record that a node binds a name.

        A name that is declared global is bound in the surrounding scope, too, not in the module.
        """
        if name in self.outer and self.parent is not None:
            self.parent.bind(name, node)
        else:
            self.bound.setdefault(name, []).append(node)

    def lookup(self, name: str) -> Scope | None:
        """Return the scope that binds a name read in this scope, or None for a builtin."""
        scope: Scope | None = self
        while scope is not None:
            # As in Python, the methods of a class do not see the names of the class body.
            hidden = scope.is_class and scope is not self
            if name in scope.bound and not hidden:
                return scope
            scope = scope.parent
        return None


@dataclass(frozen=True, eq=False)
class Import:
    """A name that an import statement imports from Lightning or Accelerate.

    Values of `local` and `path` for three statements:

        import lightning.pytorch                    lightning    lightning
        import lightning.pytorch as pl              pl           lightning.pytorch
        from lightning.pytorch import Trainer as T  T            lightning.pytorch.Trainer
    """

    node: ast.Import | ast.ImportFrom
    alias: ast.alias  # one of `node.names`
    local: str  # the bound name
    path: str  # dotted name of the bound object in Lightning or Accelerate


class Program:
    """Text, syntax tree and bindings of one program, and the edits that rewrite it.

    Raises SyntaxError for a text that is not valid Python.

    Attributes:
        source: the text as UTF-8. Columns of a syntax tree count bytes of UTF-8, so that positions and edits do, too.
        tree: the syntax tree of the text.
        starts: position of the start of each line.
        newline: end of a line of the text.
        parents: parent of each node.
        scopes: all scopes of the program.
        kept: nodes in a `try` that imports Trainwright, too. Such a program already chooses between the libraries.
        reads: names that the program reads, each with its scope.
        strings: strings other than docstrings, each with its node.
        edits: (begin, end) in `source` → new text. The caller must not let edits overlap: a node and a node inside it
            cannot both be replaced. `begin == end` inserts.
        unsettled: manual changes that the user must make.
    """

    def __init__(self, text: str) -> None:
        self.source = text.encode()
        self.tree = ast.parse(text)
        self.starts = [0, *(match.end() for match in re.finditer(rb"\r\n?|\n", self.source))]
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.edits: dict[tuple[int, int], str] = {}
        self.unsettled: set[Unsettled] = set()
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self.kept: set[ast.AST] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Try) and any(FACE in roots(each) for each in ast.walk(node)):
                self.kept |= set(ast.walk(node))
        self.scopes: list[Scope] = []
        self.reads: list[tuple[ast.Name, Scope]] = []
        self._visit(self.tree, self._add_scope(None))
        self.strings: list[tuple[ast.Constant, str]] = []
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Constant) or isinstance(self.parents[node], ast.Expr):
                continue
            if isinstance(node.value, str):
                self.strings.append((node, node.value))

    def _add_scope(self, parent: Scope | None, *, is_class: bool = False) -> Scope:
        scope = Scope(parent, is_class)
        self.scopes.append(scope)
        return scope

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        """Record the names that a node and its descendants bind and read."""
        self._record(node, scope)
        inner = scope
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS, *_COMPREHENSIONS)):
            inner = self._add_scope(scope, is_class=isinstance(node, ast.ClassDef))
            for each in ast.walk(node):
                if isinstance(each, (ast.Global, ast.Nonlocal)):
                    inner.outer.update(each.names)
        outside = _outside(node)
        for child in outside:
            self._visit(child, scope)
        if isinstance(node, _FUNCTIONS):
            for arg in ast.iter_child_nodes(node.args):
                if isinstance(arg, ast.arg):
                    inner.bind(arg.arg, arg)
        for child in ast.iter_child_nodes(node):
            # Defaults and annotations of the arguments, the only expressions in `ast.arguments`, are in `outside`.
            if child not in outside and not isinstance(child, ast.arguments):
                self._visit(child, inner)

    def _record(self, node: ast.AST, scope: Scope) -> None:
        """Record the name that the node itself binds or reads."""
        if isinstance(node, _NAMED) and node.name:
            scope.bind(node.name, node)
        elif isinstance(node, ast.MatchMapping) and node.rest:  # `case {**rest}`
            scope.bind(node.rest, node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            self.reads.append((node, scope))
        elif isinstance(node, ast.Name):
            scope.bind(node.id, node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                local = alias.asname or root(alias.name)  # `import a.b` binds `a`
                scope.bind(local, self._as_import(node, alias) or node)

    def _as_import(self, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> Import | None:
        """Return the import of Lightning or Accelerate, or None for any other import."""
        if node in self.kept or alias.name == "*":
            return None
        if not roots(node) & set(LIBRARIES):
            return None
        if isinstance(node, ast.ImportFrom):
            return Import(node, alias, alias.asname or alias.name, f"{node.module}.{alias.name}")
        if root(alias.name) not in LIBRARIES:  # `import os, lightning`
            return None
        path = alias.name if alias.asname else root(alias.name)
        return Import(node, alias, alias.asname or path, path)

    def chain(self, name: ast.Name) -> list[Any]:
        """Return a name and the attribute accesses on it: `L`, `L.callbacks`, `L.callbacks.Timer`."""
        nodes: list[Any] = [name]
        above = self.parents[name]
        while isinstance(above, ast.Attribute):
            nodes.append(above)
            above = self.parents[above]
        return nodes

    def span(self, node: Any) -> tuple[int, int]:
        """Return the positions in `source` where the text of a node begins and ends."""
        begin = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        return begin, end

    def around(self, node: ast.stmt) -> tuple[bytes, bytes]:
        """Return the text before a statement on its first line, and the text after it on its last line."""
        begin, end = self.span(node)
        before = self.source[self.starts[node.lineno - 1] : begin]
        after = self.source[end:].split(b"\n", 1)[0]
        return before, after

    def lines_of(self, node: ast.stmt) -> tuple[int, int]:
        """Return the positions in `source` where a statement's first line begins and its last line ends."""
        begin = self.starts[node.lineno - 1]
        last_line = node.end_lineno or node.lineno
        if last_line == len(self.starts):  # the text does not end with a line break
            return begin, len(self.source)
        return begin, self.starts[last_line]  # lines count from 1, so this is the start of the next one

    def replace(self, node: object, text: str) -> None:
        """Replace the text of a node. An empty text keeps it."""
        begin, end = self.span(node)
        if text and self.source[begin:end].decode() != text:
            self.edits[begin, end] = text

    def report(self, node: Any, text: str) -> None:
        """Add a manual change, with the instruction `text`, at the line of a node."""
        self.unsettled.add(Unsettled(node.lineno, text))

    def edited(self) -> str:
        """Return the program's text with the edits."""
        code = self.source
        begin_of_later = len(code)
        # From the end, so that earlier positions stay valid.
        for (begin, end), text in sorted(self.edits.items(), reverse=True):
            assert end <= begin_of_later, "edits overlap, and would write a program that is not valid"
            begin_of_later = begin
            code = code[:begin] + text.encode() + code[end:]
        return code.decode()


def _outside(node: ast.AST) -> Sequence[ast.AST]:
    """Return the parts of a class or function that Python evaluates in the surrounding scope."""
    parts: list[ast.AST] = []
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        parts += node.decorator_list
    if isinstance(node, ast.ClassDef):
        parts += [*node.bases, *node.keywords]
    elif isinstance(node, _FUNCTIONS):
        parts += node.args.defaults
        parts += [default for default in node.args.kw_defaults if default is not None]
        parts += annotations_of(node)
    return parts


def root(name: str) -> str:
    """Return the top package of a dotted name."""
    return name.partition(".")[0]


def roots(node: ast.AST) -> set[str]:
    """Return the top packages that a statement imports from. Empty for relative imports and other nodes."""
    if isinstance(node, ast.Import):
        return {root(alias.name) for alias in node.names}
    if isinstance(node, ast.ImportFrom) and not node.level:
        return {root(node.module or "")}
    return set()


def annotations_of(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the annotations of a function or of an annotated assignment."""
    if isinstance(node, ast.AnnAssign):
        yield node.annotation
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    if node.returns is not None:
        yield node.returns
    for arg in ast.walk(node.args):
        if isinstance(arg, ast.arg) and arg.annotation is not None:
            yield arg.annotation
