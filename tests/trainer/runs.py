"""What the Trainer's tests share: a Trainer that is silent and writes nothing, and tasks that note what happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from tests.helpers import runs
from tests.helpers.tasks import Batch, RegressionTask
from trainwright.callbacks.callback import Callback
from trainwright.trainer.trainer import Trainer


def quiet_trainer(**arguments: Any) -> Trainer:
    """Return `tests.helpers.runs.quiet_trainer` that leaves the sanity check out too, unless told otherwise."""
    return runs.quiet_trainer(**{"num_sanity_val_steps": 0, **arguments})


class Tally(Callback):
    """Count training and evaluation batches, and note the epoch and step at which validations ran.

    Attributes:
        train_batches: training micro-batches that ended.
        train_epochs: 0-based epochs whose end was heard.
        validations: (epoch, step) of every validation, the sanity check excepted.
        batches: event → batches of each loader that ended, by the loader's index.
    """

    def __init__(self) -> None:
        self.train_batches = 0
        self.train_epochs: list[int] = []
        self.validations: list[tuple[int, int]] = []
        self.batches: dict[str, dict[int, int]] = {"validation": {}, "test": {}, "predict": {}}

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.train_batches += 1

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        self.train_epochs.append(trainer.current_epoch)

    def on_validation_end(self, trainer: Any, task: Any) -> None:
        if not trainer.sanity_checking:
            self.validations.append((trainer.current_epoch, trainer.global_step))

    def _count(self, event: str, loader: int) -> None:
        counts = self.batches[event]
        counts[loader] = counts.get(loader, 0) + 1

    def on_validation_batch_end(
        self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count("validation", dataloader_idx)

    def on_test_batch_end(
        self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count("test", dataloader_idx)

    def on_predict_batch_end(
        self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count("predict", dataloader_idx)


class AfterBatch(Callback):
    """Call `act(trainer)` at the end of every training batch for which `when(trainer, batch_idx)` is true."""

    def __init__(self, when: Callable[[Any, int], bool], act: Callable[[Any], None]) -> None:
        self.when = when
        self.act = act

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.when(trainer, batch_idx):
            self.act(trainer)


def ask_to_stop(trainer: Any) -> None:
    """Set `should_stop`, as a user's callback does."""
    trainer.should_stop = True


class Endless(IterableDataset[Batch]):
    """Samples without end and without length."""

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield [torch.ones(4), torch.zeros(1)]


def weights_of(task: torch.nn.Module) -> torch.Tensor:
    """Return a copy of all parameters in one row."""
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in task.parameters()])


class MeasuredTask(RegressionTask):
    """Logs a given value per epoch as `val_measure` in validation and as `train_measure` in training."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = values

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.log("train_measure", self.values[self.current_epoch], on_step=False, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_measure", self.values[self.current_epoch])
