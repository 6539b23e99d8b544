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
from importlib import import_module
from typing import Any

from trainwright.core.hooks import REMOVED_HOOKS
from trainwright.core.names.foreign_names import LIBRARIES, answer, canonical, own_module, own_name

FACE = "trainwright"
_PATH = re.compile(rf"(?:{'|'.join(LIBRARIES)})(?:\.\w+)+")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FOLDER = "a checkpoint is a folder here: load_from_checkpoint of your task reads it, torch.load does not."
_EXTENSION = "the name of a checkpoint has no .ckpt at its end here, unless save_checkpoint(path) has named it."
_ADVANCES = (
    "schedule_steps='per_process' is added: a schedule then advances once for each process and step, as in Accelerate. "
    "Without it, a schedule advances once for each step."
)
_SEARCHES = ("endswith", "glob", "rglob", "iglob", "fnmatch", "filter")
_OPTIMIZER_IDX = (
    "optimizer_idx is of Lightning 1: a step is called once for a batch. Set automatic_optimization = False, and step "
    "the optimizers of self.optimizers() in training_step."
)
_MAIN_ONLY = re.compile(r"\bis_(?:local_)?main_process\b")
_SAVE_ON_MAIN = (
    "save_state on the main process alone writes replicated weights only, without the generators of the other "
    "processes. Call it on every process."
)
_ONLY_NONE = ("plugins", "model_registry")  # arguments of Lightning's Trainer that are accepted only as None
_TOP = ("lightning", "lightning.pytorch", "accelerate", "accelerate.utils")


@dataclass(frozen=True, order=True)
class Unsettled:
    """Manual change that the user must make: a 1-based line number and an instruction."""

    line: int
    text: str


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
    """
    encoding = tokenize.detect_encoding(io.BytesIO(code).readline)[0]
    try:
        program = _Program(code.decode(encoding))
        program.rewrite()
    except SyntaxError as error:
        raise SyntaxError(f"line {error.lineno}: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise SyntaxError("an expression is nested too deeply for the parser") from None
    text = _without_equal_fallbacks(program.edited()) if program.edits else program.edited()
    first: dict[str, Unsettled] = {}  # a name that is used often is reported once
    for each in sorted(program.unsettled):
        first.setdefault(each.text, each)
    return Rewritten(text.encode(encoding), list(first.values()), sorted(program.added))


@dataclass(eq=False)
class _Scope:
    """Names that are bound in a module, class, function or comprehension, each with the nodes that bind it."""

    parent: _Scope | None
    is_class: bool = False
    bound: dict[str, list[Any]] = field(default_factory=dict)
    outer: set[str] = field(default_factory=set)  # declared global or nonlocal

    def bind(self, name: str, node: object) -> None:
        """Record that a node binds a name."""
        if name in self.outer and self.parent is not None:
            self.parent.bind(name, node)
        else:
            self.bound.setdefault(name, []).append(node)

    def lookup(self, name: str) -> _Scope | None:
        """Return the scope that binds a name read in this scope, or None for a builtin."""
        scope: _Scope | None = self
        while scope is not None and (name not in scope.bound or (scope.is_class and scope is not self)):
            scope = scope.parent
        return scope


@dataclass(frozen=True, eq=False)
class _Import:
    """A name that an import statement imports from Lightning or Accelerate."""

    node: ast.Import | ast.ImportFrom
    alias: ast.alias
    local: str
    path: str  # dotted name in Lightning or Accelerate of the local name


class _Program:
    """One program, its scopes, and the edits of its text."""

    def __init__(self, text: str) -> None:
        self.source = text.encode()
        self.tree = ast.parse(text)
        self.starts = [0, *(match.end() for match in re.finditer(rb"\r\n?|\n", self.source))]
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.edits: dict[tuple[int, int], str] = {}
        self.unsettled: set[Unsettled] = set()
        self.added: set[Unsettled] = set()
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.scopes: list[_Scope] = []
        self.reads: list[tuple[ast.Name, _Scope]] = []
        self.kept = {
            each
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Try) and any(FACE in _roots(each) for each in ast.walk(node))
            for each in ast.walk(node)
        }
        self._visit(self.tree, self._scope(None))
        self.strings = [
            (node, node.value)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Constant)
            if isinstance(node.value, str) and not isinstance(self.parents[node], ast.Expr)
        ]
        self.block_texts: set[tuple[int, str]] = set()

    def _scope(self, parent: _Scope | None, is_class: bool = False) -> _Scope:
        self.scopes.append(_Scope(parent, is_class))
        return self.scopes[-1]

    def _visit(self, node: ast.AST, scope: _Scope) -> None:
        """Record the names that a node and its descendants bind and read."""
        inner = scope
        if isinstance(node, (ast.ClassDef, *_FUNCTIONS, *_COMPREHENSIONS)):
            inner = self._scope(scope, isinstance(node, ast.ClassDef))
            for each in ast.walk(node):
                if isinstance(each, (ast.Global, ast.Nonlocal)):
                    inner.outer.update(each.names)
        if isinstance(node, _NAMED) and node.name:
            scope.bind(node.name, node)
        elif isinstance(node, ast.arg):
            scope.bind(node.arg, node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            self.reads.append((node, scope))
        elif isinstance(node, ast.Name):
            scope.bind(node.id, node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                scope.bind(alias.asname or _root(alias.name), self._as_import(node, alias) or node)
        outside = (
            [*getattr(node, "decorator_list", []), *getattr(node, "bases", []), *getattr(node, "keywords", [])]
            if inner.is_class or isinstance(node, _FUNCTIONS)
            else []
        )
        if isinstance(node, _FUNCTIONS):
            outside += [*node.args.defaults, *filter(None, node.args.kw_defaults), *_annotations(node)]
        for child in outside:
            self._visit(child, scope)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.arguments):
                for arg in ast.walk(child):
                    if isinstance(arg, ast.arg) and self.parents[arg] is child:
                        inner.bind(arg.arg, arg)
            elif child not in outside:
                self._visit(child, inner)

    def _as_import(self, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> _Import | None:
        """Return the import of Lightning or Accelerate, or None for any other import."""
        if node in self.kept or not _roots(node) & set(LIBRARIES) or alias.name == "*":
            return None
        if isinstance(node, ast.ImportFrom):
            return _Import(node, alias, alias.asname or alias.name, f"{node.module}.{alias.name}")
        if _root(alias.name) not in LIBRARIES:
            return None
        path = alias.name if alias.asname else _root(alias.name)
        return _Import(node, alias, alias.asname or path, path)

    # Deciding

    def rewrite(self) -> None:
        """Find the edits and the manual changes."""
        uses: dict[_Import, list[list[Any]]] = {}
        for scope in self.scopes:
            uses |= {each: [] for nodes in scope.bound.values() for each in nodes if isinstance(each, _Import)}
        for name, scope in self.reads:
            home = scope.lookup(name.id)
            for each in home.bound[name.id] if home is not None else ():
                if isinstance(each, _Import):
                    uses[each].append(self._chain(name))
        own = {each: counterpart(each.path) or _own_module(each.path, chains) for each, chains in uses.items()}
        names = self._new_names(own)
        trainers: set[str] = set()
        for each, chains in uses.items():
            for chain in chains:
                trainers |= self._change_use(each, chain, own[each], names[each.local])
        for statement in dict.fromkeys(each.node for each in uses):
            aliases = {each.alias: (own[each], names[each.local]) for each in uses if each.node is statement}
            self._change_import(statement, aliases)
        for node in ast.walk(self.tree):
            star = isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node not in self.kept
            if isinstance(node, ast.ImportFrom) and star and _roots(node) & set(LIBRARIES):
                self._report(node, f"from {node.module} import *: name what you use.")
        if uses:
            self._rename_arguments()
        self._settle_strings({each.local: each.path for each in uses if isinstance(each.node, ast.Import)}, names)
        migrated = self._imports_of_face()
        if uses or migrated:  # a later run still reports what the first one has left to the user
            self._report_old_code()
            self._report_trainers(trainers | self._new_trainers(migrated))
            self._report_files()

    def _chain(self, name: ast.Name) -> list[Any]:
        """Return a name and the attribute accesses on it: `L`, `L.callbacks`, `L.callbacks.Timer`."""
        chain: list[Any] = [name]
        while isinstance(above := self.parents[chain[-1]], ast.Attribute):
            chain.append(above)
        return chain

    def _new_names(self, own: dict[_Import, str | None]) -> dict[str, str]:
        """Return the new name of each local name. Names in strings, or bound by other statements, do not change."""
        words = {word for _, text in self.strings for word in re.findall(r"\w+", text)}
        words |= set(re.findall(r"\w+", " ".join(re.findall(r"#\s*type:(.*)", self.source.decode()))))
        words |= {name for scope in self.scopes if scope.is_class for name in scope.bound}
        bound = [(name, node) for scope in self.scopes for name, nodes in scope.bound.items() for node in nodes]
        taken = {name for name, _ in bound}
        names: dict[str, str] = {}
        for local in dict.fromkeys(each.local for each in own):
            nodes = [node for name, node in bound if name == local]
            new = {_plain_name(node, own[node]) if isinstance(node, _Import) else local for node in nodes}
            exported = any(isinstance(node, _Import) and node.alias.asname == node.alias.name for node in nodes)
            (wanted,) = new if len(new) == 1 else (local,)
            free = wanted not in taken and wanted not in names.values()
            if wanted == FACE:  # `import lightning` without an alias: its uses are rewritten in any case
                safe = free or all(isinstance(node, ast.Import) for name, node in bound if name == FACE)
            else:
                safe = free and local not in words and not exported
            names[local] = wanted if safe else local
        return names

    # Changing

    def _change_use(self, each: _Import, chain: Sequence[Any], own: str | None, local: str) -> set[str]:
        """Rewrite the longest part of an expression such as `L.pytorch.LightningModule` that has a counterpart.

        If the expression is the call of a Trainer, return the variables to which the Trainer is assigned, as text.
        """
        if own is not None and own != FACE and not is_module(own):
            self._replace(chain[0], local if local != each.local else "")
            return self._check_call(chain[0], own)
        words = [node.attr for node in chain[1:]]
        base = own or FACE
        for length in range(len(words), 0, -1):
            found = counterpart(".".join([each.path, *words[:length]]))
            if found is None:
                continue
            if f"{found}.".startswith(f"{base}.") and not (is_module(found) and length < len(words)):
                self._replace(chain[length], local + found.removeprefix(base))
                return self._check_call(chain[length], found)
            break
        self._replace(chain[0], local if local != each.local else "")
        if not words and own is not None:
            self._report(chain[0], f"the module {each.local} is used as an object; check its attributes.")
        else:
            self._report(chain[0], advice(".".join([each.path, *words])))
        return set()

    def _check_call(self, node: ast.expr, own: str) -> set[str]:
        """Report keyword arguments that the counterpart lacks. Return the variables that receive a new Trainer."""
        call = self.parents[node]
        if not isinstance(call, ast.Call) or call.func is not node:
            return set()
        try:
            parameters = inspect.signature(own_object(own)).parameters
        except (TypeError, ValueError):
            return set()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for keyword in call.keywords:
            name = keyword.arg
            if name is None:
                continue
            if own == "trainwright.Trainer" and name in _ONLY_NONE:
                if ast.unparse(keyword.value) != "None":
                    self._report(keyword, f"{own} takes only {name}=None{instead(own, name)}")
            elif not takes_all and name not in parameters:
                self._report(keyword, f"{own} has no argument {name!r}{instead(own, name)}")
        if own == "trainwright.Accelerator":
            self._keep_advances(call)
        above = self.parents[call]
        if own != "trainwright.Trainer" or not isinstance(above, (ast.Assign, ast.AnnAssign)):
            return set()
        return set(map(ast.unparse, above.targets if isinstance(above, ast.Assign) else [above.target]))

    def _keep_advances(self, call: ast.Call) -> None:
        """Add `schedule_steps="per_process"`, with which a prepared schedule advances as often as in Accelerate.

        Programs that never mention a schedule do not need it. Calls that pass it stay. Those with `**options`, which
        may contain it, are reported.
        """
        given = [keyword.arg for keyword in call.keywords]
        if "schedule_steps" in given or b"sched" not in self.source.lower():
            return
        if None in given:
            self._report(call, "with several processes, schedules need Accelerator(schedule_steps='per_process').")
            return
        passed: list[Any] = [*call.args, *call.keywords]
        ends = [self._span(each)[1] for each in passed]
        place = max(ends) if ends else self.source.index(b"(", self._span(call.func)[1]) + 1
        self.edits[place, place] = (", " if ends else "") + 'schedule_steps="per_process"'
        self.added.add(Unsettled(call.lineno, _ADVANCES))

    def _change_import(self, node: ast.Import | ast.ImportFrom, own: dict[ast.alias, tuple[str | None, str]]) -> None:
        if isinstance(node, ast.Import):
            self._change_plain_import(node, own)
            return
        made: dict[str, list[str]] = {}  # module → names
        for alias in node.names:
            path, local = own.get(alias, (None, ""))
            if path is None:
                self._report(alias, advice(f"{node.module}.{alias.name}"))
                made.setdefault(str(node.module), []).append(ast.unparse(alias))
                continue
            module, _, name = path.rpartition(".")
            made.setdefault(module, []).append(_written(name, local, keep=alias.name == alias.asname))
        if list(made) == [node.module]:
            return
        if len(made) == 1 and "" not in made:  # keep the layout
            ((module, names),) = made.items()
            begin, end = self._span(node)
            place = re.match(rb"from[\s\\]+([\w.]+)", self.source[begin:end])
            assert place is not None
            self.edits[begin + place.start(1), begin + place.end(1)] = module
            for alias, name in zip(node.names, names, strict=True):
                self._replace(alias, name)
            return
        made |= {str(node.module): made.pop(str(node.module))} if str(node.module) in made else {}  # the last one
        statements = [
            f"from {module} import {', '.join(names)}" if module else f"import {', '.join(names)}"
            for module, names in made.items()
        ]
        begin, end = self._span(node)
        for number, line in enumerate(self.source[begin:end].decode().split("\n"), node.lineno):
            if "#" in line:
                comment = line[line.index("#") :].rstrip()
                self.unsettled.add(Unsettled(number, f"the comment {comment!r} next to it was removed by the rewrite."))
        before, after = self._around(node)
        separator = "; " if before.strip() or after.strip()[:1] == b";" else self.newline + before.decode()
        self._replace(node, separator.join(statements))

    def _change_plain_import(self, node: ast.Import, own: dict[ast.alias, tuple[str | None, str]]) -> None:
        for alias in own:
            path, local = own[alias]
            if alias.asname is None and counterpart(alias.name) is None:
                path = None
            if path is None:
                self._report(node, advice(alias.name))
                continue
            self._replace(alias, _written(path if alias.asname else FACE, alias.asname or local, keep=False))
        text = self.edits.get(self._span(node.names[0]))
        before, after = self._around(node)
        if len(node.names) == 1 and text == FACE and not before.strip() and not after.strip():
            blocks = [each for each in vars(self.parents[node]).values() if isinstance(each, list)]
            siblings = next(each for each in blocks if node in each)
            if (id(siblings), text) in self.block_texts:  # this block has the import already
                del self.edits[self._span(node.names[0])]
                self.edits[self.starts[node.lineno - 1], self.starts[node.end_lineno or node.lineno]] = ""
            self.block_texts.add((id(siblings), text))

    def _replace(self, node: object, text: str) -> None:
        begin, end = self._span(node)
        if text and self.source[begin:end].decode() != text:
            self.edits[begin, end] = text

    def _span(self, node: Any) -> tuple[int, int]:
        begin, end = self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1]
        return begin, end + node.end_col_offset

    def _around(self, node: ast.stmt) -> tuple[bytes, bytes]:
        """Return the text before a statement on its first line, and the text after it on its last line."""
        begin, end = self._span(node)
        return self.source[self.starts[node.lineno - 1] : begin], self.source[end:].split(b"\n", 1)[0]

    def edited(self) -> str:
        """Return the program's text with the edits."""
        code = self.source
        for (begin, end), text in sorted(self.edits.items(), reverse=True):
            code = code[:begin] + text.encode() + code[end:]
        return code.decode()

    # Reporting

    def _report(self, node: Any, text: str) -> None:
        self.unsettled.add(Unsettled(node.lineno, text))

    def _settle_strings(self, modules: dict[str, str], names: dict[str, str]) -> None:
        """Report strings that are paths of the other libraries, and rewrite annotations in quotes.

        Args:
            modules: local name → module of the other library.
            names: local name → name in the rewritten program.
        """
        annotations: set[ast.AST] = set()
        for node in ast.walk(self.tree):
            for annotation in _annotations(node):
                annotations |= set(_types_in(annotation))
        for node, text in self.strings:
            if node in annotations and set(re.findall(r"\b(\w+)\.", text)) & set(modules):
                self._rewrite_quoted(node, modules, names)
            elif _PATH.fullmatch(text):
                own = counterpart(text)
                hint = f"is {own} here." if own is not None else advice(text)
                self._report(node, f"the text {text!r} names another library: {hint}")

    def _rewrite_quoted(self, node: ast.expr, modules: dict[str, str], names: dict[str, str]) -> None:
        """Rewrite the names of the other libraries in an annotation in quotes, such as `"L.LightningModule"`."""

        def rewritten(match: re.Match[str]) -> str:
            local, rest = match.groups()
            if local not in modules:
                return match[0]
            found = counterpart(modules[local] + rest)
            if found is None:
                self._report(node, f"the annotation in quotes: {advice(modules[local] + rest)}")
                return match[0]
            return names[local] + found.removeprefix(FACE)

        begin, end = self._span(node)
        text = self.source[begin:end].decode()
        self._replace(node, re.sub(r"(?<![\w.])(\w+)((?:\.\w+)+)", rewritten, text))

    def _rename_arguments(self) -> None:
        """Rename the argument `pl_module=` in calls such as `super().on_train_end(trainer, pl_module=pl_module)`."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("super()."):
                continue
            for keyword in node.keywords:
                if keyword.arg == "pl_module":
                    self._replace(keyword, f"task={ast.unparse(keyword.value)}")

    def _report_old_code(self) -> None:
        """Report hooks and arguments of Lightning 1, and saves on the main process alone."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef) and isinstance(self.parents[node], ast.ClassDef):
                if any(argument.arg == "optimizer_idx" for argument in node.args.args):
                    self._report(node, _OPTIMIZER_IDX)
                if node.name in REMOVED_HOOKS:
                    self._report(node, f"{node.name}: {REMOVED_HOOKS[node.name]}")
            elif isinstance(node, ast.If) and _MAIN_ONLY.search(ast.unparse(node.test)):
                for call in (each for line in node.body for each in ast.walk(line)):
                    if isinstance(call, ast.Attribute) and call.attr == "save_state":
                        self._report(call, _SAVE_ON_MAIN)

    def _imports_of_face(self) -> dict[str, str]:
        """Return the local names that are imported from Trainwright, with their dotted names."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if not isinstance(node, (ast.Import, ast.ImportFrom)) or FACE not in _roots(node):
                continue
            for alias in node.names:
                if isinstance(node, ast.ImportFrom):
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                elif alias.asname is not None:
                    found[alias.asname] = alias.name
                else:
                    found[FACE] = FACE
        return found

    def _new_trainers(self, imported: dict[str, str]) -> set[str]:
        """Return the variables to which a Trainer of Trainwright is assigned, as text."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                local, _, rest = ast.unparse(node.value.func).partition(".")
                path = ".".join(filter(None, [imported.get(local), rest]))
                if local in imported and path in (f"{FACE}.Trainer", f"{FACE}.trainer.Trainer"):
                    found |= set(map(ast.unparse, node.targets))
        return found

    def _report_trainers(self, trainers: set[str]) -> None:
        """Report attributes of a Trainer that do not exist here.

        Any variable in the program to which a Trainer is assigned counts as a Trainer.
        """
        from trainwright.trainer.lightning_names import INTERNALS
        from trainwright.trainer.trainer import Trainer

        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            if node.attr in INTERNALS and not hasattr(Trainer, node.attr) and ast.unparse(node.value) in trainers:
                self._report(node, f"trainer.{node.attr} does not exist here: {INTERNALS[node.attr]}.")

    def _report_files(self) -> None:
        """Report reads of a checkpoint as a file, and searches for checkpoints by the extension of Lightning's files.

        Any variable in the program to which the path of a checkpoint is assigned counts as such a path.
        """
        paths: set[str] = set()
        saved: set[str] = set()  # the names of checkpoints that the program itself has chosen
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and _names_checkpoint(node.value, set()):
                paths |= set(map(ast.unparse, node.targets))
            elif isinstance(node, ast.Call) and _called(node) == "save_checkpoint":
                saved |= {text.rpartition("/")[2] for text in _extended_names(node)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                if any(_names_checkpoint(given, paths) for given in node.args):
                    self._report(node, _FOLDER)
                continue
            searched: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                searched = [node.left, *node.comparators]
            elif isinstance(node, ast.Call) and _called(node) in _SEARCHES:
                searched = node.args
            constants = [each for each in searched if isinstance(each, ast.Constant)]
            if any(set(_extended_names(each)) - saved for each in constants):
                self._report(node, _EXTENSION)


def counterpart(path: str) -> str | None:
    """Return Trainwright's dotted name for a dotted name of Lightning or Accelerate, or None if there is none.

    The counterpart of a library's top package is `trainwright`.
    """
    if canonical(path) in _TOP:
        return FACE
    if path.endswith(".__version__") and LIBRARIES[_root(path)] == "Lightning":
        return None  # Trainwright has the version of Accelerate's interface, but none of Lightning's
    return own_name(path)


def _called(call: ast.Call) -> str:
    """Return the last part of the name of a called function."""
    return ast.unparse(call.func).rpartition(".")[2]


def _extended_names(tree: ast.AST) -> list[str]:
    """Return the strings in an expression that end with the extension of Lightning's checkpoints."""
    texts = [each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and text.endswith(".ckpt")]


def _names_checkpoint(tree: ast.AST, paths: set[str]) -> bool:
    """Return whether an expression is, or is made of, the path of a checkpoint. `paths`: variables with such paths."""
    if isinstance(tree, ast.Call) and _called(tree) not in ("Path", "join", "str", "fspath", "format"):
        return False  # `Net.load_from_checkpoint("last.ckpt")` is a task
    if _extended_names(tree):
        return True
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute) and each.attr in ("best_model_path", "last_model_path"):
            return True
        if isinstance(each, (ast.Name, ast.Attribute)) and ast.unparse(each) in paths:
            return True
    return False


def _own_module(path: str, chains: Sequence[Sequence[Any]]) -> str | None:
    """Return the counterpart of an imported sub-module. None if no name that the program uses in it has one."""
    used = any(counterpart(f"{path}.{chain[1].attr}") for chain in chains if len(chain) > 1)
    return own_module(path) if used else None


def own_object(path: str) -> Any:
    """Import the object with a dotted name, such as `trainwright.Trainer`."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def is_module(path: str) -> bool:
    """Return whether a dotted name is the name of a module."""
    return path == FACE or inspect.ismodule(own_object(path))


def advice(path: str) -> str:
    """Return the advice for a dotted name in Lightning or Accelerate without a counterpart."""
    name, library = path.rpartition(".")[2], LIBRARIES[_root(path)]
    if name == "__version__":
        return f"{path} has no counterpart here: trainwright.__version__ is Trainwright's own. Delete the comparison."
    return answer(name, library) or f"{path} has no counterpart here; see docs/migration-names.md."


def instead(own: str, name: str) -> str:
    """Return the replacement of an argument that a class lacks, as the end of a sentence."""
    if own == "trainwright.Accelerator":
        from trainwright.accelerator.settings import ELSEWHERE

        return f". Instead: {ELSEWHERE[name]}." if name in ELSEWHERE else "."
    return "; see docs/migration-names.md."


def _plain_name(each: _Import, own: str | None) -> str:
    """Return the local name that the rewritten import binds, if it has no alias."""
    if isinstance(each.node, ast.Import):
        return FACE if each.local in LIBRARIES else each.local
    return each.local if own is None or each.alias.asname else own.rpartition(".")[2]


def _written(name: str, local: str, *, keep: bool) -> str:
    """Return the text of an alias. `keep` writes `a as a` for equal names."""
    return name if name == local and not keep else f"{name} as {local}"


def _root(name: str) -> str:
    return name.partition(".")[0]


def _roots(node: ast.AST) -> set[str]:
    """Return the top packages that a statement imports from."""
    if isinstance(node, ast.Import):
        return {_root(alias.name) for alias in node.names}
    return {_root(node.module or "")} if isinstance(node, ast.ImportFrom) and not node.level else set()


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


def _annotations(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield from filter(
            None, [node.returns, *(arg.annotation for arg in ast.walk(node.args) if isinstance(arg, ast.arg))]
        )
    elif isinstance(node, ast.AnnAssign):
        yield node.annotation


def _without_equal_fallbacks(text: str) -> str:
    """Return the program with each `try: import a / except ImportError: import a` replaced by `import a`."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Try) or len(node.handlers) != 1 or node.orelse or node.finalbody:
            continue
        lines, fallback = list(map(ast.unparse, node.body)), node.handlers[0]
        before = ast.get_source_segment(text, node) or ""
        equal = lines == list(map(ast.unparse, fallback.body)) and all(FACE in _roots(each) for each in node.body)
        caught = ast.unparse(fallback.type) if fallback.type is not None else ""
        if equal and caught in ("ImportError", "ModuleNotFoundError") and not fallback.name and "#" not in before:
            return _without_equal_fallbacks(text.replace(before, f"\n{' ' * node.col_offset}".join(lines), 1))
    return text
