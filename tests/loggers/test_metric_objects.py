from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from tests.loggers.test_metric_buffer import evaluating
from trainwright.core.errors import ConfigurationError

torchmetrics = pytest.importorskip("torchmetrics")


def test_a_metric_object_is_computed_at_the_epochs_end_and_reset() -> None:
    buffer, metric = evaluating("validate"), torchmetrics.MeanMetric()
    for value in (1.0, 3.0):
        metric.update(torch.tensor(value))
        buffer.log("m", metric)
    assert buffer.flush_epoch().logged == {"m": 2.0}
    assert not metric.update_called


def test_a_metric_objects_step_value_is_that_of_its_last_batch() -> None:
    buffer, metric = evaluating("train"), torchmetrics.MeanMetric()
    for value in (1.0, 3.0):
        metric(torch.tensor(value))
        buffer.log("m", metric, on_step=True, on_epoch=True)
    assert buffer.flush_step().logged == {"m_step": 3.0}
    assert buffer.flush_epoch().logged == {"m_epoch": 2.0}


def test_without_a_batch_value_the_step_value_is_what_has_been_accumulated() -> None:
    buffer, metric = evaluating("train"), torchmetrics.MeanMetric()
    for value in (1.0, 3.0):
        metric.update(torch.tensor(value))
        buffer.log("m", metric)
    assert buffer.flush_step().logged == {"m": 2.0}
    metric.update(torch.tensor(5.0))  # the value before was not remembered as the result
    assert metric.compute() == 3.0


def test_begin_starts_a_metric_over_that_an_unfinished_epoch_left() -> None:
    buffer, metric = evaluating("validate"), torchmetrics.SumMetric()
    metric.update(torch.tensor(100.0))
    buffer.log("m", metric)
    buffer.begin("validate")
    metric.update(torch.tensor(1.0))
    buffer.log("m", metric)
    assert buffer.flush_epoch().logged == {"m": 1.0}


def test_one_metric_object_for_two_loaders_is_refused() -> None:
    buffer, metric = evaluating("validate", num_dataloaders=2), torchmetrics.SumMetric()
    metric.update(torch.tensor(1.0))
    buffer.dataloader_idx = 0
    buffer.log("m", metric)
    buffer.dataloader_idx = 1
    with pytest.raises(ConfigurationError, match=r"one metric object is logged for several dataloaders"):
        buffer.log("m", metric)
    buffer.begin("validate", num_dataloaders=2)
    for buffer.dataloader_idx, value in ((0, 1.0), (1, 3.0)):
        metric.update(torch.tensor(value))
        buffer.log("m", metric, add_dataloader_idx=False)
    buffer.in_step = False
    assert buffer.peek_new().callback == {"m": 4.0}
    flushed = buffer.flush_epoch()
    assert (flushed.logged, flushed.loaders) == ({"m": 4.0}, {})


@pytest.mark.parametrize(("sanity_steps", "is_part"), [(0, False), (2, True)])
def test_one_metric_object_for_training_and_validation_is_refused(sanity_steps: int, is_part: bool) -> None:
    class Task(RegressionTask):
        def __init__(self) -> None:
            super().__init__()
            self.group = torchmetrics.MetricCollection([torchmetrics.SumMetric()])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.group.update(batch[0].sum())
            self.log("train", self.group)
            return self.loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.group.update(batch[0].sum())
            self.log("val", self.group["SumMetric"] if is_part else self.group)

    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=sanity_steps)
    with pytest.raises(ConfigurationError, match=r"in the stages '(train|validate)' and '(train|validate)', so that"):
        trainer.fit(Task(), regression_loader(2), regression_loader(2))


def test_two_objects_under_one_name_are_refused() -> None:
    buffer = evaluating("validate")
    first, second = torchmetrics.SumMetric(), torchmetrics.SumMetric()
    first.update(torch.tensor(1.0))
    buffer.log("m", first)
    with pytest.raises(ConfigurationError, match="two different metric objects"):
        buffer.log("m", second)
