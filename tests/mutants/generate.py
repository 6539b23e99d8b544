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
# Mistakes in the text of an object cost users little, and tests do not pin its words.
_NOT_MUTATED = {"__repr__", "__str__"}
_ORDER_DOES_NOT_MATTER = {"max", "min", "transpose"}  # functions that give the same with two arguments swapped
_FOR_TESTS = {"fault_point"}  # calls that only tests use
# Arguments that change no result: `strict` of `zip` checks lengths that the caller checked, `non_blocking` is about
# speed, and a `daemon` thread differs only where the process ends without joining it.
_WITHOUT_EFFECT = {"strict", "stacklevel", "non_blocking", "daemon"}
_LARGE = 16  # larger numbers are sizes of buffers, counts of bytes and seeds, where one more changes nothing


@dataclass(frozen=True)
class Mutant:
    """One mistake in one file.

    Attributes:
        file: path of the file, relative to the root of the repository.
        line: 1-based line of the mistake.
        end_line: last line of the text that is replaced.
        kind: kind of the mistake, such as `"condition inverted"`.
        begin, end: the replaced bytes of the file, end exclusive. Bytes, because `ast` counts columns in bytes.
        column: 0-based column of the mistake, in bytes.
        before, after: the text that is replaced, and its replacement.
    """

    file: str
    line: int
    end_line: int
    kind: str
    begin: int
    end: int
    column: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """The place and the change. Unique in a version of the file."""
        return f"{self.file}:{self.line}:{self.column} {self.kind}: {_short(self.before)} -> {_short(self.after)}"

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
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def _span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self._line_starts[node.lineno - 1] + node.col_offset
        end = self._line_starts[node.end_lineno - 1] + node.end_col_offset
        return begin, end

    def _text(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        begin, end = self._span(node)
        return self.source[begin:end].decode()

    def _add(self, kind: str, begin: int, end: int, after: str) -> None:
        before = self.source[begin:end].decode()
        if before == after:  # f(x, x) with its arguments swapped
            return
        line = self.source.count(b"\n", 0, begin) + 1
        end_line = self.source.count(b"\n", 0, end) + 1
        column = begin - self._line_starts[line - 1]
        self.found.append(Mutant(self.file, line, end_line, kind, begin, end, column, before, after))

    def _replace(self, kind: str, node: ast.expr | ast.stmt, after: str) -> None:
        self._add(kind, *self._span(node), after)

    def _operator_span(self, left: ast.expr, right: ast.expr) -> tuple[int, int]:
        """Return the span of the operator between two operands, without parentheses and spaces around it."""
        begin, end = self._span(left)[1], self._span(right)[0]
        between = self.source[begin:end]
        stripped = between.strip(b" \t\n()\\")
        offset = between.index(stripped)
        return begin + offset, begin + offset + len(stripped)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in _NOT_MUTATED:
            return
        for statement in node.body:  # its decorators, defaults and annotations stay as they are
            self.visit(statement)

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

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in self._text(node.test):
            return
        self._invert(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        """Leave the condition itself alone: with most mistakes in it the loop would never end."""
        for statement in node.body:
            self.visit(statement)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._invert(node.test)
        self.generic_visit(node)

    def _invert(self, test: ast.expr) -> None:
        is_one_comparison = isinstance(test, ast.Compare) and len(test.ops) == 1
        if not is_one_comparison:  # `visit_Compare` changes that
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
        builds_text = _is_text(node.left) or _is_text(node.right)
        if other is not None and not builds_text:
            self._add("operator changed", *self._operator_span(node.left, node.right), other)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace("constant changed", node, str(not node.value))
        elif isinstance(node.value, int) and node.value < _LARGE:
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
        is_false_already = isinstance(value, ast.Constant) and not value.value  # False, 0 and "" are asked like None
        if value is not None and not is_false_already:
            self._replace("returns nothing", node, "return None")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self._text(node.func)
        if called in _FOR_TESTS:
            return
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in _WITHOUT_EFFECT:
                self._drop(keyword)
        function = called.rpartition(".")[2]
        has_starred = any(isinstance(each, ast.Starred) for each in node.args)
        if len(node.args) >= 2 and not has_starred and function not in _ORDER_DOES_NOT_MATTER:
            self._swap(node.args[0], node.args[1])
        self.generic_visit(node)

    def _swap(self, first: ast.expr, second: ast.expr) -> None:
        first_begin, first_end = self._span(first)
        second_begin, second_end = self._span(second)
        between = self.source[first_end:second_begin].decode()
        self._add("arguments swapped", first_begin, second_end, self._text(second) + between + self._text(first))

    def _drop(self, keyword: ast.keyword) -> None:
        """Drop a keyword argument with the comma that separates it."""
        begin, end = self._span(keyword)
        following = self.source[end:].lstrip(b" \n")
        if following.startswith(b","):  # f(a=1, b=2): the comma after a
            end = len(self.source) - len(following) + 1
        else:  # f(x, a=1): the comma before a
            preceding = self.source[:begin].rstrip(b" \n")
            if preceding.endswith(b","):
                begin = len(preceding) - 1
        self._add("argument dropped", begin, end, "")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_tuning(statement: ast.stmt) -> bool:
    """Say whether a statement of a module gives a name to a number, such as a size or a time chosen by measuring."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    is_constant = all(isinstance(target, ast.Name) and target.id.isupper() for target in targets)
    is_flag = isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, bool)
    return is_constant and not is_flag and isinstance(statement.value, (ast.Constant, ast.BinOp))


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
