"""The state of a Trainer (`trainer.state`) and the progress of a run.

`RunState` is the training progress (`TrainState`) and, under Lightning's names, the stage and its status. `RunProgress`
contains it and the rest of what all stages of a Trainer share. Checkpoints contain the progress.
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


class TrainerStages(Protocol):
    """The part of a Trainer that `RunState` reads.

    Attributes:
        verb: the current or last stage; None before the first.
        status: value of a `TrainerStatus`.
    """

    verb: Stage | None
    status: str

    @property
    def stage(self) -> Stage | None:
        """The stage that is running, or None."""

    @property
    def run(self) -> Any:
        """The run of the current or last stage."""


class RunState(TrainState):
    """The progress of a Trainer. Copying or pickling it gives a plain `TrainState`.

    Args:
        trainer: provides the stage and its status.
        progress: initial training progress, which is copied. Default: None, the start of training.
    """

    __slots__ = ("_trainer",)

    def __init__(self, trainer: TrainerStages, progress: TrainState | None = None) -> None:
        super().__init__()
        self._trainer = trainer
        if progress is not None:
            self.load_dict(progress.to_dict())

    @property
    def fn(self) -> TrainerFn | None:
        """The current or last stage; None before the first."""
        return None if self._trainer.verb is None else TrainerFn(self._trainer.verb)

    @property
    def stage(self) -> RunningStage | None:
        """The kind of steps that run: training, sanity check or an evaluation; None between stages."""
        evaluation = self._trainer.run.evaluation
        stage = self._trainer.stage
        if evaluation.sanity_checking:
            return RunningStage.SANITY_CHECKING
        if evaluation.kind is not None:  # also a validation within a fit
            return RunningStage(evaluation.kind)
        if stage is None:
            return None
        return RunningStage.TRAINING if stage == "fit" else RunningStage(stage)

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

    def __eq__(self, other: object) -> bool:  # a dataclass's own `__eq__` requires the same class
        if not isinstance(other, TrainState):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __reduce__(self) -> tuple[Any, ...]:  # the Trainer cannot be pickled, and a copy must not change with it
        return TrainState, tuple(self.to_dict().values())


@dataclass(slots=True)
class RunProgress:
    """The progress of a run, which all stages of a Trainer continue.

    Attributes:
        state: training progress.
        seed: seed of the data order; None until the processes have started, unless the user has passed one.
        run_id: identifies this run's checkpoints in a shared folder. A resume keeps it.
        skipped_batches: training data that was read without changing weights, in order.
        num_rollbacks: number of rollbacks.
        abandoned: creation times of checkpoints that a rollback has discarded. Their files may still exist.
        skipped_in_a_row: number of consecutive steps that were skipped because of `on_nonfinite`, up to now.
        open_metrics: aggregated metrics of the epoch that a limit has ended within, for each data rank: the results of
            `CheckpointContents.metrics_state`. The next fit of this Trainer restores and clears them. Otherwise empty.
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
        # `state` is changed in place, because users may hold a reference to `trainer.state`.
        self.state.load_dict(other.state.to_dict())
        for field_ in fields(self):
            if field_.name != "state":
                setattr(self, field_.name, getattr(other, field_.name))

    def for_trial(self, state: TrainState) -> RunProgress:
        """Return a copy with another training progress, for a trial. The trial does not change this object."""
        return replace(self, state=state, skipped_batches=list(self.skipped_batches), abandoned=set(self.abandoned))

    def skipped_data(self) -> dict[str, Any]:
        """Return the skipped data and rollbacks for a checkpoint, serializable as JSON."""
        return {
            "skipped": [skipped.to_dict() for skipped in self.skipped_batches],
            "num_rollbacks": self.num_rollbacks,
            "abandoned": sorted(self.abandoned),
        }

    def add_skipped_data(self, saved: dict[str, Any]) -> None:
        """Merge the result of `skipped_data`. Existing entries stay.

        After a rollback to an older checkpoint, the run keeps the list of data that it has skipped since.
        """
        for entry in saved.get("skipped", []):
            skipped = SkippedData(**entry)
            if skipped not in self.skipped_batches:
                self.skipped_batches.append(skipped)
        self.num_rollbacks = max(self.num_rollbacks, saved.get("num_rollbacks", 0))
        self.abandoned.update(saved.get("abandoned", []))
