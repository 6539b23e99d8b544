"""What a metric's name means at each event (the table in docs/logging.md), for random programs of `log` calls."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback

SIZES = [2, 2, 1]  # samples of the batches of an epoch; a mean is weighted by them


@dataclass(frozen=True)
class Metric:
    """One metric of a program: how it is logged, and in which batches."""

    on_step: bool
    on_epoch: bool
    reduce_fx: str
    batches: frozenset[int]
    where: str

    def value(self, epoch: int, idx: int) -> float:
        return float((epoch * 7 + idx * 3) % 5 + 1)

    def aggregate(self, epoch: int) -> float:
        values = {idx: self.value(epoch, idx) for idx in sorted(self.batches)}
        if self.reduce_fx == "mean":
            return sum(v * SIZES[i] for i, v in values.items()) / sum(SIZES[i] for i in values)
        return {"sum": sum, "min": min, "max": max}[self.reduce_fx](values.values())


def expected(metrics: list[Metric], epoch: int, idx: int, *, at_end: bool) -> dict[str, float]:
    """Return `callback_metrics` after batch `idx`, or at the end of the epoch, as docs/logging.md says."""
    found: dict[str, float] = {}
    for number, metric in enumerate(metrics):
        name, both = f"m{number}", metric.on_step and metric.on_epoch
        steps = [(e, i) for e in range(epoch + 1) for i in sorted(metric.batches) if e < epoch or i <= idx]
        ended = epoch if at_end else epoch - 1
        if metric.on_step and steps:
            found[f"{name}_step" if both else name] = metric.value(*steps[-1])
        if metric.on_epoch and ended >= 0:
            found[f"{name}_epoch" if both else name] = metric.aggregate(ended)
        if both and (steps or ended >= 0):
            of_step = not at_end and bool(steps) and steps[-1][0] == epoch
            found[name] = metric.value(*steps[-1]) if of_step else metric.aggregate(ended)
    return found


class Program(RegressionTask):
    def __init__(self, metrics: list[Metric]) -> None:
        super().__init__()
        self.metrics = metrics
        self.idx = 0

    def _log(self, where: str) -> None:
        for number, metric in enumerate(self.metrics):
            if metric.where == where and self.idx in metric.batches:
                self.log(
                    f"m{number}", torch.tensor(metric.value(self.current_epoch, self.idx)),
                    on_step=metric.on_step, on_epoch=metric.on_epoch, reduce_fx=metric.reduce_fx,
                )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.idx = batch_idx
        self._log("training_step")
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._log("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._log("on_train_batch_end")


class Compare(Callback):
    """Compares `callback_metrics` with the table: after each step if told, and at the end of each epoch."""

    def __init__(self, metrics: list[Metric], *, after_steps: bool) -> None:
        self.metrics, self.after_steps = metrics, after_steps
        self.ends = 0

    def _check(self, trainer: Any, idx: int, *, at_end: bool) -> None:
        wanted = expected(self.metrics, trainer.current_epoch, idx, at_end=at_end)
        assert dict(trainer.callback_metrics) == pytest.approx(wanted)

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if self.after_steps:
            self._check(trainer, task.idx, at_end=False)

    def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
        self.ends += 1
        self._check(trainer, len(SIZES) - 1, at_end=True)


def run_program(
    metrics: list[Metric], log_every_n_steps: int, epochs: int, *, after_steps: bool, ranks: int = 1
) -> None:
    """Fit a program; every read of `callback_metrics` is compared with the table."""
    compare = Compare(metrics, after_steps=after_steps)
    trainer = quiet_trainer(max_epochs=epochs, log_every_n_steps=log_every_n_steps, callbacks=[compare], devices="auto")
    trainer.fit(Program(metrics), regression_loader(sum(SIZES) * ranks, batch_size=2))
    assert compare.ends == epochs
    assert dict(trainer.callback_metrics) == pytest.approx(expected(metrics, epochs - 1, len(SIZES) - 1, at_end=True))


def _every_metric(*batches: set[int]) -> list[Metric]:
    return [
        Metric(on_step, on_epoch, reduce_fx, frozenset(of_metric), where)
        for (on_step, on_epoch), reduce_fx, of_metric, where in product(
            [(True, False), (False, True), (True, True)],
            ["mean", "min", "max"],
            batches,
            ["training_step", "on_train_batch_end", "on_before_optimizer_step"],
        )
    ]


@pytest.mark.parametrize(("log_every_n_steps", "after_steps"), [(1, False), (2, True), (50, False)])
def test_a_name_means_what_the_table_says_whatever_the_logging_interval(
    log_every_n_steps: int, after_steps: bool
) -> None:
    run_program(_every_metric({0, 1, 2}, {1}, {0, 2}), log_every_n_steps, 2, after_steps=after_steps)


def _programs_on_rank() -> None:
    SIZES[:] = [2, 2, 2]  # a ragged last batch is on one rank only
    run_program(_every_metric({0, 1, 2}, {1}), 2, 2, after_steps=True, ranks=2)


@pytest.mark.distributed
def test_names_mean_the_same_on_two_ranks() -> None:
    run_distributed(_programs_on_rank, 2)
