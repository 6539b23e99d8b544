"""One clock. A group is one step whatever happens in it, and logged x-values strictly increase over a resume."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.loggers.logger import Logger, RunInfo


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 12), (2, 6), (5, 4)])
def test_a_step_is_a_group_and_the_other_counters_stand_beside_it(accumulate: int, steps: int) -> None:
    trainer = quiet_trainer(max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(RegressionTask(), regression_loader(12, 2), regression_loader(4))
    state = trainer.state
    assert (state.step, state.batches, state.samples, state.epoch) == (steps, 12, 24, 2)


class _Remembers(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[str, int]] = []

    def start(self, run: RunInfo) -> None:
        super().start(run)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Not kept."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.points += [(name, step) for name in metrics if name != "epoch"]

    def flush(self) -> None:
        """Nothing to do."""

    def finish(self, status: Any) -> None:
        """Nothing to close."""

    def steps(self, name: str) -> list[int]:
        return [step for found, step in self.points if found == name]


class _Logs(RegressionTask):
    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize(("log_every", "accumulate"), [(1, 1), (3, 1), (2, 2)])
def test_logged_x_values_strictly_increase_also_across_a_resume(
    log_every: int, accumulate: int, tmp_path: Path
) -> None:
    logger = _Remembers()
    common: dict[str, Any] = {
        "logger": logger, "log_every_n_steps": log_every, "accumulate_grad_batches": accumulate,
        "val_check_interval": 0.5, "default_root_dir": tmp_path,
    }  # fmt: skip
    loaders = regression_loader(10), regression_loader(2)
    stopped = 10 // accumulate + 3  # in the middle of the second epoch
    first = quiet_trainer(max_steps=stopped, **common)
    first.fit(_Logs(), *loaders)
    first.save_checkpoint(tmp_path / "stopped")
    before = len(logger.points)
    resumed = quiet_trainer(max_epochs=3, **common)
    resumed.fit(_Logs(), *loaders, ckpt_path=tmp_path / "stopped")
    assert len(logger.points) > before
    for name in ("loss_step", "loss_epoch", "val_loss"):
        steps = logger.steps(name)
        assert steps
        assert all(a < b for a, b in itertools.pairwise(steps)), (name, steps)
    assert logger.steps("val_loss")[-1] == resumed.global_step - 1
