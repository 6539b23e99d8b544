"""The package's source files as the architecture rules see them: parsed, named, with their imports resolved."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Each part of the package and where it lies in the checkout. Projects inside templates/ are data, not modules.
PARTS = {
    "core": "src/trainwright/core",
    "data": "src/trainwright/data",
    "checkpoint": "src/trainwright/checkpoint",
    "processes": "src/trainwright/processes",
    "bigmodels": "src/trainwright/bigmodels",
    "accelerator": "src/trainwright/accelerator",
    "generation": "src/trainwright/generation",
    "launch": "src/trainwright/launch",
    "cli": "src/trainwright/cli",
    "commands": "src/trainwright/commands",
    "utilities": "src/trainwright/utilities",
    "utils": "src/trainwright/utils",
    "profilers": "src/trainwright/profilers",
    "optimizers": "src/trainwright/optimizers",
    "callbacks": "callbacks",
    "loggers": "loggers",
    "strategies": "strategies",
    "templates": "templates",
    "trainer": "trainer",
}


@dataclass(frozen=True)
class Import:
    """One imported name.

    Attributes:
        target: full dotted name, for `from a import b` it is `a.b`.
        line: 1-based line.
    """

    target: str
    line: int

    @property
    def root(self) -> str:
        return self.target.partition(".")[0]


@dataclass(frozen=True)
class Breach:
    module: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.what}"


class Source:
    """One module of the package, for example `trainwright.core.task`."""

    def __init__(self, module: str, text: str) -> None:
        self.module = module
        self.text = text

    @property
    def part(self) -> str:
        """The part that the module belongs to, for example `core`; empty for the package's own face."""
        pieces = self.module.split(".")
        return pieces[1] if len(pieces) > 1 and pieces[1] in PARTS else ""

    @property
    def short(self) -> str:
        return self.module.removeprefix("trainwright.")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> list[Import]:
        """Every import statement, in functions and under TYPE_CHECKING too, one entry for each name."""
        return list(_imports(self.tree))

    @cached_property
    def docstrings(self) -> set[int]:
        """The identities of the string nodes that are documentation, not code."""
        return {
            id(node.value)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        }

    def breach(self, node: ast.AST | int, what: str) -> Breach:
        """Return a breach of this module at a node or a line."""
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return Breach(self.module, line, what)


def package_sources() -> list[Source]:
    """Read every module of the package, also from a checkout without links."""
    found = [Source("trainwright", _read("src/trainwright/__init__.py"))]
    found.append(Source("trainwright.__main__", _read("src/trainwright/__main__.py")))
    for part, folder in PARTS.items():
        base = ROOT / folder
        paths = base.glob("*.py") if part == "templates" else base.rglob("*.py")
        for path in sorted(paths):
            pieces = [piece for piece in path.relative_to(base).with_suffix("").parts if piece != "__init__"]
            module, text = ".".join(["trainwright", part, *pieces]), path.read_text(encoding="utf-8")
            found.append(Source(module, text))
    return found


def stub_sources() -> list[Source]:
    """Read the stubs that hold the packages' public names."""
    found = []
    for part, folder in PARTS.items():
        for path in sorted((ROOT / folder).rglob("__init__.pyi")):
            pieces = path.relative_to(ROOT / folder).parts[:-1]
            found.append(Source(".".join(["trainwright", part, *pieces]), path.read_text(encoding="utf-8")))
    return [Source("trainwright", _read("src/trainwright/__init__.pyi")), *found]


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _imports(tree: ast.Module) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                yield Import(f"{base}.{alias.name}" if node.module else base + alias.name, node.lineno)
