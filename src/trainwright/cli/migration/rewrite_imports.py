"""Rewriting of a program's imports of Lightning and Accelerate, and of the uses of the imported names.

Other names, strings, comments and layout do not change. Names without a counterpart are reported, not changed.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainwright.cli.migration.counterparts import (
    advice,
    counterpart,
    instead,
    is_module,
    longest_counterpart,
    module_in_use,
    own_object,
)
from trainwright.cli.migration.old_uses import imports_of_face, report_old_uses
from trainwright.cli.migration.program import FACE, Import, Program, Unsettled, annotations_of, roots
from trainwright.core.names.foreign_names import LIBRARIES

_PATH = re.compile(rf"(?:{'|'.join(LIBRARIES)})(?:\.\w+)+")
_ADVANCES = (
    "schedule_steps='per_process' is added: a schedule then advances once for each process and step, as in Accelerate. "
    "Without it, a schedule advances once for each step."
)
_CLOSING = re.compile(rb"(?:(?:[\s\\]|#.*\n)*\))*")  # closing parentheses, with space and comments before each
_ONLY_NONE = ("plugins", "model_registry")  # arguments of Lightning's Trainer that are accepted only as None


@dataclass
class Rewritten:
    """Result of a rewrite.

    Attributes:
        code: The new source code.
        unsettled: The remaining manual changes, sorted by line.
        added: Arguments that the rewrite has added, with the reason. They need no change.
    """

    code: bytes
    unsettled: list[Unsettled] = field(default_factory=list)
    added: list[Unsettled] = field(default_factory=list)


def rewrite(code: bytes) -> Rewritten:
    """Rewrite one program.

    Raises:
        SyntaxError: the program is not valid Python.
        UnicodeDecodeError: the bytes are not text in the program's encoding.
    """
    encoding = tokenize.detect_encoding(io.BytesIO(code).readline)[0]
    try:
        program = Program(code.decode(encoding))
        rewriter = _Rewriter(program)
        rewriter.rewrite()
    except SyntaxError as error:
        raise SyntaxError(f"line {error.lineno}: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise SyntaxError("an expression is nested too deeply for the parser") from None
    text = program.edited()
    if program.edits:
        text = _without_equal_fallbacks(text)
    first_of_text: dict[str, Unsettled] = {}  # a name that is used often is reported once
    for each in sorted(program.unsettled):
        first_of_text.setdefault(each.text, each)
    return Rewritten(text.encode(encoding), list(first_of_text.values()), sorted(rewriter.added))


@dataclass(frozen=True)
class _NewName:
    """A name that a rewritten import statement binds: `from trainwright import TaskModule as Net` binds `Net`."""

    path: str | None  # dotted name in Trainwright, `trainwright.TaskModule`; None without a counterpart
    local: str  # the bound name, `Net`


@dataclass(frozen=True)
class _Module:
    """An imported module of another library: `import lightning.pytorch.callbacks as cb`."""

    path: str  # its dotted name, `lightning.pytorch.callbacks`
    base: str  # dotted name of its counterpart, `trainwright.callbacks`; `trainwright` if it has none
    local: str  # its name in the rewritten program, `cb`


class _Rewriter:
    """The edits and manual changes of one program.

    Edits of a program must not overlap. Each method therefore replaces the smallest piece of text: a name, one alias of
    an import or the word of a keyword, but never an expression that contains a name that another method may replace.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.added: set[Unsettled] = set()
        self._plain_imports: set[tuple[ast.AST, str]] = set()  # (parent, its field) with an `import trainwright`

    def rewrite(self) -> None:
        """Find the edits and the manual changes."""
        uses = self._uses()
        counterparts: dict[Import, str | None] = {}  # dotted names in Trainwright, None without a counterpart
        for each, chains in uses.items():
            counterparts[each] = counterpart(each.path) or module_in_use(each.path, chains)
        names = self._new_names(counterparts)
        trainers: set[str] = set()  # the program's variables with a Trainer, as text: `trainer`, `self.trainer`
        for each, chains in uses.items():
            for chain in chains:
                trainers |= self._change_use(each, chain, counterparts[each], names[each.local])
        # One statement may import several names.
        statements: dict[ast.Import | ast.ImportFrom, dict[ast.alias, _NewName]] = {}
        for each in uses:
            statements.setdefault(each.node, {})[each.alias] = _NewName(counterparts[each], names[each.local])
        for statement, aliases in statements.items():
            self._change_import(statement, aliases)
        self._report_stars()
        if uses:
            self._rename_arguments()
        modules: dict[str, _Module] = {}  # local name → the imported module
        for each, path in counterparts.items():
            if isinstance(each.node, ast.Import) or (path is not None and is_module(path)):
                modules[each.local] = _Module(each.path, path or FACE, names[each.local])
        self._settle_strings(modules)
        # A later run still reports what the first one has left to the user.
        if uses or imports_of_face(self.program):
            report_old_uses(self.program, trainers)

    def _uses(self) -> dict[Import, list[list[Any]]]:
        """Return the imports of the other libraries, each with the chains of attribute accesses on its name.

        A name that two imports bind, as in the branches of an `if`, is a use of both.
        """
        uses: dict[Import, list[list[Any]]] = {}
        for scope in self.program.scopes:
            for nodes in scope.bound.values():
                for each in nodes:
                    if isinstance(each, Import):
                        uses[each] = []
        for name, scope in self.program.reads:
            binding = scope.lookup(name.id)
            if binding is None:
                continue
            for each in binding.bound[name.id]:
                if isinstance(each, Import):
                    uses[each].append(self.program.chain(name))
        return uses

    def _report_stars(self) -> None:
        for node in ast.walk(self.program.tree):
            if not isinstance(node, ast.ImportFrom) or node in self.program.kept:
                continue
            if node.names[0].name == "*" and roots(node) & set(LIBRARIES):
                self.program.report(node, f"from {node.module} import *: name what you use.")

    def _new_names(self, counterparts: dict[Import, str | None]) -> dict[str, str]:
        """Return {local name: its name in the rewritten program}. A name that cannot be renamed keeps its old name."""
        bound: dict[str, list[Any]] = {}  # name → what binds it in any scope, as in `Scope.bound`
        for scope in self.program.scopes:
            for name, nodes in scope.bound.items():
                bound.setdefault(name, []).extend(nodes)
        fixed = self._fixed_names()
        names: dict[str, str] = {}
        for local in dict.fromkeys(each.local for each in counterparts):
            nodes = bound[local]
            new_name = _common_name(local, nodes, counterparts)
            is_free = new_name not in bound and new_name not in names.values()
            if new_name == FACE:
                # `import lightning` without an alias: the `lightning` in its uses is rewritten in any case. Several
                # `import trainwright` may bind the same name.
                can_rename = is_free or all(isinstance(node, ast.Import) for node in bound.get(FACE, ()))
            else:
                can_rename = is_free and local not in fixed and not any(map(_is_exported, nodes))
            names[local] = new_name if can_rename else local
        return names

    def _fixed_names(self) -> set[str]:
        """Return the words that a rename of a variable would miss: in strings, type comments and class bodies."""
        words: set[str] = set()
        for _, text in self.program.strings:
            words |= set(re.findall(r"\w+", text))
        for comment in re.findall(r"#\s*type:(.*)", self.program.source.decode()):
            words |= set(re.findall(r"\w+", comment))
        for scope in self.program.scopes:
            if scope.is_class:  # `self.name` reads it, too, and is not among the program's reads of names
                words |= scope.bound.keys()
        return words

    def _change_use(self, each: Import, chain: Sequence[Any], imported: str | None, local: str) -> set[str]:
        """Rewrite the longest part of an expression such as `L.pytorch.LightningModule` that has a counterpart.

        If the expression is the call of a Trainer, return the variables to which the Trainer is assigned, as text.

        Args:
            each: the import of the first name.
            chain: the name and the attribute accesses on it.
            imported: dotted name of the import's counterpart, or None.
            local: new name of the import.
        """
        new_text = local if local != each.local else ""  # for the first name; `replace` keeps the old text for ""
        is_object = imported is not None and imported != FACE and not is_module(imported)
        if imported is not None and is_object:
            # `Trainer.from_argparse_args`: attributes of an imported class or function are not looked up.
            self.program.replace(chain[0], new_text)
            return self._check_call(chain[0], imported)
        attributes = [node.attr for node in chain[1:]]
        base = imported or FACE
        found = longest_counterpart(each.path, attributes, base)
        if found is not None:
            self.program.replace(chain[found.length], local + found.path.removeprefix(base))
            return self._check_call(chain[found.length], found.path)
        self.program.replace(chain[0], new_text)
        if not attributes and imported is not None:
            self.program.report(chain[0], f"the module {each.local} is used as an object; check its attributes.")
        else:
            self.program.report(chain[0], advice(".".join([each.path, *attributes])))
        return set()

    def _check_call(self, node: ast.expr, path: str) -> set[str]:
        """Report arguments that a called counterpart lacks. Return the variables to which a new Trainer is assigned.

        An expression that is not called returns an empty set.

        Args:
            node: the expression, such as `L.Trainer` in `L.Trainer(devices=2)`.
            path: dotted name of its counterpart.
        """
        call = self.program.parents[node]
        if not isinstance(call, ast.Call) or call.func is not node:
            return set()
        try:
            parameters = inspect.signature(own_object(path)).parameters
        except (TypeError, ValueError):  # not callable, or implemented in C without a signature
            return set()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for keyword in call.keywords:
            name = keyword.arg
            if name is None:  # `**options`
                continue
            if path == "trainwright.Trainer" and name in _ONLY_NONE:
                if ast.unparse(keyword.value) != "None":
                    self.program.report(keyword, f"{path} takes only {name}=None{instead(path, name)}")
            elif not takes_all and name not in parameters:
                self.program.report(keyword, f"{path} has no argument {name!r}{instead(path, name)}")
        if path == "trainwright.Accelerator":
            self._keep_advances(call)
        if path != "trainwright.Trainer":
            return set()
        statement = self.program.parents[call]
        if isinstance(statement, ast.Assign):
            return {ast.unparse(target) for target in statement.targets}
        if isinstance(statement, ast.AnnAssign):
            return {ast.unparse(statement.target)}
        return set()

    def _keep_advances(self, call: ast.Call) -> None:
        """Add `schedule_steps="per_process"`, with which a prepared schedule advances as often as in Accelerate.

        Programs that never mention a schedule do not need it. Calls that pass it stay. Those with `**options`, which
        may contain it, are reported.
        """
        arguments = [keyword.arg for keyword in call.keywords]  # None for `**options`
        if "schedule_steps" in arguments or b"sched" not in self.program.source.lower():
            return
        if None in arguments:
            self.program.report(
                call, "with several processes, schedules need Accelerator(schedule_steps='per_process')."
            )
            return
        passed: list[Any] = [*call.args, *call.keywords]
        text = 'schedule_steps="per_process"'
        if passed:
            argument_end = max(self.program.span(each)[1] for each in passed)
            call_end = self.program.span(call)[1] - 1  # position of the call's closing parenthesis
            # The span of `True` in `Accelerator((True))` ends before its own parenthesis, which must come first.
            parentheses = _CLOSING.match(self.program.source[argument_end:call_end])
            assert parentheses is not None  # it also matches nothing
            position = argument_end + parentheses.end()
            text = f", {text}"
        else:
            position = self.program.source.index(b"(", self.program.span(call.func)[1]) + 1
        self.program.edits[position, position] = text
        self.added.add(Unsettled(call.lineno, _ADVANCES))

    def _change_import(self, node: ast.Import | ast.ImportFrom, new_names: dict[ast.alias, _NewName]) -> None:
        """Rewrite an import statement. It becomes several if its names are in several modules of Trainwright."""
        if isinstance(node, ast.Import):
            self._change_plain_import(node, new_names)
            return
        original = str(node.module)
        imported: dict[str, list[str]] = {}  # module → names: {"trainwright.callbacks": ["Timer", "Callback as CB"]}
        for alias in node.names:
            new = new_names.get(alias)
            if new is None or new.path is None:
                self.program.report(alias, advice(f"{node.module}.{alias.name}"))
                imported.setdefault(original, []).append(ast.unparse(alias))
                continue
            # `from lightning import pytorch as pl` becomes `import trainwright as pl`: its module is "".
            module, _, name = new.path.rpartition(".")
            imported.setdefault(module, []).append(_written(name, new.local, keep=alias.name == alias.asname))
        if list(imported) == [original]:  # only names without a counterpart
            return
        if len(imported) == 1 and "" not in imported:
            ((module, names),) = imported.items()
            self._edit_import(node, module, names)
            return
        # From here on, the statement is replaced as a whole.
        if original in imported:  # the names without a counterpart come last
            imported[original] = imported.pop(original)
        statements: list[str] = []
        for module, names in imported.items():
            prefix = f"from {module} " if module else ""
            statements.append(f"{prefix}import {', '.join(names)}")
        self._report_comments(node)
        before, after = self.program.around(node)
        shares_line = before.strip() or after.strip()[:1] == b";"
        separator = "; " if shares_line else self.program.newline + before.decode()
        self.program.replace(node, separator.join(statements))

    def _edit_import(self, node: ast.ImportFrom, module: str, names: Sequence[str]) -> None:
        """Replace the module and the names of an import, and keep its layout and comments."""
        begin, end = self.program.span(node)
        match = re.match(rb"from[\s\\]+([\w.]+)", self.program.source[begin:end])
        assert match is not None
        self.program.edits[begin + match.start(1), begin + match.end(1)] = module
        for alias, name in zip(node.names, names, strict=True):
            self.program.replace(alias, name)

    def _report_comments(self, node: ast.ImportFrom) -> None:
        """Report the comments inside a statement that is replaced as a whole."""
        begin, end = self.program.span(node)
        for number, line in enumerate(self.program.source[begin:end].decode().split("\n"), node.lineno):
            if "#" in line:
                comment = line[line.index("#") :].rstrip()
                text = f"the comment {comment!r} next to it was removed by the rewrite."
                self.program.unsettled.add(Unsettled(number, text))

    def _change_plain_import(self, node: ast.Import, new_names: dict[ast.alias, _NewName]) -> None:
        """Rewrite `import lightning.pytorch as pl`, or `import lightning.pytorch`, which binds `lightning`."""
        for alias, new in new_names.items():
            path = new.path
            # Without an alias, `path` is that of the top package. The imported module may still have no counterpart.
            if alias.asname is None and counterpart(alias.name) is None:
                path = None
            if path is None:
                self.program.report(node, advice(alias.name))
            elif alias.asname:
                self.program.replace(alias, _written(path, alias.asname, keep=False))
            else:
                self.program.replace(alias, _written(FACE, new.local, keep=False))
        text = self.program.edits.get(self.program.span(node.names[0]))
        before, after = self.program.around(node)
        is_alone = len(node.names) == 1 and not before.strip() and not after.strip()
        if text == FACE and is_alone:
            self._drop_second_import(node)

    def _drop_second_import(self, node: ast.Import) -> None:
        """Delete the line of an `import trainwright` if its block has one already.

        `import lightning` and `import accelerate` both become `import trainwright`.
        """
        parent = self.program.parents[node]
        # A statement is in exactly one of the lists of its parent, such as the `body` or the `orelse` of an `if`.
        lists = [name for name, value in ast.iter_fields(parent) if isinstance(value, list) and node in value]
        block = (parent, lists[0])
        if block in self._plain_imports:
            del self.program.edits[self.program.span(node.names[0])]  # it is inside the lines that are deleted
            self.program.edits[self.program.lines_of(node)] = ""  # an edit itself, unlike `replace`, may delete text
        self._plain_imports.add(block)

    def _settle_strings(self, modules: dict[str, _Module]) -> None:
        """Report strings that are paths of the other libraries, and rewrite annotations in quotes.

        Args:
            modules: local name → module of the other library.
        """
        types: set[ast.AST] = set()
        for node in ast.walk(self.program.tree):
            for annotation in annotations_of(node):
                types |= set(_types_in(annotation))
        for node, text in self.program.strings:
            names_with_attributes = set(re.findall(r"\b(\w+)\.", text))  # `L` in "list[L.LightningModule]"
            if node in types and names_with_attributes & modules.keys():
                self._rewrite_quoted(node, modules)
            elif _PATH.fullmatch(text):
                path = counterpart(text)
                hint = advice(text) if path is None else f"is {path} here."
                self.program.report(node, f"the text {text!r} names another library: {hint}")

    def _rewrite_quoted(self, node: ast.expr, modules: dict[str, _Module]) -> None:
        """Rewrite the names of the other libraries in an annotation in quotes, such as `"L.LightningModule"`."""

        def rewritten(match: re.Match[str]) -> str:
            name, *attributes = match[0].split(".")
            module = modules.get(name)
            if module is None:
                return match[0]
            found = longest_counterpart(module.path, attributes, module.base)
            if found is None:
                path = ".".join([module.path, *attributes])
                self.program.report(node, f"the annotation in quotes: {advice(path)}")
                return match[0]
            rest = attributes[found.length :]
            return ".".join([module.local + found.path.removeprefix(module.base), *rest])

        begin, end = self.program.span(node)
        text = self.program.source[begin:end].decode()
        self.program.replace(node, re.sub(r"(?<![\w.])\w+(?:\.\w+)+", rewritten, text))

    def _rename_arguments(self) -> None:
        """Rename the argument `pl_module=` in calls such as `super().on_train_end(trainer, pl_module=pl_module)`."""
        for node in ast.walk(self.program.tree):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("super()."):
                continue
            for keyword in node.keywords:
                if keyword.arg == "pl_module":
                    # Only the word: the value may contain names that are replaced, too.
                    begin = self.program.span(keyword)[0]
                    self.program.edits[begin, begin + len("pl_module")] = "task"


def _plain_name(each: Import, path: str | None) -> str:
    """Return the local name that the rewritten import binds: an alias, or the last part of the counterpart's path."""
    if isinstance(each.node, ast.Import):
        return FACE if each.local in LIBRARIES else each.local
    if path is None or each.alias.asname:
        return each.local
    return path.rpartition(".")[2]


def _common_name(local: str, nodes: Sequence[Any], counterparts: dict[Import, str | None]) -> str:
    """Return the name that all rewritten statements would bind instead of `local`, or `local` if they differ."""
    candidates: set[str] = set()
    for node in nodes:
        candidates.add(_plain_name(node, counterparts[node]) if isinstance(node, Import) else local)
    return candidates.pop() if len(candidates) == 1 else local


def _is_exported(node: object) -> bool:
    """Return whether a statement exports the name: type checkers read `import a as a` so."""
    return isinstance(node, Import) and node.alias.asname == node.alias.name


def _written(name: str, local: str, *, keep: bool) -> str:
    """Return the text of an alias: `name`, or `name as local`. `keep` writes `a as a` for equal names."""
    return name if name == local and not keep else f"{name} as {local}"


def _types_in(annotation: ast.expr) -> Iterator[ast.AST]:
    """Yield the nodes of an annotation that are types: no values of `Literal`, no metadata of `Annotated`."""
    yield annotation
    if isinstance(annotation, ast.Subscript):
        name = ast.unparse(annotation.value).rpartition(".")[2]
        if name == "Literal":
            return
        if name == "Annotated" and isinstance(annotation.slice, ast.Tuple):
            yield from _types_in(annotation.slice.elts[0])
            return
    for child in ast.iter_child_nodes(annotation):
        if isinstance(child, ast.expr):
            yield from _types_in(child)


def _without_equal_fallbacks(text: str) -> str:
    """Return the program with each `try: import a / except ImportError: import a` replaced by `import a`.

    Programs import from `lightning` and fall back on `pytorch_lightning`. After the rewrite, both imports are equal.
    """
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Try) or not _has_equal_fallback(node):
            continue
        before = ast.get_source_segment(text, node) or ""
        if "#" in before:  # a comment would be lost
            continue
        lines = [ast.unparse(statement) for statement in node.body]
        after = f"\n{' ' * node.col_offset}".join(lines)
        # Positions behind the replaced text are invalid now, so parse again.
        return _without_equal_fallbacks(text.replace(before, after, 1))
    return text


def _has_equal_fallback(node: ast.Try) -> bool:
    """Return whether a `try` imports from Trainwright, and does the same if the import fails."""
    if len(node.handlers) != 1 or node.orelse or node.finalbody:
        return False
    fallback = node.handlers[0]
    if fallback.name or fallback.type is None:
        return False
    if ast.unparse(fallback.type) not in ("ImportError", "ModuleNotFoundError"):
        return False
    if not all(FACE in roots(statement) for statement in node.body):
        return False
    return [ast.unparse(each) for each in node.body] == [ast.unparse(each) for each in fallback.body]
