"""Generate mutants: copies of a source file with one small mistake each, such as a condition that is inverted.

A mutant is an edit of the text, so that the rest of the file stays as it is, comments and layout included.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "+",
}
# Mistakes in texts, names and representations cost users little, and tests do not pin their words.
_NOT_MUTATED = {"__repr__", "__str__", "__reduce__", "__getstate__"}
_ANY_ORDER = ("max", "min", ".transpose")  # functions whose arguments may be swapped
_FOR_TESTS = {"fault_point"}  # calls that only tests use
# Arguments that change no result: `strict` of `zip` checks lengths that the caller checked, `non_blocking` is about
# speed, and a `daemon` thread differs only where the process ends without joining it.
_WITHOUT_EFFECT = {"strict", "stacklevel", "non_blocking", "daemon"}
_LARGE = 16  # from here on one more is no mistake: buffers, numbers of bytes, hash seeds


@dataclass(frozen=True)
class Mutant:
    """One mistake in one file.

    Attributes:
        file: path of the file, relative to the root of the repository.
        line: 1-based line of the mistake.
        end_line: last line of the text that is replaced.
        kind: kind of the mistake, such as `"condition inverted"`.
        begin, end: the replaced bytes of the file.
        before, after: the text that is replaced, and its replacement.
    """

    file: str
    line: int
    end_line: int
    kind: str
    begin: int
    end: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """A name that stays the same while the line and the text before it do."""
        return f"{self.file}:{self.line} {self.kind}: {_short(self.before)} -> {_short(self.after)}"

    def apply(self, source: bytes) -> bytes:
        """Return the text of the file with the mistake."""
        return source[: self.begin] + self.after.encode() + source[self.end :]


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 60 else words[:57] + "..."


class _Generator(ast.NodeVisitor):
    """Collects the mutants of a file, in the order of its nodes."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.source = source
        self.found: list[Mutant] = []
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    # Helpers

    def _span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        return begin, end

    def _text(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        begin, end = self._span(node)
        return self.source[begin:end].decode()

    def _add(self, kind: str, begin: int, end: int, after: str) -> None:
        before = self.source[begin:end].decode()
        line = self.source.count(b"\n", 0, begin) + 1
        end_line = self.source.count(b"\n", 0, end) + 1
        self.found.append(Mutant(self.file, line, end_line, kind, begin, end, before, after))

    def _replace(self, kind: str, node: ast.expr | ast.stmt, after: str) -> None:
        self._add(kind, *self._span(node), after)

    def _operator_span(self, left: ast.expr, right: ast.expr) -> tuple[int, int]:
        """Return the span of the operator between two operands, without parentheses and spaces around it."""
        begin, end = self._span(left)[1], self._span(right)[0]
        between = self.source[begin:end]
        stripped = between.strip(b" \t\n()\\")
        offset = between.index(stripped)
        return begin + offset, begin + offset + len(stripped)

    # What is skipped

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in _NOT_MUTATED:
            return
        for statement in node.body:
            self.visit(statement)  # not its decorators, defaults and annotations

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip the arguments of an error, which are mostly text. Whether it is raised is a mutant of its condition."""

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in _WITHOUT_EFFECT:
            self.visit(node.value)

    def visit_Module(self, node: ast.Module) -> None:
        for statement in node.body:
            if not _is_tuning(statement):
                self.visit(statement)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip text."""

    # Mistakes

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in self._text(node.test):
            return
        self._invert(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.generic_visit(node)  # an inverted condition would mostly hang, or be that of `while True`

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._invert(node.test)
        self.generic_visit(node)

    def _invert(self, test: ast.expr) -> None:
        is_one_comparison = isinstance(test, ast.Compare) and len(test.ops) == 1
        if not is_one_comparison:  # that of a comparison is a mutant of its own
            self._replace("condition inverted", test, f"(not ({self._text(test)}))")

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for number, operator in enumerate(node.ops):
            span = self._operator_span(operands[number], operands[number + 1])
            self._add("comparison changed", *span, _COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = "or" if isinstance(node.op, ast.And) else "and"
        self._add("and/or swapped", *self._operator_span(node.values[0], node.values[1]), other)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = _ARITHMETIC.get(type(node.op))
        is_text = any(isinstance(side, (ast.JoinedStr, ast.Constant)) for side in (node.left, node.right)) and any(
            isinstance(getattr(side, "value", None), str) or isinstance(side, ast.JoinedStr)
            for side in (node.left, node.right)
        )
        if other is not None and not is_text:
            self._add("operator changed", *self._operator_span(node.left, node.right), other)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace("constant changed", node, str(not node.value))
        elif isinstance(node.value, int) and abs(node.value) < _LARGE:
            self._replace("off by one", node, str(node.value + 1))

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and self._text(node.value.func) not in _FOR_TESTS:
            self._replace("call removed", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self._replace("assignment removed", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace("assignment removed", node, "pass")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            self._replace("returns nothing", node, "return None")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self._text(node.func)
        if called in _FOR_TESTS:
            return
        for number, keyword in enumerate(node.keywords):
            if keyword.arg is not None and keyword.arg not in _WITHOUT_EFFECT:
                self._drop(node, number)
        plain = [each for each in node.args if not isinstance(each, ast.Starred)]
        if len(plain) >= 2 and len(plain) == len(node.args) and not called.endswith(_ANY_ORDER):
            begin, end = self._span(plain[0])[0], self._span(plain[1])[1]
            between = self.source[self._span(plain[0])[1] : self._span(plain[1])[0]].decode()
            self._add("arguments swapped", begin, end, self._text(plain[1]) + between + self._text(plain[0]))
        self.generic_visit(node)

    def _drop(self, call: ast.Call, number: int) -> None:
        """Drop a keyword argument with the comma that separates it."""
        begin, end = self._span(call.keywords[number])
        rest = self.source[end:]
        after = rest[: len(rest) - len(rest.lstrip(b" \n"))]
        if rest[len(after) : len(after) + 1] == b",":
            end += len(after) + 1
        else:
            head = self.source[:begin].rstrip(b" \n")
            if head.endswith(b","):
                begin = len(head) - 1
        self._add("argument dropped", begin, end, "")


def _is_tuning(statement: ast.stmt) -> bool:
    """Whether a statement of a module names a number, such as a size or a time that was chosen by measuring."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    is_constant = all(isinstance(target, ast.Name) and target.id.isupper() for target in targets)
    return is_constant and isinstance(statement.value, (ast.Constant, ast.BinOp))


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """Return every mutant of a file that Python can compile, in the order of the file.

    Args:
        file: path of the file, relative to the root of the repository.
        source: the text of the file.
    """
    generator = _Generator(file, source)
    generator.visit(ast.parse(source))
    return sorted(_that_compile(generator.found, source), key=lambda mutant: (mutant.begin, mutant.end, mutant.kind))


def _that_compile(mutants: list[Mutant], source: bytes) -> Iterator[Mutant]:
    for mutant in mutants:
        try:
            compile(mutant.apply(source), mutant.file, "exec", dont_inherit=True)
        except SyntaxError:
            continue
        yield mutant
