"""A job that its launcher starts again: torchrun after a failure, Slurm after a requeue."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

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
