"""Choosing the checkpoint to continue from: the newest whole one, or what is used instead of a damaged one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from trainwright.checkpoint.disk.hashing import HashFiles, hash_files
from trainwright.checkpoint.format.layout import Kind
from trainwright.checkpoint.format.manifests import FoundCheckpoint, scan
from trainwright.checkpoint.format.reader import check_checkpoint, flaw_of
from trainwright.checkpoint.format.upgrade import NewerFormatError
from trainwright.core.errors import CheckpointError, TrainwrightWarning

# What becomes of the wish for a checkpoint that turns out to be damaged: an error, or the newest one that is whole.
OnDamaged = Literal["error", "fall_back"]


def newest_valid(
    folder: Path | str,
    *,
    kind: Kind | None = None,
    parts: Sequence[str] | None = None,
    allow_missing: Sequence[str] = (),
    earlier_than: Path | None = None,
    on_damaged: OnDamaged = "fall_back",
    hash_files: HashFiles = hash_files,
) -> Path | None:
    """Return the checkpoint in `folder` that was written last among those whose files match their manifest, or None.

    It goes by the time of writing, not by the step: a run that was started anew in the folder of an older, longer one
    continues its own. Reads every file of the candidates, newest first, until one is whole;
    `read_checkpoint(..., verify=False)` need not read them again. What is sealed and cannot be parsed is damaged too.

    Args:
        folder: where checkpoints lie; it need not exist.
        kind: `"full"` passes over checkpoints that cannot be resumed.
        parts, allow_missing: as in `read_checkpoint`: what must be whole.
        earlier_than: only those that were written before this checkpoint of the folder, which is not among them; all
            others if its manifest cannot be read and does not tell its time.
        on_damaged: `"error"` raises instead of passing over a damaged checkpoint.
        hash_files: reads the files, all sound ones of a candidate at once.

    Warns:
        TrainwrightWarning: a damaged checkpoint was passed over; says what is wrong with it.

    Raises:
        NewerFormatError: a checkpoint of a newer format lies there, which may well be the newest.
        CheckpointError: a damaged one was met and `on_damaged="error"`.
    """
    found: list[FoundCheckpoint] = []
    before: str | None = None
    for path, item in scan(Path(folder)):
        if isinstance(item, NewerFormatError):
            raise item
        if earlier_than is not None and os.path.realpath(path) == os.path.realpath(earlier_than):
            before = item.manifest.created if isinstance(item, FoundCheckpoint) else None
        elif isinstance(item, Exception):
            _pass_over(f"a damaged checkpoint: {item}", on_damaged)
        else:
            found.append(item)
    if before is not None:
        found = [item for item in found if item.manifest.created < before]
    order = sorted(found, key=lambda item: (item.manifest.created, item.manifest.step, item.path.name))
    for item in reversed(order):
        if (kind is not None and item.manifest.kind != kind) or _is_listed_itself(item.path):
            continue
        flaw = flaw_of(item, parts=parts, allow_missing=allow_missing, hash_files=hash_files)
        if flaw is None:
            return item.path
        _pass_over(f"the damaged checkpoint {item.path}: {flaw}", on_damaged)
    return None


def _is_listed_itself(path: Path) -> bool:
    """Tell whether `path` is a link to its neighbour, such as `last`: that one is a candidate, and hashed once."""
    return path.is_symlink() and os.path.dirname(os.path.realpath(path)) == os.path.realpath(path.parent)


def _pass_over(what: str, on_damaged: OnDamaged) -> None:
    if on_damaged == "error":
        raise CheckpointError(f"{what} To have it passed over, ask for on_damaged='fall_back'.")
    warnings.warn(f"passing over {what}", TrainwrightWarning, stacklevel=3)


def whole_checkpoint(
    path: Path | str,
    *,
    kind: Kind | None = None,
    parts: Sequence[str] | None = None,
    allow_missing: Sequence[str] = (),
    on_damaged: OnDamaged = "error",
    hash_files: HashFiles = hash_files,
) -> Path:
    """Return `path` once its files have been compared with its manifest, or what may be used in its place.

    Args:
        path: the checkpoint folder.
        kind: `"full"` passes over replacements that cannot be resumed; `path` itself is not asked for its kind.
        parts, allow_missing: as in `read_checkpoint`.
        hash_files: as in `newest_valid`.
        on_damaged: `"fall_back"`: if it is damaged, return the newest valid one of the same folder that was written
            earlier; one whose manifest does not even tell its time gives way to the newest of all.

    Warns:
        TrainwrightWarning: another one than `path` is returned; names both and says what is wrong.

    Raises:
        FileNotFoundError: nothing is at `path`.
        NewerFormatError: it is of a newer format, which is no damage.
        CheckpointError: it is damaged, and there is nothing to fall back to or no wish to.
    """
    path = Path(path)
    try:
        check_checkpoint(path, parts=parts, allow_missing=allow_missing, hash_files=hash_files)
        return path
    except NewerFormatError:
        raise
    except CheckpointError as error:
        if on_damaged == "error" or not path.is_dir():
            raise
        flaw = error
    true_path = Path(os.path.realpath(path))  # the neighbours of a link's target are the run's checkpoints
    found = newest_valid(
        true_path.parent,
        kind=kind,
        parts=parts,
        allow_missing=allow_missing,
        earlier_than=true_path,
        hash_files=hash_files,
    )
    if found is None:
        raise CheckpointError(f"{flaw} No earlier one in {true_path.parent} is whole.") from flaw
    warnings.warn(f"{flaw} Falling back to {found}.", TrainwrightWarning, stacklevel=2)
    return found
