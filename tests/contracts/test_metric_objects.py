"""Under every strategy, metric objects count each sample once, also where a rank repeats a batch or has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.contracts.test_strategy import STRATEGIES, ContractTask, _marked
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from trainwright.callbacks import Callback

torchmetrics = pytest.importorskip("torchmetrics")

_SAMPLES = 12
_BATCH_SIZE = 4  # three batches, so that two ranks need a fourth
_EPOCHS = 2


class _InBatchEnd(Callback):
    """Counts in a hook with a metric object of its own."""

    def __init__(self) -> None:
        self.seen = torchmetrics.SumMetric()

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.update(float(len(batch[0])))
        task.log("callback", self.seen, on_step=False, on_epoch=True)


class _Counting(ContractTask):
    """Counts samples with metric objects that are summed, concatenated and in a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.SumMetric()
        self.values = torchmetrics.CatMetric()
        self.group = torchmetrics.MetricCollection([torchmetrics.SumMetric(), torchmetrics.MaxMetric()])
        self.validated = torchmetrics.SumMetric()
        self.found: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.update(float(len(batch[0])))
        self.values.update(batch[1].flatten())
        self.group(batch[1].flatten())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])
        self.validated.update(float(len(batch[0])))
        self.log("validated", self.validated)

    def on_train_epoch_end(self) -> None:
        values = self.values.compute()
        self.found.append(
            (float(self.seen.compute()), sorted(values.tolist()), sorted(map(float, self.group.compute().values())))
        )
        for metric in (self.seen, self.values, self.group):
            metric.reset()


def _count(name: str) -> tuple[list[Any], dict[str, float]]:
    strategy, processes = STRATEGIES[name]
    numbers = torch.arange(1.0, _SAMPLES + 1).unsqueeze(1)
    loader = DataLoader(TensorDataset(numbers.expand(-1, 4) / _SAMPLES, numbers), batch_size=_BATCH_SIZE)
    task = _Counting()
    trainer = quiet_trainer(
        devices="auto" if processes > 1 else 1,
        strategy=strategy if isinstance(strategy, str) else strategy(),
        max_epochs=_EPOCHS,
        callbacks=[_InBatchEnd()],
    )
    trainer.fit(task, loader, loader)
    return task.found, dict(trainer.callback_metrics)


@pytest.mark.distributed
@pytest.mark.parametrize("name", [_marked(name) for name in STRATEGIES])
def test_metric_objects_count_each_sample_once(name: str) -> None:
    _, processes = STRATEGIES[name]
    of_ranks = [_count(name)] if processes == 1 else run_distributed(lambda: _count(name), processes, timeout=120)
    numbers = [float(i + 1) for i in range(_SAMPLES)]
    for found, metrics in of_ranks:
        if not name.startswith("pp"):  # refused, see docs/pipelines.md
            assert found == [(_SAMPLES, numbers, [max(numbers), sum(numbers)])] * _EPOCHS
        assert metrics["validated"] == _SAMPLES
        assert metrics["callback"] == _SAMPLES
