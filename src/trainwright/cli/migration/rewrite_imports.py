"""Rewrite a program's imports of Lightning and Accelerate, and the uses of their names, as a change of the syntax tree.
Only names bound by imports of these libraries are changed, scope by scope: the program's own equal names are not, nor
strings, comments and layout. Names without a counterpart are unchanged and reported.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainwright.cli.configs.foreign_config import UNUSED, is_unused
from trainwright.cli.migration.object_uses import FACE, Unsettled, advice, counterpart, instead, is_module, own_object
from trainwright.core.errors import require_package
from trainwright.core.names.foreign_names import LIBRARIES, own_module

if TYPE_CHECKING:
    import libcst as cst

_PATH = re.compile(rf"(?:{'|'.join(LIBRARIES)})(?:\.\w+)+")
_TYPE_COMMENT = re.compile(r"#\s*type:")
_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError")


@dataclass
class Rewritten:
    """Program after the rewrite: its bytes, and the manual changes, by line."""

    code: bytes
    unsettled: list[Unsettled] = field(default_factory=list)


def rewrite(code: bytes) -> Rewritten:
    """Rewrite one program."""
    library: Any = require_package("libcst", purpose="trainwright migrate")
    require_package("libcst.metadata", purpose="trainwright migrate")
    try:
        module = library.parse_module(code)
    except library.ParserSyntaxError as error:
        raise SyntaxError(f"line {error.raw_line}: {error.message}") from None
    try:
        return _Rewrite(library, module).run()
    except RecursionError:
        raise SyntaxError("an expression is nested too deeply for the parser") from None


@dataclass(frozen=True)
class _Bound:
    """Local name bound by an import of another library."""

    local: str
    path: str  # full foreign path of what it stands for
    own: str | None  # full path of its counterpart here
    node: Any  # the import statement
    uses: tuple[Any, ...]  # nodes that read the name
    # Read where nothing is changed: in a string (an annotation, `__all__`), in a type comment, off a class, or by
    # whoever imports what `import a as a` exports.
    outside: bool


class _Rewrite:
    """Rewrite of one module: find bound names, choose new names, replace."""

    def __init__(self, library: ModuleType, module: cst.Module) -> None:
        self.cst = library
        wrapper = library.metadata.MetadataWrapper(module)
        self.module = wrapper.module
        self.parents = wrapper.resolve(library.metadata.ParentNodeProvider)
        self.positions = wrapper.resolve(library.metadata.PositionProvider)
        scopes = wrapper.resolve(library.metadata.ScopeProvider).values()
        self.scopes = list(dict.fromkeys(scope for scope in scopes if scope is not None))
        self.changes: dict[Any, Callable[[Any], Any]] = {}
        self.unsettled: set[Unsettled] = set()
        self.plain_imports: set[tuple[Any, tuple[str, ...]]] = set()  # per block, to avoid duplicates
        self.taken = {assignment.name for scope in self.scopes for assignment in scope.assignments}

    def run(self) -> Rewritten:
        self._report_strings()
        bound = list(self._find_bound())
        kept = self._kept_tries()
        bound = [each for each in bound if not any(each.node in inside for inside in kept)]
        names = self._new_names(bound)
        statements: dict[Any, list[_Bound]] = {}
        for each in bound:
            statements.setdefault(each.node, []).append(each)
            self._change_uses(each, names[each.local])
        for node, group in statements.items():
            self._change_import(node, group, names)
        for node in self._stars(kept):
            self._report(node, f"from {_dotted(node.module)} import *: name what you use.")
        if not self.changes:
            return Rewritten(self.module.bytes, sorted(self.unsettled))
        module = _replaced(self.cst, self.module, self.changes)
        return Rewritten(_without_equal_fallbacks(self.cst, module).bytes, sorted(self.unsettled))

    # Finding

    def _find_bound(self) -> Iterator[_Bound]:
        elsewhere = self._names_in_all() | self._names_in_type_comments()
        seen = set()
        for scope in self.scopes:
            for assignment in scope.assignments:
                node = getattr(assignment, "node", None)
                if not isinstance(node, (self.cst.Import, self.cst.ImportFrom)) or (node, assignment.name) in seen:
                    continue
                seen.add((node, assignment.name))
                path = self._foreign_path(node, assignment.name)
                if path is None:
                    continue
                uses = [access.node for access in assignment.references]
                texts = [use for use in uses if isinstance(use, (self.cst.SimpleString, self.cst.ConcatenatedString))]
                inside = tuple(use for use in uses if use in self.parents and use not in texts)
                if isinstance(node, self.cst.Import):  # a renamed class keeps its name because of them
                    for use in texts:
                        self._report(use, f"the annotation in quotes names {path}; write the new name in it.")
                local = assignment.name.partition(".")[0]
                outside = len(inside) < len(uses) or local in elsewhere or self._is_exported(node, local)
                outside |= isinstance(scope, self.cst.metadata.ClassScope)
                yield _Bound(local, path, counterpart(path) or self._own_module(path, inside), node, inside, outside)

    def _own_module(self, path: str, uses: Sequence[Any]) -> str | None:
        """Return the counterpart of an imported sub-module, which is identified by a use of a name in it."""
        names = [chain[1].attr.value for use in uses if len(chain := self._chain(use)) > 1]
        return own_module(path) if any(counterpart(f"{path}.{name}") for name in names) else None

    def _foreign_path(self, node: Any, local: str) -> str | None:
        """Return the path that an import binds to a local name, if it is another library's."""
        if isinstance(node, self.cst.ImportFrom):
            if node.module is None or node.relative or isinstance(node.names, self.cst.ImportStar):
                return None
            module = _dotted(node.module)
            for alias in node.names:
                if (alias.evaluated_alias or alias.evaluated_name) == local and module.partition(".")[0] in LIBRARIES:
                    return f"{module}.{alias.evaluated_name}"
            return None
        for alias in node.names:
            path = alias.evaluated_name
            if path.partition(".")[0] not in LIBRARIES:
                continue
            if alias.evaluated_alias == local:
                return str(path)
            if alias.evaluated_alias is None and path == local:
                return str(path.partition(".")[0])
        return None

    def _names_in_all(self) -> set[str]:
        """Return every text in a statement that names `__all__`: it is assigned, added to, appended to."""
        names: set[str] = set()
        for node in self.parents:
            if isinstance(node, self.cst.Name) and node.value == "__all__":
                while not isinstance(node, self.cst.BaseSmallStatement):
                    node = self.parents[node]
                texts = [each for each in _below(node) if isinstance(each, self.cst.SimpleString)]
                names |= {value for text in texts if isinstance(value := text.evaluated_value, str)}
        return names

    def _names_in_type_comments(self) -> set[str]:
        comments = [node.value for node in self.parents if isinstance(node, self.cst.Comment)]
        return {word for text in comments if _TYPE_COMMENT.match(text) for word in re.findall(r"\w+", text)}

    def _is_exported(self, node: Any, local: str) -> bool:
        """Return whether `import a as a` re-exports the name from this module."""
        return any(
            alias.asname is not None and alias.evaluated_alias == local == alias.evaluated_name for alias in node.names
        )

    def _kept_tries(self) -> list[set[Any]]:
        """Return the nodes inside each `try` that imports from here already: the author's own choice of library."""
        found = []
        for node in self.parents:
            if isinstance(node, self.cst.Try):
                inside = set(_below(node))
                imports = [each for each in inside if isinstance(each, (self.cst.Import, self.cst.ImportFrom))]
                if any(name.partition(".")[0] == FACE for each in imports for name in self._modules_of(each)):
                    found.append(inside)
        return found

    def _modules_of(self, node: Any) -> list[str]:
        if isinstance(node, self.cst.Import):
            return [alias.evaluated_name for alias in node.names]
        return [_dotted(node.module)] if node.module is not None and not node.relative else []

    def _stars(self, kept: Sequence[set[Any]]) -> Iterator[Any]:
        for node in self.parents:
            if isinstance(node, self.cst.ImportFrom) and isinstance(node.names, self.cst.ImportStar):
                modules = self._modules_of(node)
                foreign = any(name.partition(".")[0] in LIBRARIES for name in modules)
                if foreign and not any(node in inside for inside in kept):
                    yield node

    # Deciding

    def _new_names(self, bound: Sequence[_Bound]) -> dict[str, str]:
        """Return local name → new local name; the old one if it is used in a string or with a second meaning."""
        names: dict[str, str] = {}
        for local in {each.local for each in bound}:
            group = [each for each in bound if each.local == local]
            new = {self._plain_name(each) for each in group}
            everywhere = sum(1 for scope in self.scopes for a in scope.assignments if _root(a.name) == local)
            alone = everywhere == len(group)
            wanted = new.pop() if len(new) == 1 else local
            free = wanted not in self.taken and wanted not in names.values()
            if wanted == FACE:  # `import lightning` without an alias: its uses are rewritten in any case
                names[local] = wanted if free or self._is_ours(wanted) else local
            else:
                safe = alone and free and not any(each.outside for each in group)
                names[local] = wanted if safe else local
        return names

    def _plain_name(self, each: _Bound) -> str:
        """Return the local name that an import without an alias binds here."""
        if isinstance(each.node, self.cst.Import):
            return FACE if each.local in LIBRARIES else each.local
        name = each.path.rpartition(".")[2]
        return each.local if each.own is None or name != each.local else each.own.rpartition(".")[2]

    def _is_ours(self, name: str) -> bool:
        imports = [n for scope in self.scopes for a in scope.assignments if a.name == name for n in [a.node]]
        return all(isinstance(node, self.cst.Import) for node in imports)

    # Changing

    def _change_uses(self, each: _Bound, local: str) -> None:
        for use in each.uses:
            chain = self._chain(use)
            if each.own is not None and counterpart(each.path) != FACE and not is_module(each.own):
                if local != each.local:
                    self._replace_expression(use if not isinstance(use, self.cst.Attribute) else chain[0], local)
                self._check_call(chain[0], each.own)
                continue
            self._change_dotted(each, chain, local)

    def _chain(self, use: cst.CSTNode) -> list[Any]:
        """Return a name and the attribute accesses around it: `L`, `L.callbacks`, `L.callbacks.Timer`."""
        while isinstance(use, self.cst.Attribute):  # a dotted import is used with all its parts
            use = use.value
        chain = [use]
        while isinstance(above := self.parents[chain[-1]], self.cst.Attribute) and above.value is chain[-1]:
            chain.append(above)
        return chain

    def _change_dotted(self, each: _Bound, chain: Sequence[Any], local: str) -> None:
        """Rewrite `L.pytorch.LightningModule`: the longest part that has a counterpart here."""
        words = [node.attr.value for node in chain[1:]]
        for length in range(len(words), 0, -1):
            path = ".".join([each.path, *words[:length]])
            own = counterpart(path)
            if own is None or words[length - 1] == "__version__":
                continue
            base = each.own if each.own is not None and each.own != FACE else FACE
            if is_module(own) and length < len(words):
                break  # the module has no such attribute
            if own == base or own.startswith(f"{base}."):
                self._replace_expression(chain[length], local + own.removeprefix(base))
                self._check_call(chain[length], own)
                return
            break
        if not words and each.own is not None:
            self._report(chain[0], f"the module {each.local} is used as an object; check its attributes.")
            if local != each.local:
                self._replace_expression(chain[0], local)
            return
        if local != each.local:
            self._replace_expression(chain[0], local)
        path = ".".join([each.path, *words])
        self._report(chain[0], advice(path))

    def _replace_expression(self, node: cst.BaseExpression, dotted: str) -> None:
        made = self.cst.parse_expression(dotted)
        if getattr(node, "lpar", None):
            made = made.with_changes(lpar=node.lpar, rpar=node.rpar)
        self.changes[node] = lambda updated: made

    def _check_call(self, node: cst.CSTNode, own: str) -> None:
        """Report keyword arguments that the counterpart does not have."""
        call = self.parents[node]
        if not isinstance(call, self.cst.Call) or call.func is not node:
            return
        try:
            parameters = inspect.signature(own_object(own)).parameters
        except (TypeError, ValueError):
            return
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for argument in call.args:
            name = argument.keyword.value if argument.keyword is not None else None
            only_default = own == "trainwright.Trainer" and name in UNUSED
            if name is None or (not only_default and (takes_all or name in parameters)):
                continue
            value = getattr(argument.value, "value", None)
            if only_default and isinstance(value, str) and is_unused(name, value):
                continue
            what = f"takes only {name}={UNUSED[name]}" if only_default else f"has no argument {name!r}"
            self._report(argument, f"{own} {what}{instead(own, name)}")

    def _change_import(self, node: Any, group: Sequence[_Bound], names: Mapping[str, str]) -> None:
        if isinstance(node, self.cst.Import):
            self._change_plain_import(node, {each.local: each.own for each in group}, names)
            return
        by_local = {each.local: each for each in group}
        made: dict[str, list[Any]] = {}
        left: list[Any] = []
        for alias in node.names:
            each = by_local.get(alias.evaluated_alias or alias.evaluated_name)
            if each is None or each.own is None:
                left.append(alias)
                if each is not None:
                    self._report(alias, advice(each.path))
                continue
            module, _, name = each.own.rpartition(".")
            local = names[each.local]
            new = alias.with_changes(name=self.cst.Name(name or FACE), asname=self._asname(alias, name, local))
            made.setdefault(module, []).append(new)
        if made:
            self._report_comments(node, left, made)
            self._replace_statement(node, made, left)

    def _asname(self, alias: cst.ImportAlias, name: str, local: str) -> Any:
        if name == local:
            return None if alias.asname is None or alias.evaluated_alias != name else alias.asname
        if alias.asname is not None and alias.evaluated_alias == local:
            return alias.asname
        return self.cst.AsName(name=self.cst.Name(local))

    def _change_plain_import(
        self, node: cst.Import, own_names: Mapping[str, str | None], names: Mapping[str, str]
    ) -> None:
        aliases = []
        for alias in node.names:
            root = _root(alias.evaluated_name)
            own = None
            if root in LIBRARIES:
                own = own_names.get(alias.evaluated_alias or "") or counterpart(alias.evaluated_name)
            if own is not None:
                own = own if alias.asname is not None else FACE
                local = alias.evaluated_alias or names.get(root, root)
                asname = alias.asname
                if asname is None and local != FACE:
                    asname = self.cst.AsName(name=self.cst.Name(local))
                alias = alias.with_changes(name=self.cst.parse_expression(own), asname=asname)
            elif root in LIBRARIES:
                self._report(node, advice(alias.evaluated_name))
            aliases.append(alias)
        line = self.parents[node]
        made = (self.parents[line], tuple(_dotted(alias.name) for alias in aliases))
        if len(aliases) == 1 and aliases[0].asname is None and len(line.body) == 1:
            if made in self.plain_imports:
                self.changes[line] = lambda updated: self.cst.RemoveFromParent()
                return
            self.plain_imports.add(made)
        self.changes[node] = lambda updated: updated.with_changes(names=aliases)

    def _replace_statement(self, node: Any, made: Mapping[str, list[Any]], left: list[Any]) -> None:
        """Replace one statement by one import for each module; a single one keeps its layout."""
        if len(made) + bool(left) == 1 and "" not in made:
            ((module, names),) = made.items()
            path = self.cst.parse_expression(module)
            self.changes[node] = lambda updated: updated.with_changes(module=path, names=names)
            return
        statements: list[Any] = []
        if "" not in made:  # the first keeps the layout, comments between the names included
            module, names = next(iter(made.items()))
            if not node.lpar:
                names = [*names[:-1], names[-1].with_changes(comma=self.cst.MaybeSentinel.DEFAULT)]
            statements.append(node.with_changes(module=self.cst.parse_expression(module), names=names))
            made = {key: value for key, value in made.items() if key != module}
        for module, names in made.items():
            plain = [name.with_changes(comma=self.cst.MaybeSentinel.DEFAULT) for name in names]
            if module:
                statements.append(self.cst.ImportFrom(module=self.cst.parse_expression(module), names=plain))
            else:
                statements.append(self.cst.Import(names=plain))
        if left:
            plain = [name.with_changes(comma=self.cst.MaybeSentinel.DEFAULT) for name in left]
            statements.append(node.with_changes(names=plain, lpar=None, rpar=None))
        line = self.parents[node]
        if len(line.body) > 1 or not isinstance(line, self.cst.SimpleStatementLine):  # `if a: import b`
            self.changes[node] = lambda updated: self.cst.FlattenSentinel(statements)
            return
        self.changes[line] = lambda updated: self.cst.FlattenSentinel(
            [
                updated.with_changes(body=[statements[0]]),
                *(self.cst.SimpleStatementLine(body=[each]) for each in statements[1:]),
            ]
        )

    # Reporting

    def _report_comments(self, node: Any, left: Sequence[Any], made: Mapping[str, Sequence[Any]]) -> None:
        """Report comments next to names of an import that is split; those of the first one are kept."""
        if len(made) + bool(left) == 1 and "" not in made:
            return
        first = next(iter(made.values())) if "" not in made else ()
        stay = {alias.evaluated_alias or alias.name.value for alias in first}
        stay |= {getattr(alias.asname, "name", alias.name).value for alias in first}
        for alias in node.names:
            if (alias.evaluated_alias or alias.evaluated_name) in stay:
                continue
            for each in _below(alias):
                if isinstance(each, self.cst.Comment):
                    self._report(alias, f"the comment {each.value!r} next to it was removed by the rewrite.")

    def _report(self, node: object, text: str) -> None:
        self.unsettled.add(Unsettled(self.positions[node].start.line, text))

    def _report_strings(self) -> None:
        for node in self.parents:
            if isinstance(node, self.cst.SimpleString) and not isinstance(self.parents[node], self.cst.Expr):
                value = node.evaluated_value
                if isinstance(value, str) and _PATH.fullmatch(value):
                    own = counterpart(value)
                    text = f"is {own} here." if own is not None else advice(value)
                    self._report(node, f"the text {value!r} names another library: {text}")


def _root(name: str) -> str:
    return name.partition(".")[0]


def _dotted(node: Any) -> str:
    """Return the text of a dotted name; empty for anything else."""
    if hasattr(node, "attr"):
        return f"{_dotted(node.value)}.{node.attr.value}"
    value = getattr(node, "value", "")
    return value if isinstance(value, str) else ""


def _below(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _below(child)


def _replaced(library: Any, module: Any, changes: Mapping[Any, Callable[[Any], Any]]) -> Any:
    """Return the module with changed nodes, inner ones first."""

    class Replace(library.CSTTransformer):  # type: ignore[misc]  # a class of a package that is imported when used
        def on_leave(self, original: object, updated: object) -> Any:
            updated = super().on_leave(original, updated)
            change = changes.get(original)
            return updated if change is None else change(updated)

    return module.visit(Replace())


def _without_equal_fallbacks(library: Any, module: cst.Module) -> Any:
    """Return the module with each `try: import a / except ImportError: import a` as the import alone."""

    class Simplify(library.CSTTransformer):  # type: ignore[misc]  # see _replaced
        def leave_Try(self, original: cst.Try, updated: cst.Try) -> Any:
            if updated.orelse or updated.finalbody or len(updated.handlers) != 1:
                return updated
            (handler,) = updated.handlers
            if handler.name is not None or _dotted(handler.type) not in _IMPORT_ERRORS:
                return updated
            body, fallback = updated.body.body, handler.body.body
            texts = [[module.code_for_node(line).strip() for line in lines] for lines in (body, fallback)]
            if texts[0] != texts[1] or not all(FACE in text and "import" in text for text in texts[0]):
                return updated
            first, *rest = body
            return library.FlattenSentinel([first.with_changes(leading_lines=updated.leading_lines), *rest])

    return module.visit(Simplify())
