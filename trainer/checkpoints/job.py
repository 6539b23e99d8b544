"""A job that its launcher starts again: torchrun after a failure, Slurm after a requeue."""

from __future__ import annotations

import secrets
import warnings
from dataclasses import dataclass
from pathlib import Path

from trainwright.checkpoint import check_checkpoint, find_checkpoints, read_checkpoint
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.process import job
from trainwright.processes.process_group import Processes

_fits = 0  # in this process: the n-th fit of an attempt at a job is the n-th of the others


@dataclass(frozen=True, slots=True)
class Attempt:
    """One fit in an attempt at a job.

    Attributes:
        key: the same in every attempt, and for this fit only; None when the launcher has nothing that tells jobs apart.
        number: 0 the first time.
    """

    key: str | None = None
    number: int = 0


def this_attempt(processes: Processes) -> Attempt:
    """Find out which fit of which attempt begins. Collective; every rank calls it once for each fit."""
    global _fits
    _fits += 1
    name, found = f"fit-{_fits}", job()
    if found.name is not None:
        return Attempt(f"{found.name}/{name}", found.attempt)
    token = processes.recall(name, secrets.token_hex(8)) if processes.rank == 0 else None
    return Attempt(processes.broadcast_object(token), found.attempt)


def left_by_earlier(attempt: Attempt, folder: Path) -> Path | None:
    """Return the newest valid full checkpoint in `folder` that an earlier attempt at this fit has written, or None.

    Warns:
        TrainwrightWarning: a damaged one was passed over; says what is wrong with it.
    """
    if attempt.key is None or attempt.number == 0:
        return None
    found = [item for item in find_checkpoints(folder) if item.manifest.kind == "full"]
    for item in sorted(found, key=lambda item: item.manifest.created, reverse=True):
        try:
            check_checkpoint(item.path)
            trainer = read_checkpoint(item.path, verify=False, parts=("trainer",)).trainer
        except CheckpointError as error:
            text = f"passing over the damaged checkpoint {item.path}: {error}"
            warnings.warn(text, TrainwrightWarning, stacklevel=2)
            continue
        if trainer.get("job") == attempt.key:
            return item.path
    return None
