"""Metrics of an epoch that was stopped in its middle: the resumed run comes to the numbers of one that never ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, MinMetric

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import fitted, quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from trainwright.core.errors import TrainwrightWarning
from trainwright.core.task import TaskModule

pytestmark = pytest.mark.filterwarnings("ignore:ModelCheckpoint.*not found:UserWarning")

_EPOCHS, _STEPS = 2, 12


def _median(values: torch.Tensor) -> torch.Tensor:
    return values.median()


class Counting(TaskModule):
    """Logs in every way that aggregates an epoch, and keeps what came of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Linear(3, 1)
        self.whole_mean = MeanMetric()
        self.pair = MetricCollection({"low": MinMetric(), "mean": MeanMetric()})
        self.first_mean = MeanMetric()
        self.epochs: list[dict[str, float]] = []
        self.has_begun = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        options: dict[str, Any] = {"on_step": False, "on_epoch": True}
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1 + batch_idx % 3)
        for reduction in ("sum", "min", "max"):
            self.log(reduction, loss * 1.1, reduce_fx=reduction, **options)
        self.log("host", float(loss.detach()) / 3, **options)
        self.log("mixed", loss if batch_idx % 2 else float(loss.detach()), **options)
        self.log("median", loss, reduce_fx=_median, **options)
        if batch_idx == 1:
            self.log("early", loss, **options)
            self.log("early object", self.first_mean, **options)
        self.first_mean.update(loss.detach())
        self.whole_mean.update(loss.detach())
        self.log("object", self.whole_mean, **options)
        self.pair.update(loss.detach())
        self.log("pair", self.pair, **options)
        return loss

    def on_train_start(self) -> None:
        self.has_begun = self.trainer.state.batch_in_epoch % _STEPS > 0

    def on_train_epoch_start(self) -> None:
        if self.has_begun:
            self._take()
        self.has_begun = True

    def on_train_end(self) -> None:
        self._take()

    def _take(self) -> None:
        metrics = dict(self.trainer.callback_metrics)
        self.epochs.append({name: value for name, value in metrics.items() if not name.startswith("loss_step")})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train(folder: Path, ckpt_path: Path | None = None, **arguments: Any) -> list[dict[str, float]]:
    """Run to the end with a checkpoint of every second step; return each finished epoch's metrics."""
    torch.manual_seed(3)
    task = Counting()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(devices="auto", max_epochs=_EPOCHS, callbacks=[saver], **arguments)
    world = trainer.settings.selection.topology.world_size
    data = TensorDataset(torch.randn(_STEPS * 4, 3, generator=torch.Generator().manual_seed(5)))
    trainer.fit(task, DataLoader(data, batch_size=4 // world, shuffle=True), ckpt_path=ckpt_path)
    return task.epochs


def _compare(folder: Path) -> list[dict[str, float]]:
    whole = train(folder / "whole")
    assert len(whole) == _EPOCHS
    assert {"loss", "loss_epoch", "sum", "median", "early object", "object", "pair/low"} <= set(whole[0])
    for step in (6, 12):
        resumed = train(folder / f"from-{step}", folder / "whole" / f"step={step}")
        assert resumed == whole[step // _STEPS :], step
    return whole


@pytest.mark.slow
def test_one_process_comes_to_the_very_same_numbers(tmp_path: Path) -> None:
    _compare(tmp_path)


@pytest.mark.parametrize("resumes", [False, True])
def test_the_next_fit_goes_on_with_the_metrics_of_the_epoch_that_a_limit_ended(resumes: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(_STEPS, 3))
    whole, task = Counting(), Counting()
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6, save_top_k=-1)
    fitted(whole, DataLoader(data), max_epochs=2)
    trainer = fitted(task, DataLoader(data), max_epochs=2, max_steps=7, callbacks=saver)
    trainer.max_steps = -1
    trainer.fit(task, DataLoader(data), ckpt_path=tmp_path / "step=6" if resumes else None)
    assert task.epochs[1:] == whole.epochs


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.*random number generators start from scratch:UserWarning")
def test_another_number_of_processes_adds_up_what_there_was(tmp_path: Path) -> None:
    of_two = run_distributed(train, 2, tmp_path / "two", init=False, timeout=100)[0]
    with pytest.warns(
        TrainwrightWarning,
        match="the metric objects first_mean, pair.low, pair.mean, whole_mean start from scratch in this epoch",
    ):
        of_one = train(tmp_path / "one", tmp_path / "two" / "step=6")
    for name in ("host", "mixed", "early"):
        # Means only: one process logs a step's mean where two log those of its halves, which sums and extremes show.
        assert of_one[0][name] == pytest.approx(of_two[0][name], rel=1e-6), name


class _Validating(RegressionTask):
    """Validates with a metric object that `log` receives; `fails` in the middle of the second validation."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.metric = MeanMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric.update(self.forward(batch[0]).mean() + batch_idx)
        self.log("mean", self.metric)
        if self.fails and (self.current_epoch, batch_idx) == (1, 1):
            self.fails = False
            raise ZeroDivisionError


@pytest.mark.parametrize("again", ["in a new process", "with the same task"])
def test_a_validation_that_ends_early_counts_no_batch_twice_when_it_runs_again(again: str, tmp_path: Path) -> None:
    data, arguments = regression_loader(4), {"max_epochs": 2, "seed": 1, "num_sanity_val_steps": 0}
    whole = fitted(_Validating(), data, data, **arguments)
    first = _Validating(fails=True)
    saver = OnExceptionCheckpoint(tmp_path, filename="saved")
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(**arguments, callbacks=[saver]).fit(first, data, data)
    task = first if again == "with the same task" else _Validating()
    resumed = fitted(task, data, data, ckpt_path=tmp_path / "saved", **arguments)
    assert resumed.callback_metrics["mean"] == whole.callback_metrics["mean"]
