"""Going back to a checkpoint within a run, and the data that is left out from then on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainwright.checkpoint.format.manifests import open_checkpoint, open_or_error
from trainwright.core.errors import RollbackError
from trainwright.core.state import SkippedData
from trainwright.trainer.checkpoints import restore, safe_point
from trainwright.trainer.checkpoints.load_request import LoadRequest, Opened
from trainwright.trainer.logger_start import start_loggers
from trainwright.trainer.run import StageRun

_UNITS = ("samples", "micro_batches", "batch")  # of a place in the data, the most general first


@dataclass(frozen=True, slots=True)
class Wish:
    """Where to go back to.

    Attributes:
        path: the checkpoint.
        reason: why, in words.
        leaves_out: everything that was consumed since the checkpoint is left out from now on.
    """

    path: Path
    reason: str
    leaves_out: bool


class RollBack(Exception):
    """Unwinds the epoch that is running, on every rank alike."""

    def __init__(self, wish: Wish) -> None:
        super().__init__(wish.reason)
        self.wish = wish


def unit_of(place: Mapping[str, int]) -> str:
    """Return the name of the number by which a place in an epoch is told from others."""
    return next(unit for unit in _UNITS if unit in place)


def request(run: StageRun, reason: str, *, before_step: int) -> None:
    """Go back to an earlier checkpoint at the next safe point; see `Run.request_rollback`."""
    run.at_safe_point(partial(_roll_back, run, reason, before_step))


def _roll_back(run: StageRun, reason: str, before_step: int) -> None:
    done, most = run.history.num_rollbacks, run.arguments.max_rollbacks
    if done >= most:
        raise RollbackError(
            f"{reason}. The run has gone back to a checkpoint {done} time(s) already, and max_rollbacks={most}. Lower "
            "the learning rate, look at the data in trainer.skipped_batches, or raise max_rollbacks."
        )
    path = find_checkpoint(run, before_step)
    if path is not None:
        raise RollBack(Wish(path, reason, leaves_out=True))
    run.warn(
        f"{reason}, but this run has no full checkpoint of step {before_step} or before to go back to: training "
        "goes on. Save more often, and keep more than the newest (ModelCheckpoint(save_top_k=-1))."
    )


def find_checkpoint(run: StageRun, max_step: int) -> Path | None:
    """Return this run's newest valid full checkpoint with at most `max_step` steps, or None. Collective.

    Waits for those that are still being written. Checkpoints of a branch that the run has left do not count.

    Raises:
        CheckpointError: the last one could not be written, or the run's index is damaged.
    """
    safe_point.finish(run)
    look = partial(_newest_of_run, run, max_step)
    return run.engine.processes.on_main_rank(look, "look for a checkpoint to go back to")


def go_back(run: StageRun, wish: Wish) -> None:
    """Grant a wish to go back. Collective; call it where nothing keeps the epoch's loader, and its workers, alive.

    Callbacks and loggers live through what a resume in a new process would be to them, up to `on_fit_start`.
    """
    state, history, data = run.state, run.history, run.data.made
    assert data is not None  # an epoch was running
    left = state.to_dict()
    stop = data.loader.position(state.batch_in_epoch)
    history.num_rollbacks += 1
    if run.is_main:
        history.abandoned |= run.folder.written_after(wish.path)
    run.engine.step.discard_step()
    run.saves.forget()
    run.metrics.in_step, run.metrics.batch = False, None
    run.metrics.flush_step()  # of the branch that is left
    if run.logging is not None:
        run.logging.finish("interrupted")  # started again below, they remove what lies behind the checkpoint
    data.close()  # workers that are ahead of the place to go back to
    run.fire("setup", "fit")
    for config in run.lr_scheduler_configs:
        config.paused = False
    opened = Opened.read(open_checkpoint(wish.path), LoadRequest(), full=True)
    opened.show(run)
    restore.enter_checkpoint(run, opened)
    state.seconds = left["seconds"]  # time does not go back
    if not run.arguments.reload_dataloaders_every_n_epochs:
        run.data.made = data
    if wish.leaves_out:
        _leave_out_since(run, left, stop, wish.reason)
    start_loggers(run, "fit")
    run.loop.validated_at, run.loop.last_result, run.loop.at_step_boundary = -1, None, True
    run.warn(
        f"{wish.reason}. Went back from step {left['step']} to step {state.step} ({wish.path}); rollback "
        f"{history.num_rollbacks} of at most {run.arguments.max_rollbacks}."
    )


def _leave_out_since(run: StageRun, left: dict[str, Any], stop: dict[str, int], reason: str) -> None:
    """Record what lies between the place that was just restored and the one that was left."""
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
    """Return the full checkpoint of this run that was written last, among the valid ones of `max_step` or before.

    Args:
        run: the main rank's. The checkpoint that it was resumed from, which its index need not list, comes last.
        max_step: completed optimizer steps.
    """
    candidates = run.folder.listed(
        lambda entry: entry.kind == "full" and entry.step <= max_step and entry.created not in run.history.abandoned
    )
    if run.origin is not None and run.origin.is_dir():
        candidates.append(open_or_error(run.origin))
    found = run.folder.newest(candidates, accepts=lambda found: found.manifest.step <= max_step)
    return None if found is None else found.path
