from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from trainwright.callbacks import BasePredictionWriter
from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule


class _Double(TaskModule):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return 2 * torch.as_tensor(batch[0])


class _Writer(BasePredictionWriter):
    def __init__(self, write_interval: Any = "batch") -> None:
        super().__init__(write_interval)
        self.batches: list[tuple[list[float], Any, int, int]] = []
        self.epochs: list[tuple[Any, Any]] = []

    def write_on_batch_end(
        self, trainer: Any, task: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        torch.testing.assert_close(prediction, 2 * batch[0])
        self.batches.append((prediction.tolist(), batch_indices, batch_idx, loader))

    def write_on_epoch_end(self, trainer: Any, task: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((predictions, batch_indices))


def _loader(num: int = 5, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(num))), batch_size=batch_size, **options)


def _predict(writer: BasePredictionWriter, loaders: Any, **arguments: Any) -> None:
    trainer = quiet_trainer(callbacks=writer, **arguments)
    assert trainer.predict(_Double(), loaders, return_predictions=False) is None


def test_each_batch_is_written_with_its_indices() -> None:
    writer = _Writer()
    _predict(writer, _loader(num_workers=2))
    assert writer.batches == [([0.0, 2.0], [0, 1], 0, 0), ([4.0, 6.0], [2, 3], 1, 0), ([8.0], [4], 2, 0)]
    assert writer.epochs == []


def test_all_batches_are_written_at_the_end() -> None:
    writer = _Writer("epoch")
    _predict(writer, _loader())
    [(predictions, indices)] = writer.epochs
    assert [p.tolist() for p in predictions] == [[0.0, 2.0], [4.0, 6.0], [8.0]]
    assert indices == [[[0, 1], [2, 3], [4]]]
    assert writer.batches == []


def test_an_unknown_interval_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'batch'"):
        _Writer("batches")


@pytest.mark.parametrize(("interval", "method"), [("batch", "batch"), ("epoch", "epoch")])
def test_a_writer_that_cannot_write_is_refused_at_the_start(interval: Any, method: str) -> None:
    with pytest.raises(ConfigurationError, match=f"needs write_on_{method}_end"):
        _predict(BasePredictionWriter(interval), _loader())


def _on_rank() -> list[Any]:
    writer = _Writer()
    _predict(writer, _loader(7), devices="auto")
    return [(prediction, indices) for prediction, indices, _, _ in writer.batches]


@pytest.mark.distributed
def test_each_rank_writes_its_own_share() -> None:
    first, second = run_distributed(_on_rank, 2, init=False)
    assert first == [([0.0, 2.0], [0, 1]), ([8.0, 10.0], [4, 5])]
    assert second == [([4.0, 6.0], [2, 3]), ([12.0], [6])]
