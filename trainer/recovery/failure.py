"""Notes on errors of a step: the line of user code, the step and the batch."""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch

from trainwright.core.errors import TrainwrightError
from trainwright.core.state import TrainState
from trainwright.core.tree import Batch, is_container

_MAX_ITEMS = 8  # shown of a container
_NOTE_START = "in "  # first characters of a note of `note_batch`, by which it is recognized


def _library_paths() -> tuple[str, ...]:
    """Return the beginnings of paths whose lines are not user code."""
    import sysconfig  # needed after an error only

    folders = [str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)]
    folders += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    generated = "<"  # code without a file, such as what torch and dataclasses generate
    return (*(folder + os.sep for folder in folders), generated)


def note_missing_weights(error: BaseException, task: torch.nn.Module) -> None:
    """Add a note to an error about tensors on the device `meta` whose values are on other ranks. Not collective."""
    if "meta" not in str(error) or isinstance(error, TrainwrightError):
        return
    meta_names = [name for name, parameter in task.named_parameters() if parameter.is_meta]
    if meta_names:
        error.add_note(
            f"{len(meta_names)} weights, such as {meta_names[0]}, are in stages of other ranks, and are tensors on "
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
    # KeyboardInterrupt and SystemExit are not Exceptions. Errors of this library name the cause already.
    if not isinstance(error, Exception) or isinstance(error, TrainwrightError):
        return
    # An outer part of the loop may catch the error again.
    if any(note.startswith(_NOTE_START) for note in getattr(error, "__notes__", ())):
        return
    try:
        described = describe(batch)
    except RecursionError:
        described = f"{type(batch).__name__}, nested too deeply to show"
    rank_text = "" if rank is None else f", rank {rank}"
    error.add_note(
        f"{_NOTE_START}{task_name}.{step}{_user_line(error)}\n"
        f"  epoch {state.epoch}, step {state.step}, batch_idx {batch_idx}{rank_text}\n"
        f"  batch: {described}"
    )


def _user_line(error: BaseException) -> str:
    """Return the innermost line of an error's traceback outside libraries, or an empty string.

    For example `, /home/me/train.py:12: loss = self.net(x)`.
    """
    library_paths = _library_paths()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(library_paths):
            continue
        location = f", {frame.filename}:{frame.lineno}"
        return f"{location}: {frame.line}" if frame.line else location
    return ""


def describe(tree: object) -> str:
    """Return the types and shapes in a batch as text, such as `(float32[8, 4] on cpu, int64[8] on cpu)`."""
    if isinstance(tree, torch.Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)} on {tree.device}"
    if isinstance(tree, Mapping):
        entries = [f"{key!r}: {describe(part)}" for key, part in itertools.islice(tree.items(), _MAX_ITEMS)]
        return "{" + _joined(entries, len(tree)) + "}"
    if isinstance(tree, (list, tuple)):
        items = [describe(part) for part in tree[:_MAX_ITEMS]]
        joined = _joined(items, len(tree))
        return f"[{joined}]" if isinstance(tree, list) else f"({joined})"
    if is_container(tree):
        fields = [f"{name}={describe(part)}" for name, part in vars(tree).items()]
        return f"{type(tree).__name__}({_joined(fields, len(fields))})"
    return type(tree).__name__


def _joined(parts: list[str], total: int) -> str:
    """Join the descriptions of the first of `total` parts."""
    if total > len(parts):
        parts = [*parts, f"and {total - len(parts)} more"]
    return ", ".join(parts)
