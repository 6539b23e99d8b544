"""`trainer.state`: the run's clock, which also answers what runs and how it ended, in Lightning's words."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Protocol

from trainwright.core.run import Stage
from trainwright.core.state import TrainState


class TrainerFn(StrEnum):
    """The verbs of a Trainer; equal to their texts."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(StrEnum):
    """What a Trainer is doing with its data; equal to their texts."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class TrainerStatus(StrEnum):
    """How far a Trainer has come with its last verb; equal to their texts."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"


class Asked(Protocol):
    """Who knows what runs: a Trainer."""

    verb: Stage | None
    status: str

    @property
    def stage(self) -> Stage | None:
        """The stage that is running, or None."""

    @property
    def run(self) -> Any:
        """The present stage's run, which knows the evaluation that is running."""

    @property
    def sanity_checking(self) -> bool:
        """Whether it is the one before training."""


class RunState(TrainState):
    """The clock of a Trainer; a copy of it, also one sent to another process, is a plain `TrainState`.

    Args:
        trainer: knows what runs.
        clock: where training stands; from scratch when None.
    """

    __slots__ = ("_trainer",)

    def __init__(self, trainer: Asked, clock: TrainState | None = None) -> None:
        super().__init__()
        self._trainer = trainer
        if clock is not None:
            self.load_dict(clock.to_dict())

    @property
    def fn(self) -> TrainerFn | None:
        """The verb that runs, or ran last; None before the first."""
        return None if self._trainer.verb is None else TrainerFn(self._trainer.verb)

    @property
    def stage(self) -> RunningStage | None:
        """What is being done: training, the sanity check, or one of the evaluations; None between verbs."""
        trainer = self._trainer
        if trainer.sanity_checking:
            return RunningStage.SANITY_CHECKING
        if trainer.run.evaluating is not None:
            return RunningStage(trainer.run.evaluating)
        return None if trainer.stage is None else RunningStage("train" if trainer.stage == "fit" else trainer.stage)

    @property
    def status(self) -> TrainerStatus:
        """Whether a verb runs, has finished, or was ended by Ctrl-C or an error."""
        return TrainerStatus(self._trainer.status)

    @property
    def finished(self) -> bool:
        """Whether the last verb has come to its end."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the last verb has ended, in whatever way."""
        return self.status in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, TrainState) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainState, tuple(self.to_dict().values())
