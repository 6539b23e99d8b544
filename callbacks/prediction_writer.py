"""Write predictions batch by batch, or at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Literal

from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.hooks import StepOutput
from trainwright.core.run import Run, Stage
from trainwright.core.task import TaskModule
from trainwright.core.tree import Batch


class WriteInterval(StrEnum):
    """Times at which predictions are written. Members are equal to their text."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """True if predictions are written after each batch."""
        return self is not WriteInterval.EPOCH

    @property
    def on_epoch(self) -> bool:
        """True if predictions are written at the end."""
        return self is not WriteInterval.BATCH


_INTERVALS = tuple(map(str, WriteInterval))


class BasePredictionWriter(Callback):
    """Base class of callbacks that write the outputs of `predict`.

    Every rank writes its own predictions. With `trainer.predict(..., return_predictions=False)` and the interval
    `"batch"`, no predictions are kept in memory.

    Args:
        write_interval: `"batch"` calls `write_on_batch_end`. `"epoch"` calls `write_on_epoch_end`, with all predictions
            of this rank. `"batch_and_epoch"` calls both. Default: `"batch"`.

    Raises:
        ConfigurationError: the interval is unknown. In a run: the required method is not overridden.
    """

    def __init__(self, write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch") -> None:
        if write_interval not in _INTERVALS:
            raise ConfigurationError(
                f"write_interval={write_interval!r} is unknown.{nearest(str(write_interval), _INTERVALS)} Known: "
                f"{', '.join(map(repr, _INTERVALS))}."
            )
        self.interval = WriteInterval(write_interval)
        # For `write_on_epoch_end`: for each loader a list with the outputs, and the indices, of each batch.
        self._predictions: list[list[Any]] = []
        self._indices: list[list[Any]] = []
        # Indices of the current loader's next batches. None if they are unknown.
        self._next_indices: Iterator[list[int]] | None = None

    def write_on_batch_end(
        self,
        trainer: Run,
        task: TaskModule,
        prediction: StepOutput,
        batch_indices: Sequence[int] | None,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write the predictions of one batch. Override it.

        Args:
            trainer: the run.
            task: the task.
            prediction: the output of `predict_step`, on its device.
            batch_indices: the batch's indices in the data set; None if the user's own sampler or data set determines
                them.
            batch: the batch, on the device.
            batch_idx: index of the batch among this rank's batches.
            dataloader_idx: index of the loader.
        """
        raise self._not_overridden("write_on_batch_end")

    def write_on_epoch_end(
        self, trainer: Run, task: TaskModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Write all of this rank's predictions. Override it.

        Args:
            trainer: the run.
            task: the task.
            predictions: list of the outputs of `predict_step`. With several loaders, a list of such lists.
            batch_indices: for each loader a list with the indices of each batch (see `write_on_batch_end`).
        """
        raise self._not_overridden("write_on_epoch_end")

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        self._forget()
        # Before the first batch: a missing method must not be noticed only after a long prediction.
        cls = type(self)
        base = BasePredictionWriter
        if self.interval.on_batch and cls.write_on_batch_end is base.write_on_batch_end:
            raise self._not_overridden("write_on_batch_end")
        if self.interval.on_epoch and cls.write_on_epoch_end is base.write_on_epoch_end:
            raise self._not_overridden("write_on_epoch_end")

    def on_predict_batch_end(
        self, trainer: Run, task: TaskModule, outputs: StepOutput, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0:  # a loader begins
            self._next_indices = trainer.batch_indices(dataloader_idx)
        indices = None if self._next_indices is None else next(self._next_indices)
        if self.interval.on_batch:
            self.write_on_batch_end(trainer, task, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.interval.on_epoch:
            while len(self._predictions) <= dataloader_idx:
                self._predictions.append([])
                self._indices.append([])
            self._predictions[dataloader_idx].append(outputs)
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        if self.interval.on_epoch:
            predictions: list[Any] = self._predictions
            if len(trainer.num_eval_batches) == 1:
                predictions = predictions[0] if predictions else []
            self.write_on_epoch_end(trainer, task, predictions, self._indices)
        self._forget()

    def teardown(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        self._forget()

    def _not_overridden(self, method: str) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self).__name__}(write_interval={str(self.interval)!r}) needs {method}. Define it."
        )

    def _forget(self) -> None:
        self._predictions = []
        self._indices = []
        self._next_indices = None
