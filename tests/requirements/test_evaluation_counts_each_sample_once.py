"""However many samples and processes there are, an evaluation counts each sample once and keeps their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask

_SIZES = range(1, 34)
_BATCH_SIZE = 4


class SampleTask(RegressionTask):
    """Logs numbers of which a sample counted twice, or not at all, changes every one.

    Samples are multiples of 12, so that the means of 1 to 4 of them are whole and every sum is exact in any order.
    """

    def _log_all(self, stage: str, batch: Any) -> None:
        (samples,) = batch
        self.log(f"{stage}_mean", samples.float().mean())
        self.log(f"{stage}_sum", samples.sum(), reduce_fx="sum")
        self.log(f"{stage}_count", float(len(samples)), reduce_fx="sum")
        self.log(f"{stage}_max", samples.max(), reduce_fx="max")
        self.log(f"{stage}_min", samples.min(), reduce_fx="min")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log."""
        self._log_all("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log."""
        self._log_all("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the samples."""
        samples: torch.Tensor = batch[0]
        return samples


def _evaluate_all() -> list[Any]:
    found = []
    for n in _SIZES:
        loader = DataLoader(TensorDataset(12 * torch.arange(1, n + 1)), batch_size=_BATCH_SIZE)
        task, trainer = SampleTask(), quiet_trainer(devices="auto")
        predicted = trainer.predict(task, loader) or []
        found.append(
            (
                trainer.validate(task, loader, verbose=False),
                trainer.test(task, loader, verbose=False),
                [batch.tolist() for batch in predicted],
            )
        )
    return found


def test_one_process_counts_each_sample_once() -> None:
    for n, (validated, tested, predicted) in zip(_SIZES, _evaluate_all(), strict=True):
        samples = [12 * i for i in range(1, n + 1)]
        expected = {"mean": 6.0 * (n + 1), "sum": sum(samples), "count": n, "max": 12 * n, "min": 12}
        assert validated == [{f"val_{name}": value for name, value in expected.items()}]
        assert tested == [{f"test_{name}": value for name, value in expected.items()}]
        assert predicted == [samples[i : i + _BATCH_SIZE] for i in range(0, n, _BATCH_SIZE)]


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_several_processes_give_exactly_what_one_gives(world_size: int) -> None:
    alone = _evaluate_all()
    for rank, found in enumerate(run_distributed(_evaluate_all, world_size, timeout=120)):
        for n, mine, wanted in zip(_SIZES, found, alone, strict=True):
            assert mine == wanted, (rank, n)
