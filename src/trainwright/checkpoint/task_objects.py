"""Objects that tasks of libraries add to checkpoints. A checkpoint contains descriptions of them, not the objects."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from trainwright.core.errors import CheckpointError

TASK_OBJECTS = "task_objects"  # key of a checkpoint's trainer part: descriptions by name
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))  # `training`, `_parameters`, `_forward_hooks` and so on
_MAX_VALUES = 1000  # in the description of a buffer, such as the class weights of a loss


def describe(value: object) -> str:
    """Return a text that only objects which compute the same have, or "" if no such text can be made.

    A loss is described as `torch.nn.modules.loss.MSELoss(reduction='mean')`.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (type, types.FunctionType)):
        # "<" is in `f.<locals>.g`, a function in a function, and in `<lambda>`. Such names do not identify a function.
        return "" if "<" in value.__qualname__ else f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.Tensor):
        has_few_values = not value.is_meta and value.numel() <= _MAX_VALUES
        return str(value.tolist()) if has_few_values else ""
    if isinstance(value, torch.nn.Module):
        return _describe_module(value)
    return ""


def _describe_module(module: torch.nn.Module) -> str:
    """Return the class of a module with its attributes, buffers and children, or "" if they do not determine it."""
    # A description contains no weights, which determine the results of such a module.
    has_parameters = next(module.parameters(), None) is not None
    if has_parameters:
        return ""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks):
        return ""
    parts = {name: part for name, part in vars(module).items() if name not in _OF_EVERY_MODULE}
    parts |= dict(module.named_buffers(recurse=False))
    parts |= dict(module.named_children())
    texts = []
    for name, part in parts.items():
        text = describe(part)
        if not text:
            return ""
        texts.append(f"{name}={text}")
    return f"{describe(type(module))}({', '.join(texts)})"


def equal_objects(task: Any, descriptions: Mapping[str, str]) -> dict[str, Any]:
    """Return the objects that `task` would add to a checkpoint now and that have the saved descriptions, by name.

    Calls `task.on_save_checkpoint` with the weights alone, and without a Trainer when a task is loaded. If it raises an
    error, the result is empty.

    Args:
        task: the task into which a checkpoint is loaded.
        descriptions: the checkpoint's entry `TASK_OBJECTS`.
    """
    if not descriptions:
        return {}
    checkpoint: dict[str, Any] = {"state_dict": task.state_dict(), "epoch": 0, "global_step": 0}
    try:
        task.on_save_checkpoint(checkpoint)
    except Exception:  # noqa: BLE001 -- it may need a Trainer or other entries; then no object can be compared
        return {}
    equal = {}
    for name, description in descriptions.items():
        is_comparable = description != "" and name in checkpoint
        if is_comparable and describe(checkpoint[name]) == description:
            equal[name] = checkpoint[name]
    return equal


@contextlib.contextmanager
def objects_named_in_errors(task: object, descriptions: Mapping[str, str]) -> Iterator[None]:
    """Return a context that replaces the KeyError of `on_load_checkpoint` for an object in `descriptions` by a
    CheckpointError that describes the object.
    """
    try:
        yield
    except KeyError as error:
        name = str(error.args[0]) if error.args else ""
        if name not in descriptions:
            raise
        raise CheckpointError(
            f"on_load_checkpoint of {type(task).__name__} reads checkpoint[{name!r}], an object that the checkpoint "
            f"describes as {descriptions[name] or 'not comparable'!r}. The task has no equal object. Construct the "
            "task with an equal object, for example as an argument of load_from_checkpoint."
        ) from error
