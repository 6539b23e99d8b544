"""Rollback to a checkpoint within a run, and the data that is skipped afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainwright.checkpoint.format.manifests import open_checkpoint, open_or_error
from trainwright.core.errors import RollbackError
from trainwright.core.state import SkippedData
from trainwright.strategies.steps.phase import Phase
from trainwright.trainer.checkpoints import restore, step_end
from trainwright.trainer.checkpoints.load_request import LoadRequest, Opened
from trainwright.trainer.logger_start import start_loggers
from trainwright.trainer.run import StageRun

_UNITS = ("samples", "micro_batches", "batch")  # units of a position in the data, in order of preference


@dataclass(frozen=True, slots=True)
class RollbackRequest:
    """A request to roll back.

    Attributes:
        path: the checkpoint.
        reason: the reason, for messages.
        skips_data: skip all data that was consumed since the checkpoint.
    """

    path: Path
    reason: str
    skips_data: bool


class RollBack(Exception):
    """Exception that exits the current epoch for a rollback. Raised on every rank."""

    def __init__(self, request: RollbackRequest) -> None:
        super().__init__(request.reason)
        self.request = request


def unit_of(place: Mapping[str, int]) -> str:
    """Return the first of `"samples"`, `"micro_batches"` and `"batch"` that a position in an epoch has."""
    return next(unit for unit in _UNITS if unit in place)


def request(run: StageRun, reason: str, *, before_step: int) -> None:
    """Roll back to an earlier checkpoint at the end of the current step; see `Run.request_rollback`."""
    run.at_step_end(partial(_raise_rollback, run, reason, before_step))


def _raise_rollback(run: StageRun, reason: str, before_step: int) -> None:
    done, most = run.history.num_rollbacks, run.settings.arguments.max_rollbacks
    if done >= most:
        raise RollbackError(
            f"{reason}. The run has already rolled back {done} time(s), which reaches max_rollbacks={most}. Lower the "
            "learning rate, check the data in trainer.skipped_batches, or increase max_rollbacks."
        )
    path = find_checkpoint(run, before_step)
    if path is not None:
        raise RollBack(RollbackRequest(path, reason, skips_data=True))
    run.warn(
        f"{reason}, but this run has no full checkpoint of step {before_step} or earlier. Training continues without a "
        "rollback. Save more often and keep more checkpoints (ModelCheckpoint(save_top_k=-1))."
    )


def find_checkpoint(run: StageRun, max_step: int) -> Path | None:
    """Return this run's newest valid full checkpoint with at most `max_step` steps, or None. Collective.

    Waits for checkpoints that are being written. Ignores checkpoints that an earlier rollback has discarded.

    Raises:
        CheckpointError: the last checkpoint could not be written, or the run's index is damaged.
    """
    step_end.finish(run)
    look = partial(_newest_of_run, run, max_step)
    return run.engine.processes.on_main_rank(look, "find a checkpoint to roll back to")


def roll_back(run: StageRun, request: RollbackRequest) -> None:
    """Restore the requested checkpoint within the run, and record the data to skip. Collective.

    Call it where nothing references the epoch's loader, so that the loader's workers end.

    Callbacks and loggers receive the same calls as for a resume in a new process, up to `on_fit_start`.
    """
    state, history, data = run.state, run.history, run.data.made
    assert data is not None  # an epoch was running
    left = state.to_dict()
    stop = data.loader.position(state.batch_in_epoch)
    history.num_rollbacks += 1
    if run.is_main:
        history.abandoned |= run.folder.written_after(request.path)
    run.engine.step.discard_step()
    run.saves.forget()
    run.logs.metrics.in_step, run.logs.metrics.batch = False, None
    run.logs.metrics.flush_step()  # discards values of the abandoned steps
    run.note("rollback", reason=request.reason, path=str(request.path))
    if run.logs.group is not None:
        run.logs.group.finish("interrupted")  # restarted below, where they remove entries after the checkpoint
    data.close()  # its workers have read past the checkpoint's position
    run.fire("setup", "fit")
    for config in run.loop.schedules.configs:
        config.paused = False
    opened = Opened.read(open_checkpoint(request.path), LoadRequest(), full=True)
    opened.show(run)
    restore.enter_checkpoint(run, opened)
    state.seconds = left["seconds"]  # training time includes the abandoned steps
    if not run.settings.arguments.reload_dataloaders_every_n_epochs:
        run.data.made = data
    if request.skips_data:
        _skip_since(run, left, stop, request.reason)
    start_loggers(run, "fit")
    run.loop.validated_at = -1
    run.loop.last_result = None
    run.engine.phase = Phase.BETWEEN_STEPS
    run.warn(
        f"{request.reason}. Rolled back from step {left['step']} to step {state.step} ({request.path}); rollback "
        f"{history.num_rollbacks} of at most {run.settings.arguments.max_rollbacks}."
    )


def _skip_since(run: StageRun, left: dict[str, Any], stop: dict[str, int], reason: str) -> None:
    """Record the data between the restored position and the position before the rollback as skipped."""
    state = run.state
    place = (run.data.place or {}).get("position") or {"batch": 0, "samples": 0, "micro_batches": 0}
    unit = unit_of(stop)
    for epoch in range(state.epoch, left["epoch"] + 1):
        first = int(place["batch"]) if epoch == state.epoch else 0
        start = int(place.get(unit, 0)) if epoch == state.epoch else 0
        ends_here = epoch == left["epoch"]
        run.history.skipped_batches.append(
            SkippedData(
                reason=reason,
                epoch=epoch,
                step=state.step,
                first_batch=first,
                num_batches=left["batch_in_epoch"] - first if ends_here else None,
                unit=unit,
                start=start,
                stop=stop[unit] if ends_here else None,
            )
        )


def _newest_of_run(run: StageRun, max_step: int) -> Path | None:
    """Return the newest valid full checkpoint of this run with at most `max_step` completed steps, or None.

    Candidates are the checkpoints in the run's index and the one that the run was resumed from.
    """
    candidates = run.folder.listed(
        lambda entry: entry.kind == "full" and entry.step <= max_step and entry.created not in run.history.abandoned
    )
    if run.resume.origin is not None and run.resume.origin.is_dir():
        candidates.append(open_or_error(run.resume.origin))
    found = run.folder.newest(candidates, accepts=lambda found: found.manifest.step <= max_step)
    return None if found is None else found.path
