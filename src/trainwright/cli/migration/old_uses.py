"""Reports of code that imports from Trainwright already, but still relies on Lightning's or Accelerate's behavior."""

from __future__ import annotations

import ast
import re

from trainwright.cli.migration.program import FACE, Program, roots
from trainwright.core.hooks import REMOVED_HOOKS

_FOLDER = "a checkpoint is a folder here: load_from_checkpoint of your task reads it, torch.load does not."
_EXTENSION = "the name of a checkpoint has no .ckpt at its end here, unless save_checkpoint(path) has named it."
_SEARCHES = ("endswith", "glob", "rglob", "iglob", "fnmatch", "filter")
_OPTIMIZER_IDX = (
    "optimizer_idx belongs to Lightning 1: a step is called once for a batch. Set automatic_optimization = False, and "
    "step the optimizers of self.optimizers() in training_step."
)
_MAIN_ONLY = re.compile(r"\bis_(?:local_)?main_process\b")
_SAVE_ON_MAIN = (
    "save_state on the main process alone writes replicated weights only, without the generators of the other "
    "processes. Call it on every process."
)


def report_old_uses(program: Program, trainers: set[str]) -> None:
    """Report uses that need a manual change.

    Args:
        program: the program. It imports, or before the rewrite imported, one of the libraries.
        trainers: variables to which a Trainer of Lightning is assigned, as text.
    """
    _report_old_code(program)
    _report_trainers(program, trainers | _new_trainers(program))
    _report_files(program)


def imports_of_face(program: Program) -> dict[str, str]:
    """Return the local names that are imported from Trainwright, with their dotted names.

    Example: `{"tw": "trainwright", "Trainer": "trainwright.Trainer"}` for `import trainwright as tw` and
    `from trainwright import Trainer`.
    """
    imported: dict[str, str] = {}
    for node in ast.walk(program.tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)) or FACE not in roots(node):
            continue
        for alias in node.names:
            if isinstance(node, ast.Import) and alias.name.partition(".")[0] != FACE:
                continue  # `os` of `import trainwright, os`
            if isinstance(node, ast.ImportFrom):
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif alias.asname is not None:
                imported[alias.asname] = alias.name
            else:
                imported[FACE] = FACE
    return imported


def _report_old_code(program: Program) -> None:
    """Report hooks and arguments of Lightning 1, and saves on the main process alone."""
    for node in ast.walk(program.tree):
        if isinstance(node, ast.FunctionDef) and isinstance(program.parents[node], ast.ClassDef):
            if any(argument.arg == "optimizer_idx" for argument in node.args.args):
                program.report(node, _OPTIMIZER_IDX)
            if node.name in REMOVED_HOOKS:
                program.report(node, f"{node.name}: {REMOVED_HOOKS[node.name]}")
        elif isinstance(node, ast.If) and _MAIN_ONLY.search(ast.unparse(node.test)):
            for statement in _main_only_branch(node):
                _report_saves(program, statement)


def _main_only_branch(node: ast.If) -> list[ast.stmt]:
    """Return the branch for the main process. It is the `else` of `if not accelerator.is_main_process`."""
    for part in ast.walk(node.test):
        is_not = isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not)
        if is_not and _MAIN_ONLY.search(ast.unparse(part)):
            return node.orelse
    return node.body


def _report_saves(program: Program, statement: ast.stmt) -> None:
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and node.attr == "save_state":
            program.report(node, _SAVE_ON_MAIN)


def _new_trainers(program: Program) -> set[str]:
    """Return the variables to which a Trainer of Trainwright is assigned, as text."""
    imported = imports_of_face(program)
    trainers: set[str] = set()
    for node in ast.walk(program.tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        local, dot, rest = ast.unparse(node.value.func).partition(".")
        if local not in imported:
            continue
        # `tw.Trainer` with `import trainwright as tw` is `trainwright.Trainer`.
        path = imported[local] + dot + rest
        if path in (f"{FACE}.Trainer", f"{FACE}.trainer.Trainer"):
            trainers |= {ast.unparse(target) for target in node.targets}
    return trainers


def _report_trainers(program: Program, trainers: set[str]) -> None:
    """Report attributes of a Trainer that do not exist here.

    Any variable in the program to which a Trainer is assigned counts as a Trainer.
    """
    from trainwright.trainer.lightning_names import INTERNALS
    from trainwright.trainer.trainer import Trainer

    for node in ast.walk(program.tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        if node.attr not in INTERNALS or hasattr(Trainer, node.attr):
            continue
        if ast.unparse(node.value) in trainers:
            program.report(node, f"trainer.{node.attr} does not exist here: {INTERNALS[node.attr]}.")


def _report_files(program: Program) -> None:
    """Report reads of a checkpoint as a file, and searches for checkpoints by the extension of Lightning's files.

    Any variable in the program to which the path of a checkpoint is assigned counts as such a path.
    """
    paths: set[str] = set()
    saved: set[str] = set()  # names of checkpoints that the program itself chooses: they keep their .ckpt
    for node in ast.walk(program.tree):
        if isinstance(node, ast.Assign) and _names_checkpoint(node.value, set()):
            paths |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.Call) and _called(node) == "save_checkpoint":
            saved |= {text.rpartition("/")[2] for text in _extended_names(node)}
    for node in ast.walk(program.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            if any(_names_checkpoint(argument, paths) for argument in node.args):
                program.report(node, _FOLDER)
            continue
        searched: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            searched = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and _called(node) in _SEARCHES:
            searched = node.args
        for each in searched:
            if isinstance(each, ast.Constant) and set(_extended_names(each)) - saved:
                program.report(node, _EXTENSION)


def _called(call: ast.Call) -> str:
    """Return the last part of the name of a called function."""
    return ast.unparse(call.func).rpartition(".")[2]


def _extended_names(tree: ast.AST) -> list[str]:
    """Return the strings in an expression that end with the extension of Lightning's checkpoints."""
    texts = [each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and text.endswith(".ckpt")]


def _names_checkpoint(tree: ast.AST, paths: set[str]) -> bool:
    """Return whether an expression is, or contains, the path of a checkpoint. `paths`: variables with such paths.

    The result is False for a call, except of a function that returns a path. Arguments of calls within a larger
    expression, as in `a + f("x.ckpt")`, count as paths.
    """
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
