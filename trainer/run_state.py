"""The state of a Trainer (`trainer.state`) and the progress of a run.

The state has the training progress and, under Lightning's names, the stage and its status. All stages of a Trainer
share the progress. Checkpoints contain it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Protocol

from trainwright.core.run import Stage
from trainwright.core.state import SkippedData, TrainState


class TrainerFn(StrEnum):
    """Methods of a Trainer that run a stage. Members equal their strings."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(StrEnum):
    """Kinds of steps that a Trainer runs. Members equal their strings."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class TrainerStatus(StrEnum):
    """Status of the last stage. Members equal their strings."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"


class Asked(Protocol):
    """The part of a Trainer that `RunState` reads."""

    verb: Stage | None
    status: str

    @property
    def stage(self) -> Stage | None:
        """The stage that is running, or None."""

    @property
    def run(self) -> Any:
        """The run of the current stage."""


class RunState(TrainState):
    """The progress of a Trainer. Copying or pickling it gives a plain `TrainState`.

    Args:
        trainer: provides the stage and its status.
        clock: initial training progress. Default: None, the start of training.
    """

    __slots__ = ("_trainer",)

    def __init__(self, trainer: Asked, clock: TrainState | None = None) -> None:
        super().__init__()
        self._trainer = trainer
        if clock is not None:
            self.load_dict(clock.to_dict())

    @property
    def fn(self) -> TrainerFn | None:
        """The current or last stage; None before the first."""
        return None if self._trainer.verb is None else TrainerFn(self._trainer.verb)

    @property
    def stage(self) -> RunningStage | None:
        """The kind of steps that run: training, sanity check or an evaluation; None between stages."""
        trainer = self._trainer
        evaluation = self._trainer.run.evaluation
        if evaluation.sanity_checking:
            return RunningStage.SANITY_CHECKING
        if evaluation.kind is not None:
            return RunningStage(evaluation.kind)
        return None if trainer.stage is None else RunningStage("train" if trainer.stage == "fit" else trainer.stage)

    @property
    def status(self) -> TrainerStatus:
        """Status of the current or last stage."""
        return TrainerStatus(self._trainer.status)

    @property
    def finished(self) -> bool:
        """True if the last stage has completed."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """True if the last stage has completed or was interrupted."""
        return self.status in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, TrainState) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainState, tuple(self.to_dict().values())


@dataclass(slots=True)
class RunProgress:
    """The progress of a run, which all stages of a Trainer continue.

    Attributes:
        state: training progress.
        seed: seed of the data order; None until the processes have started.
        run_id: identifies this run's checkpoints in a shared folder. A resume keeps it.
        skipped_batches: training data that was read without changing weights, in order.
        num_rollbacks: number of rollbacks.
        abandoned: creation times of checkpoints that a rollback has discarded.
        skipped_in_a_row: number of consecutive skipped steps.
        open_metrics: aggregated metrics of an unfinished epoch, for each data rank.
    """

    state: TrainState
    seed: int | None
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    skipped_batches: list[SkippedData] = field(default_factory=list)
    num_rollbacks: int = 0
    abandoned: set[str] = field(default_factory=set)
    skipped_in_a_row: int = 0
    open_metrics: list[dict[str, Any]] = field(default_factory=list)

    def take(self, other: RunProgress) -> None:
        """Take over the progress of the same run in another process."""
        self.state.load_dict(other.state.to_dict())
        for each in fields(self):
            if each.name != "state":  # users hold the object
                setattr(self, each.name, getattr(other, each.name))

    def for_trial(self, state: TrainState) -> RunProgress:
        """Return a copy with the given progress, for a trial."""
        return replace(self, state=state, skipped_batches=list(self.skipped_batches), abandoned=set(self.abandoned))

    def skipped_data(self) -> dict[str, Any]:
        """Return the skipped data and rollbacks for a checkpoint, serializable as JSON."""
        return {
            "skipped": [skipped.to_dict() for skipped in self.skipped_batches],
            "num_rollbacks": self.num_rollbacks,
            "abandoned": sorted(self.abandoned),
        }

    def add_skipped_data(self, saved: dict[str, Any]) -> None:
        """Merge the result of `skipped_data`. Existing entries are kept."""
        for item in saved.get("skipped", []):
            skipped = SkippedData(**item)
            if skipped not in self.skipped_batches:
                self.skipped_batches.append(skipped)
        self.num_rollbacks = max(self.num_rollbacks, saved.get("num_rollbacks", 0))
        self.abandoned.update(saved.get("abandoned", []))
