"""Going back to a checkpoint within a run, and the data that is left out from then on."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainwright.checkpoint import RunIndex, check_checkpoint, read_manifest
from trainwright.core.errors import CheckpointError, RollbackError, TrainwrightWarning
from trainwright.core.state import SkippedData
from trainwright.trainer import checkpointing
from trainwright.trainer.facts import RunFacts
from trainwright.trainer.load_request import LoadRequest
from trainwright.trainer.loaders import TrainData
from trainwright.trainer.logger_start import start_loggers
from trainwright.trainer.safe_point import SafePoint
from trainwright.trainer.settings import Settings

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


class Rollbacks(RunFacts):
    """What a run does to return to one of its checkpoints; a part of the Trainer.

    Attributes:
        max_rollbacks: it may go back so many times.
        num_rollbacks: it has gone back so many times.
        max_skipped: so many groups may be skipped one after the other; None: any number.
        skipped_in_a_row: so many have been since the last one that was not.
    """

    settings: Settings
    max_rollbacks: int
    max_skipped: int | None
    skipped_in_a_row: int
    safe_point: SafePoint
    _train_data: TrainData | None
    _position: dict[str, Any] | None
    _validated_at: int
    num_rollbacks: int
    _abandoned: set[str]  # when the checkpoints of branches that were left had been written
    _origin: Path | None  # the checkpoint that this fit was resumed from

    @abstractmethod
    def _begin_fit(self) -> None: ...

    @abstractmethod
    def at_safe_point(self, action: Callable[[], None]) -> None:
        """Call `action` once, at the end of the present step; see `Run.at_safe_point`."""

    def _forget_rollbacks(self, max_rollbacks: int, max_skipped: int | None) -> None:
        self.max_rollbacks, self.max_skipped = max_rollbacks, max_skipped
        self.skipped_in_a_row = 0
        self.num_rollbacks = 0
        self.skipped_batches: list[SkippedData] = []
        self._abandoned = set()

    def enter_checkpoint(self, opened: checkpointing.Opened) -> None:
        """Put a full checkpoint into the prepared run, so that the next epoch goes on from it.

        Every rank must call it; nothing is communicated.
        """
        checkpointing.restore(self, opened)
        if self.state.epoch_done:
            self.state.begin_next_epoch()
            if self._position is not None:
                self._position["position"] = None

    def finish_restoring(self) -> None:
        """Restore what had to wait for `on_fit_start`."""
        restore, self.restore_after_fit_start = self.restore_after_fit_start, None
        if restore is not None:
            restore()

    @abstractmethod
    def _restore_last(self) -> None: ...

    def request_rollback(self, reason: str, *, before_step: int) -> None:
        """Go back to an earlier checkpoint at the next safe point; see `Run.request_rollback`."""
        self.at_safe_point(partial(self._roll_back, reason, before_step))

    def _roll_back(self, reason: str, before_step: int) -> None:
        if self.num_rollbacks >= self.max_rollbacks:
            raise RollbackError(
                f"{reason}. The run has gone back to a checkpoint {self.num_rollbacks} time(s) already, and "
                f"max_rollbacks={self.max_rollbacks}. Lower the learning rate, look at the data in "
                "trainer.skipped_batches, or raise max_rollbacks."
            )
        path = self.find_checkpoint(before_step)
        if path is not None:
            raise RollBack(Wish(path, reason, leaves_out=True))
        self.warn(
            f"{reason}, but this run has no full checkpoint of step {before_step} or before to go back to: training "
            "goes on. Save more often, and keep more than the newest (ModelCheckpoint(save_top_k=-1))."
        )

    def find_checkpoint(self, max_step: int) -> Path | None:
        """Return this run's newest valid full checkpoint with at most `max_step` steps, or None. Collective.

        Waits for those that are still being written. Checkpoints of a branch that the run has left do not count.

        Raises:
            CheckpointError: the last one could not be written, or the run's index is damaged.
        """
        self.safe_point.finish()
        look = partial(_newest_of_run, self, max_step, self._abandoned, self._origin)
        return checkpointing.on_main_rank(self.strategy.processes, look, "look for a checkpoint to go back to")

    def with_rollbacks(self, train_epoch: Callable[[], None]) -> None:
        """Train an epoch, or what is left of it; a wish to go back ends it and is granted. Collective then."""
        try:
            train_epoch()
            return
        except RollBack as unwound:
            wish = unwound.wish
        # Out here, since the exception's traceback keeps the epoch's loader, and its workers, alive.
        self._go_back(wish)

    def _go_back(self, wish: Wish) -> None:
        state, logging, data = self.state, self.logging, self._train_data
        assert data is not None  # an epoch was running
        left = state.to_dict()
        stop = data.loader.position(state.batch_in_epoch)
        self.num_rollbacks += 1
        if self.is_global_zero:
            self._abandoned |= _written_after(self, wish.path)
        self.strategy.drop_group()
        self.safe_point.forget()
        self.metrics.in_step, self.metrics.batch = False, None
        self.metrics.flush_step()  # of the branch that is left
        if logging is not None:
            logging.finish("interrupted")  # started again below, they remove what lies behind the checkpoint
        data.close()  # workers that are ahead of the place to go back to
        # Callbacks and loggers live through what a resume in a new process would be to them.
        self.fire("setup", "fit")
        for config in self.lr_scheduler_configs:
            config.paused = False
        opened = checkpointing.Opened.at(wish.path, LoadRequest(), full=True)
        opened.show(self)
        self.enter_checkpoint(opened)
        state.seconds = left["seconds"]  # time does not go back
        if not self.settings.arguments["reload_dataloaders_every_n_epochs"]:
            self._train_data = data
        if wish.leaves_out:
            self._leave_out_since(left, stop, wish.reason)
        start_loggers(self, "fit", hyperparameters=self.settings.arguments["enable_autolog_hparams"])
        self._begin_fit()
        self._validated_at, self.last_result, self.at_step_boundary = -1, None, True
        self.warn(
            f"{wish.reason}. Went back from step {left['step']} to step {state.step} ({wish.path}); rollback "
            f"{self.num_rollbacks} of at most {self.max_rollbacks}."
        )
        self.fire("on_fit_start")
        self.finish_restoring()
        self.fire("on_train_start")
        if state.batch_in_epoch == 0:
            self._restore_last()

    def _leave_out_since(self, left: dict[str, Any], stop: dict[str, int], reason: str) -> None:
        """Record what lies between the place that was just restored and the one that was left."""
        state = self.state
        place = (self._position or {}).get("position") or {"batch": 0, "samples": 0, "micro_batches": 0}
        unit = unit_of(stop)
        for epoch in range(state.epoch, left["epoch"] + 1):
            first = int(place["batch"]) if epoch == state.epoch else 0
            start = int(place.get(unit, 0)) if epoch == state.epoch else 0
            ends_here = epoch == left["epoch"]
            self.skipped_batches.append(
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

    def rollback_state(self) -> dict[str, Any]:
        """Return what a resumed run must know of what was left out, JSON-able; for a checkpoint."""
        return {
            "skipped": [skipped.to_dict() for skipped in self.skipped_batches],
            "num_rollbacks": self.num_rollbacks,
            "abandoned": sorted(self._abandoned),
        }

    def load_rollback_state(self, saved: dict[str, Any]) -> None:
        """Add what `rollback_state` returned to what is known: going back forgets nothing."""
        for item in saved.get("skipped", []):
            skipped = SkippedData(**item)
            if skipped not in self.skipped_batches:
                self.skipped_batches.append(skipped)
        self.num_rollbacks = max(self.num_rollbacks, saved.get("num_rollbacks", 0))
        self._abandoned.update(saved.get("abandoned", []))

    def warn(self, message: str) -> None:
        """Warn, on the main rank."""
        if self.is_global_zero:
            warnings.warn(message, TrainwrightWarning, stacklevel=2)


def _newest_of_run(run: RunFacts, max_step: int, left_behind: Set[str], origin: Path | None) -> Path | None:
    """Return the full checkpoint of this run that was written last, among the valid ones of `max_step` or before.

    Args:
        run: the Trainer; the main rank's.
        max_step: completed optimizer steps.
        left_behind: times of writing of checkpoints that do not count.
        origin: a checkpoint that the run's index need not list, tried when it lists none.
    """
    folder = run.checkpoint_dir
    entries = [
        entry
        for entry in RunIndex(folder, run=run.run_id).entries()
        if entry.kind == "full" and entry.step <= max_step and entry.created not in left_behind
    ]
    candidates = [folder / entry.name for entry in sorted(entries, key=lambda entry: entry.created, reverse=True)]
    if origin is not None and origin.is_dir() and read_manifest(origin).step <= max_step:
        candidates.append(origin)
    for path in candidates:
        try:
            check_checkpoint(path)
        except CheckpointError as error:
            text = f"passing over the damaged checkpoint {path}: {error}"
            warnings.warn(text, TrainwrightWarning, stacklevel=2)
            continue
        return path
    return None


def _written_after(run: RunFacts, path: Path) -> set[str]:
    """Return when those checkpoints in this run's index were written that are younger than `path`."""
    created = read_manifest(path).created
    entries = RunIndex(run.checkpoint_dir, run=run.run_id).entries()
    return {entry.created for entry in entries if entry.created > created}
