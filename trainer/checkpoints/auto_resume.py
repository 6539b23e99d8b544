"""Attempts of a job that its launcher restarts: torchrun after a failure, Slurm after a requeue."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from trainwright.core.process import job
from trainwright.processes.process_group import Processes

# Number of fits that this process has begun. A script may call `fit` several times. Each attempt of the job runs the
# same script, so that the same number is the same fit.
_fits = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One fit within one attempt of a job.

    Attributes:
        key: identifies the fit in all attempts of the job; None if the launcher does not identify jobs.
        number: 0-based index of the attempt.
    """

    key: str | None = None
    number: int = 0


def this_attempt(processes: Processes) -> Attempt:
    """Return the key and attempt number of the fit that begins. Collective: every rank calls it once per fit."""
    global _fits
    _fits += 1
    name = f"fit-{_fits}"
    launcher_job = job()
    if launcher_job.name is not None:
        return Attempt(f"{launcher_job.name}/{name}", launcher_job.attempt)
    # torchrun's run id is "none" by default. Its agent keeps the token of the first attempt over restarts.
    token = processes.recall(name, secrets.token_hex(8)) if processes.rank == 0 else None
    return Attempt(processes.broadcast_object(token), launcher_job.attempt)
