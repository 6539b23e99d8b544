"""Small tasks and random data under the names of `lightning.pytorch.demos.boring_classes`, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainwright.core.task import TaskModule
from trainwright.data.datamodule import DataModule

_SIZE = 32
_LENGTH = 64


class RandomDataset(Dataset[Tensor]):
    """Data set of `length` random vectors with `size` numbers each."""

    def __init__(self, size: int, length: int) -> None:
        self.data = torch.randn(length, size)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


class RandomDictDataset(Dataset[dict[str, Tensor]]):
    """Data set of dicts with two vectors, `a` and `b = a + 2`."""

    def __init__(self, size: int, length: int) -> None:
        self.vectors = RandomDataset(size, length)

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        vector = self.vectors[index]
        return {"a": vector, "b": vector + 2}


class RandomIterableDataset(IterableDataset[Tensor]):
    """Iterable data set of `count` random vectors with `size` numbers each. `shard` divides them."""

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return self.shard(0, 1)

    def shard(self, index: int, count: int) -> Iterator[Tensor]:
        """Yield the vectors of one of `count` parts."""
        for _ in range(index, self.count, count):
            yield torch.randn(self.size)


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """`RandomIterableDataset` with a length."""

    def __len__(self) -> int:
        return self.count


class BoringModel(TaskModule):
    """Task with one linear layer and random data. It defines every loader, and every step except `predict_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_SIZE, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        # torch.jit.script takes a comment that begins with "type:" for a signature, so the type is stated here.
        output: Tensor = self.layer(x)
        return output

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the mean squared distance from the labels. Default: ones."""
        return nn.functional.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Return the loss as `x`."""
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Return the loss as `y`."""
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        """Return SGD, and a schedule of epochs."""
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        """Return a loader of random vectors."""
        return _loader()

    def val_dataloader(self) -> Any:
        """Return a loader of random vectors."""
        return _loader()

    def test_dataloader(self) -> Any:
        """Return a loader of random vectors."""
        return _loader()

    def predict_dataloader(self) -> Any:
        """Return a loader of random vectors."""
        return _loader()


class ManualOptimBoringModel(BoringModel):
    """`BoringModel` with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Take an optimizer step and return the loss."""
        optimizer: Any = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class BoringDataModule(DataModule):
    """Data module with random vectors for every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(_SIZE, 4 * _LENGTH)

    def setup(self, stage: str) -> None:
        """Divide the vectors between the stages."""
        del stage
        parts = torch.utils.data.random_split(self.random_full, [_LENGTH] * 4, torch.Generator().manual_seed(0))
        self.random_train, self.random_val, self.random_test, self.random_predict = parts

    def train_dataloader(self) -> Any:
        """Return a loader of the first part."""
        return DataLoader(self.random_train)

    def val_dataloader(self) -> Any:
        """Return a loader of the second part."""
        return DataLoader(self.random_val)

    def test_dataloader(self) -> Any:
        """Return a loader of the third part."""
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> Any:
        """Return a loader of the last part."""
        return DataLoader(self.random_predict)


class DemoModel(TaskModule):
    """Task with one linear layer and Adam. It has no loaders."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(_SIZE, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations of a batch of any shape with 32 numbers per sample."""
        return torch.relu(self.l1(x.flatten(1)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the sum of the activations."""
        return self(batch).sum()

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def _loader() -> DataLoader[Tensor]:
    return DataLoader(RandomDataset(_SIZE, _LENGTH))
