"""Metrics in `callback_metrics`, and logging from callbacks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.runs import fitted
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.core.metric_value import MetricValue


def test_a_metric_value_works_as_a_float_and_as_a_tensor() -> None:
    value = MetricValue(0.25)
    assert isinstance(value, float)
    assert value == value.item() == value.cpu().numpy() == value.detach().cpu().item() == value.clone().tolist() == 0.25
    assert type(value.item()) is float
    assert f"{value:.3f} {value}" == "0.250 0.25"
    assert json.dumps({"a": value}) == '{"a": 0.25}'
    for tensor in (torch.tensor(value), value.to("cpu"), value.float(), torch.stack([value])[0]):
        assert isinstance(tensor, torch.Tensor)
        assert tensor == 0.25
    assert value < torch.tensor(0.5)
    assert torch.tensor(2.0) * value == value * torch.tensor(2.0) == 0.5
    assert not torch.isnan(value)
    assert torch.exp(MetricValue(0.0)) == 1
    assert np.mean([value, value]) == 0.25
    assert (value.ndim, value.shape, value.dtype, value.device.type) == (0, (), torch.float32, "cpu")
    with pytest.raises(AttributeError):
        value.no_such_method()


class _Logs(RegressionTask):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("step", loss.detach() * 2)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(batch_idx))


class _Reads(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self.at_ends: dict[str, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = trainer.callback_metrics
        assert metrics["both"].item() == metrics["both_step"] == float(outputs["loss"])
        self.seen.append(dict(metrics))

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        self.at_ends["train"] = dict(trainer.callback_metrics)

    def on_validation_epoch_end(self, trainer: Any, task: Any) -> None:
        if not trainer.sanity_checking:
            self.at_ends["validation"] = dict(trainer.callback_metrics)


def test_step_values_are_readable_at_every_step_and_epoch_values_at_the_end() -> None:
    reads, arguments = _Reads(), {"max_epochs": 1, "log_every_n_steps": 1000}
    trainer = fitted(_Logs(), regression_loader(6), regression_loader(3), callbacks=reads, **arguments)
    assert [set(seen) for seen in reads.seen] == [{"both", "both_step", "step"}] * 6
    assert len({seen["step"] for seen in reads.seen}) == 6
    mean = sum(seen["both"] for seen in reads.seen) / 6
    assert reads.at_ends["train"]["both_epoch"] == reads.at_ends["train"]["both"] == pytest.approx(mean)
    assert reads.at_ends["validation"]["val"] == 1.0
    assert trainer.callback_metrics["both_epoch"] == reads.at_ends["train"]["both_epoch"]


class Logging(Callback):
    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("index", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="max")

    def on_validation_epoch_end(self, trainer: Any, task: Any) -> None:
        self.log_dict({"a": 1.0, "b": 2.0}, prog_bar=True)


def test_callbacks_can_log() -> None:
    trainer = fitted(RegressionTask(), regression_loader(4), regression_loader(4), max_epochs=1, callbacks=Logging())
    assert trainer.callback_metrics["index"] == 3.0
    assert {name: trainer.progress_bar_metrics[name] for name in ("a", "b")} == {"a": 1.0, "b": 2.0}
