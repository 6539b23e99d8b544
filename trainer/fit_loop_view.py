"""`trainer.fit_loop`: the limits and the progress of a fit under the names of Lightning's loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.run import StageRun
from trainwright.trainer.schedule import EndOfFit


@dataclass(frozen=True)
class Counts:
    """Numbers of epochs or batches that a fit has reached. `ready` and `started` include the current one.

    `processed` and `completed` count an epoch after its end hooks, and batches after their optimizer step.
    """

    ready: int
    started: int
    processed: int
    completed: int


@dataclass(frozen=True)
class Progress:
    """Counts of epochs or batches.

    Attributes:
        total: Counts since the run's first fit.
        current: For batches, the counts of the current epoch, on one rank. For epochs, the same as `total`.
        is_last_batch: The current or last batch is the last of its epoch.
    """

    total: Counts
    current: Counts
    is_last_batch: bool


def _counts(reached: int, completed: int) -> Counts:
    """Return the counts if `reached` epochs or batches have begun, of which `completed` have ended."""
    return Counts(ready=reached, started=reached, processed=completed, completed=completed)


class _Limit:
    """A limit of the fit, -1 for no limit. It can be set; a change takes effect in the next fit."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loop: _Loop, owner: type | None = None) -> int:
        limit = getattr(loop._settings.limits, self._name)
        return -1 if limit is None else int(limit)

    def __set__(self, loop: _Loop, value: int | None) -> None:
        loop._settings.limits = loop._settings.limits.with_changed(self._name, value)


class _Loop:
    """Base class of `FitLoopView` and `EpochLoopView`. Attributes that they lack can be neither read nor set.

    Args:
        settings: The Trainer's settings, with the limits.
        find_run: Function that returns the Trainer's current or last run.
    """

    __slots__ = ("_find_run", "_settings")
    _path: ClassVar[str]  # of the view, for errors
    _names: ClassVar[str]  # of its attributes, for errors

    def __init__(self, settings: Settings, find_run: Callable[[], StageRun]) -> None:
        self._settings = settings
        self._find_run = find_run  # called at each use, because every stage has a new run

    max_steps = _Limit()
    min_steps = _Limit()

    @property
    def batch_idx(self) -> int:
        """0-based index of the current or last micro-batch in its epoch; -1 before the first."""
        group = self._run.loop.group
        if group is None:  # outside of an epoch
            return self._run.state.batch_in_epoch - 1
        return group.first_idx + group.index

    @property
    def total_batch_idx(self) -> int:
        """0-based index of the current or last micro-batch among those of all epochs; -1 before the first."""
        state = self._run.state
        return state.batches - state.batch_in_epoch + self.batch_idx

    @property
    def _run(self) -> StageRun:
        return self._find_run()

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{self._path} has no {name!r} here. It has the limits and the progress: {self._names}. See also "
            "trainer.state."
        )


@dataclass(frozen=True)
class DataSource:
    """Source of the loaders of a loop."""

    _find_run: Callable[[], StageRun]
    _stage: str

    def is_defined(self) -> bool:
        """Return whether the call of `fit`, the data module or the task has loaders for this loop."""
        run = self._find_run()
        return run.data.sources.has(self._stage, run.task)


class ValidationLoopView:
    """The validation within a fit: `trainer.fit_loop.epoch_loop.val_loop`.

    Args:
        find_run: Function that returns the Trainer's current or last run.
    """

    def __init__(self, find_run: Callable[[], StageRun]) -> None:
        self._data_source = DataSource(find_run, "validate")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"trainer.fit_loop.epoch_loop.val_loop has no {name!r} here. Use trainer.num_val_batches, "
            "trainer.val_dataloaders and trainer.has_validation."
        )


class EpochLoopView(_Loop):
    """The progress of the batches: `trainer.fit_loop.epoch_loop`."""

    __slots__ = ()
    _path = "trainer.fit_loop.epoch_loop"
    _names = "max_steps, min_steps, batch_idx, total_batch_idx, global_step, batch_progress, and val_loop"

    @property
    def val_loop(self) -> ValidationLoopView:
        """The validation within the fit."""
        return ValidationLoopView(self._find_run)

    @property
    def global_step(self) -> int:
        """Completed optimizer steps."""
        return self._run.state.step

    @property
    def batch_progress(self) -> Progress:
        """Counts of micro-batches."""
        state = self._run.state
        return Progress(
            total=_counts(self.total_batch_idx + 1, state.batches),
            current=_counts(self.batch_idx + 1, state.batch_in_epoch),
            is_last_batch=self._run.loop.is_last_batch,
        )


class FitLoopView(_Loop):
    """The limits and the progress of a fit: `trainer.fit_loop`."""

    __slots__ = ()
    _path = "trainer.fit_loop"
    _names = (
        "max_epochs, min_epochs, max_steps, min_steps, done, batch_idx, total_batch_idx, epoch_progress, and "
        "epoch_loop with its val_loop"
    )

    max_epochs = _Limit()
    min_epochs = _Limit()

    # Libraries read this private name of Lightning, and that of `val_loop`.
    @property
    def _data_source(self) -> DataSource:
        return DataSource(self._find_run, "train")

    @property
    def done(self) -> bool:
        """True if another `fit` would not train: a limit is reached, or `limit_train_batches` is 0."""
        settings = self._settings
        return settings.limit_batches["train"] == 0 or EndOfFit(settings.limits).reached(self._run.state)

    @property
    def epoch_loop(self) -> EpochLoopView:
        """The progress of the batches."""
        return EpochLoopView(self._settings, self._find_run)

    @property
    def epoch_progress(self) -> Progress:
        """Counts of epochs."""
        completed = self._run.state.epoch
        is_running = self._run.running_stage == "fit"
        counts = _counts(completed + 1 if is_running else completed, completed)
        return Progress(total=counts, current=counts, is_last_batch=self._run.loop.is_last_batch)
