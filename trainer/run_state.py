"""`trainer.state`: training progress and, under Lightning's names, the current stage and status."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Protocol

from trainwright.core.run import Stage
from trainwright.core.state import TrainState


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

    @property
    def sanity_checking(self) -> bool:
        """True during the validation before training."""


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
        if trainer.sanity_checking:
            return RunningStage.SANITY_CHECKING
        if trainer.run.evaluating is not None:
            return RunningStage(trainer.run.evaluating)
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
