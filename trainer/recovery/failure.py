"""Notes on errors of a step: the line of user code, the step and the batch."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch

from trainwright.core.errors import TrainwrightError
from trainwright.core.state import TrainState
from trainwright.core.tree import Batch, is_container

_LIBRARY_PATHS = (
    str(Path(__file__).parents[2]),  # trainwright
    str(Path(torch.__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<",  # code without a file, such as what torch and dataclasses generate
)
_MAX_ITEMS = 8  # shown of a container
_START = "in "


def note_missing_weights(error: BaseException, task: torch.nn.Module) -> None:
    """Add a note to an error about tensors on the device `meta` whose values are on other ranks. Not collective."""
    if "meta" in str(error) and not isinstance(error, TrainwrightError):
        elsewhere = [name for name, parameter in task.named_parameters() if parameter.is_meta]
        if elsewhere:
            error.add_note(
                f"{len(elsewhere)} weights, such as {elsewhere[0]}, are in stages of other ranks, and are tensors on "
                "the device 'meta' here. In callbacks and hooks, skip parameters whose is_meta is True."
            )


def note_batch(
    error: BaseException, task_name: str, step: str, batch: Batch, batch_idx: int, state: TrainState, rank: int | None
) -> None:
    """Add a note with the line of user code, the step, the batch and its shapes. Reads no tensor; not collective.

    Errors of this library get no note. An error gets at most one.

    Args:
        error: the error.
        task_name: name of the task's class.
        step: name of the task's method.
        batch: the batch of the step.
        batch_idx: its index.
        state: the training progress.
        rank: this process's rank, or None for a single process.
    """
    has_note = any(note.startswith(_START) for note in getattr(error, "__notes__", ()))
    if has_note or not isinstance(error, Exception) or isinstance(error, TrainwrightError):
        return
    try:
        described = describe(batch)
    except RecursionError:
        described = f"{type(batch).__name__}, nested too deeply to show"
    of_rank = "" if rank is None else f", rank {rank}"
    error.add_note(
        f"{_START}{task_name}.{step}{_user_line(error)}\n"
        f"  epoch {state.epoch}, step {state.step}, batch_idx {batch_idx}{of_rank}\n"
        f"  batch: {described}"
    )


def _user_line(error: BaseException) -> str:
    """Return the innermost line of an error's traceback outside libraries, or an empty string."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_LIBRARY_PATHS)]
    if not frames:
        return ""
    return f", {frames[-1].filename}:{frames[-1].lineno}" + (f": {frames[-1].line}" if frames[-1].line else "")


def describe(tree: object) -> str:
    """Return the types and shapes in a batch as text, such as `(float32[8, 4] on cpu, int64[8] on cpu)`."""
    if isinstance(tree, torch.Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)} on {tree.device}"
    if isinstance(tree, Mapping):
        return (
            f"{{{_some([f'{key!r}: {describe(part)}' for key, part in list(tree.items())[:_MAX_ITEMS]], len(tree))}}}"
        )
    if isinstance(tree, (list, tuple)):
        parts = _some([describe(part) for part in tree[:_MAX_ITEMS]], len(tree))
        return f"[{parts}]" if isinstance(tree, list) else f"({parts})"
    if is_container(tree):
        return f"{type(tree).__name__}({_some([f'{k}={describe(v)}' for k, v in vars(tree).items()], 0)})"
    return type(tree).__name__


def _some(parts: list[str], total: int) -> str:
    more = total - len(parts)
    return ", ".join([*parts, f"and {more} more"] if more > 0 else parts)
