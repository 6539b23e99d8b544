"""Small tasks, data and callbacks that many tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright.callbacks.callback import EVENTS, Callback
from trainwright.core.task import TaskModule

Batch = list[torch.Tensor]


def regression_data(num_samples: int = 64, num_features: int = 4, *, seed: int = 0) -> TensorDataset:
    """Return inputs of shape `(num_samples, num_features)` and targets `(num_samples, 1)`: a noisy linear function."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, num_features, generator=generator)
    weights = torch.randn(num_features, 1, generator=generator)
    noise = 0.1 * torch.randn(num_samples, 1, generator=generator)
    return TensorDataset(inputs, inputs @ weights + noise)


def regression_loader(num_samples: int = 64, batch_size: int = 1, *, shuffle: bool = False) -> DataLoader[Any]:
    """Return a loader over `regression_data`; 64 batches of one sample by default."""
    return DataLoader(regression_data(num_samples), batch_size=batch_size, shuffle=shuffle)


class RegressionTask(TaskModule):
    """A two-layer network on `regression_data`; the same weights every time, whatever the generators' state.

    Args:
        lr: SGD's learning rate.
        momentum: SGD's momentum; above 0 the optimizer has a state worth saving.
        dropout: above 0 a step uses the random generator.
        seed: of the initial weights.
    """

    def __init__(self, lr: float = 0.05, momentum: float = 0.0, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.lr = lr
        self.momentum = momentum
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)

    def loss(self, batch: Batch) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class StepTask(RegressionTask):
    """A regression task whose training step is a function of the task, the batch and its index."""

    def __init__(self, step: Callable[[Any, Batch, int], Any], **options: Any) -> None:
        super().__init__(**options)
        self.step = step

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.step(self, batch, batch_idx)


class RecordingCallback(Callback):
    """Write down every event, in order, with the clock at that moment.

    Args:
        only: the events to record; all by default.
        note: called with `(event, trainer)` at each; what it returns is recorded beside the event's name.
    """

    def __init__(self, *only: str, note: Callable[[str, Any], Any] | None = None) -> None:
        unknown = set(only) - set(EVENTS)
        if unknown:
            raise ValueError(f"no such events: {sorted(unknown)}")
        self.events: list[str] = []
        self.notes: list[tuple[str, Any]] = []
        self._note = note
        for event in only or EVENTS:
            # On the instance, so that the table of hooks sees only the events that are recorded.
            setattr(self, event, self._recorder(event))

    def _recorder(self, event: str) -> Callable[..., None]:
        def record(trainer: Any, *_: Any) -> None:
            self.events.append(event)
            if self._note is not None:
                self.notes.append((event, self._note(event, trainer)))

        return record
