"""A pass that ends before its loader does takes its workers with it, also those that are stuck in a later sample."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask
from trainwright.data import CombinedLoader


class _StuckLater(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The first samples are quick; those that are fetched ahead of their use take for ever."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index >= 8:
            time.sleep(600)
        return torch.ones(4), torch.ones(1)


def _loader() -> Any:
    return DataLoader(_StuckLater(), batch_size=4, num_workers=2)


def _combined() -> Any:
    return CombinedLoader([_loader(), _loader()], "min_size")


class _Task(RegressionTask):
    """Counts the workers that are left where another pass has just ended, or is about to begin."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch if isinstance(batch[0], torch.Tensor) else batch[0], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        self.left.append(len(multiprocessing.active_children()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [_loader, _combined])
def test_an_evaluation_that_is_limited_leaves_no_worker(make: Any) -> None:
    task = _Task()
    trainer = quiet_trainer(max_epochs=1, limit_val_batches=2)
    for _ in range(2):
        trainer.validate(task, make(), verbose=False)
    assert task.left == [0, 0]
    assert multiprocessing.active_children() == []


def test_workers_that_outlive_passes_do(capfd: pytest.CaptureFixture[str]) -> None:
    task = _Task()
    loader = DataLoader([(torch.ones(4), torch.ones(1))] * 64, batch_size=4, num_workers=1, persistent_workers=True)
    quiet_trainer(max_epochs=2, limit_val_batches=2).fit(task, [(torch.ones(2, 4), torch.ones(2, 1))], loader)
    assert task.left[-1] == 1
    assert multiprocessing.active_children() == []
    assert "Traceback" not in capfd.readouterr().err  # of a worker
