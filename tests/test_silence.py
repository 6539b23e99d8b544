"""No argument of a public function is dropped in silence.

It is used, its docstring says that it is accepted without effect and why, or the list here says why it may be ignored.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "trainwright"

# "function.argument" → why a user who gives it loses nothing.
IGNORED = {
    "get_rng_state.device": "torch asks every device's module alike, and XLA has one generator",
    "set_rng_state.device": "as above",
    "predict_step.batch_idx": "a hook's default, which the user's own replaces",
    "optimizer_zero_grad.epoch": "a hook's default, which the user's own replaces",
    "optimizer_zero_grad.batch_idx": "a hook's default, which the user's own replaces",
    "untoggle_optimizer.optimizer": "what `toggle_optimizer` froze is put back, whichever optimizer it was for",
    "get_metrics.task": "a hook's default, which the user's own replaces",
    "on_before_batch_transfer.dataloader_idx": "as above",
    "transfer_batch_to_device.dataloader_idx": "as above",
    "on_after_batch_transfer.dataloader_idx": "as above",
    "measure_flops.model": "Lightning's signature; `forward_fn` holds the model, and everything that runs is counted",
    "get_state_dict.unwrap": "names are always the model's own",
    "move_parameter.module": "torch's signature of a hook",
    "move_parameter.name": "torch's signature of a hook",
    "after.args": "torch's signature of a hook",
    "end_stage.args": "torch's signature of a hook",
    "end_stage.module": "torch's signature of a hook",
    "restore_grad_mode.module": "torch's signature of a hook",
    "predict_step.args": "a sub-class may pass the index of a loader to super().predict_step",
    "predict_step.kwargs": "a sub-class may pass the index of a loader to super().predict_step",
    "restore_grad_mode.args": "torch's signature of a hook",
    "restore_grad_mode.output": "torch's signature of a hook",
    "validate.weights_only": "see fit",
    "test.weights_only": "see fit",
    "predict.weights_only": "see fit",
    "load_checkpoint_and_dispatch.offload_state_dict": "see load_checkpoint_in_model",
    "attach_align_device_hook.tied_params_map": "see attach_execution_device_hook",
    "attach_align_device_hook_on_blocks.tied_params_map": "see attach_execution_device_hook",
}  # fmt: skip


def _files() -> Iterator[Path]:
    for folder in SOURCE.iterdir():
        if folder.is_dir() and folder.name not in ("templates", "__pycache__"):
            yield from folder.resolve().rglob("*.py")


@cache
def _trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in _files()}


def _is_left_open(function: ast.FunctionDef) -> bool:
    """Tell whether a body does nothing but answer a constant or raise: a hook's default, or a refusal."""
    body = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return all(
        isinstance(s, ast.Pass | ast.Raise)
        or (isinstance(s, ast.Return) and (s.value is None or isinstance(s.value, ast.Constant)))
        for s in body
    )


def _unread(function: ast.FunctionDef) -> list[str]:
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    read = {node.id for statement in function.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    names = [argument.arg for argument in arguments if argument is not None]
    return [name for name in names if name not in read and name not in ("self", "cls") and not name.startswith("_")]


def _said_to_have_no_effect(function: ast.FunctionDef) -> set[str]:
    """Return the arguments that the docstring calls accepted without effect."""
    names: set[str] = set()
    for found in re.findall(
        r"^ *([\w, ]+): Accepted without effect: ", ast.get_docstring(function) or "", re.MULTILINE
    ):
        names |= set(found.split(", "))
    return names


def _public_functions() -> Iterator[ast.FunctionDef]:
    """Yield functions and methods that have a signature of their own: a name that one class alone defines."""
    functions = [n for tree in _trees().values() for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    methods = Counter(
        n.name
        for tree in _trees().values()
        for c in ast.walk(tree)
        if isinstance(c, ast.ClassDef)
        for n in c.body
        if isinstance(n, ast.FunctionDef)
    )
    for function in functions:
        if not function.name.startswith("_") and methods[function.name] < 2 and not _is_left_open(function):
            yield function


@pytest.mark.slow
def test_every_argument_is_read_or_its_silence_is_argued() -> None:
    functions = list(_public_functions())
    assert {"fit", "load_checkpoint_in_model", "save_model"} <= {function.name for function in functions}
    unread = set()
    for function in functions:
        unread |= {f"{function.name}.{name}" for name in set(_unread(function)) - _said_to_have_no_effect(function)}
    assert unread == set(IGNORED)
