"""What the Trainer's tests share: a Trainer that is silent and writes nothing, and tasks that note what happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from tests.helpers import runs
from tests.helpers.tasks import Batch, RegressionTask
from trainwright.callbacks.callback import Callback
from trainwright.core.task import TaskModule
from trainwright.loggers.logger import Logger, RunInfo
from trainwright.trainer.trainer import Trainer


def quiet_trainer(**arguments: Any) -> Trainer:
    """Return `tests.helpers.runs.quiet_trainer` that leaves the sanity check out too."""
    return runs.quiet_trainer(**{"num_sanity_val_steps": 0, **arguments})


def fitted(task: TaskModule, *loaders: Any, **arguments: Any) -> Trainer:
    """Return `tests.helpers.runs.fitted` that leaves the sanity check out too."""
    return runs.fitted(task, *loaders, **{"num_sanity_val_steps": 0, **arguments})


def _counts(event: str) -> Any:
    def count(
        self: Any, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        counts = self.batches[event]
        counts[dataloader_idx] = counts.get(dataloader_idx, 0) + 1

    return count


class Tally(Callback):
    """Counts batches by loader, and notes epochs that ended and the (epoch, step) of every validation."""

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

    on_validation_batch_end, on_test_batch_end, on_predict_batch_end = map(_counts, ("validation", "test", "predict"))


class MemoryLogger(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.calls: list[str] = []
        self.hyper_parameters: dict[str, Any] = {}

    @property
    def statuses(self) -> list[str]:
        return [call.removeprefix("finish ") for call in self.calls if call.startswith("finish")]

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]

    def values(self, name: str) -> dict[int, float]:
        return {step: row[name] for step, row in self.rows if name in row}

    def start(self, run: RunInfo) -> None:
        self.calls.append("start")

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.hyper_parameters |= params

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(metrics)))

    def flush(self) -> None:
        self.calls.append("flush")

    def finish(self, status: Any) -> None:
        self.calls.append(f"finish {status}")


class AfterBatch(Callback):
    """Call `act(trainer)` at the end of every training batch for which `when(trainer, batch_idx)` is true."""

    def __init__(self, when: Callable[[Any, int], bool], act: Callable[[Any], None]) -> None:
        self.when = when
        self.act = act

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.when(trainer, batch_idx):
            self.act(trainer)


def ask_to_stop(trainer: Any) -> None:
    trainer.should_stop = True


class Endless(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield [torch.ones(4), torch.zeros(1)]


def weights_of(task: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in task.parameters()])


class Untouched(RegressionTask):
    """Fails as soon as a hook of its life runs: an error must have come before."""

    def prepare_data(self) -> None:
        raise AssertionError("the stage has begun")

    def setup(self, stage: str) -> None:
        raise AssertionError("the stage has begun")


class DecayingTask(RegressionTask):
    """SGD with momentum and a schedule by steps: everything a checkpoint must bring back."""

    def __init__(self, **options: Any) -> None:
        super().__init__(momentum=0.9, **options)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class WiderTask(DecayingTask):
    """Has a weight that checkpoints of a `DecayingTask` or `RegressionTask` lack."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


class ByHand(RegressionTask):
    """Optimizes by hand, with a step after `every` batches and gradients clipped to `clip`."""

    def __init__(self, every: int = 1, clip: float | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False
        self.every, self.clip = every, clip

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch) / self.every)
        if (batch_idx + 1) % self.every == 0:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, self.clip)
            optimizer.step()
            optimizer.zero_grad()
