"""One clock. A group is one step whatever happens in it, and logged x-values strictly increase over a resume."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask, StepTask, regression_loader
from tests.trainer.runs import MemoryLogger


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 12), (2, 6), (5, 4)])
def test_a_step_is_a_group_and_the_other_counters_stand_beside_it(accumulate: int, steps: int) -> None:
    trainer = quiet_trainer(max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(RegressionTask(), regression_loader(12, 2), regression_loader(4))
    state = trainer.state
    assert (state.step, state.batches, state.samples, state.epoch) == (steps, 12, 24, 2)


def _log_both_ways(task: RegressionTask, batch: Batch, batch_idx: int) -> torch.Tensor:
    loss = task.loss(batch)
    task.log("loss", loss, on_step=True, on_epoch=True)
    return loss


@pytest.mark.parametrize(("log_every", "accumulate"), [(1, 1), (3, 1), (2, 2)])
def test_logged_x_values_strictly_increase_also_across_a_resume(
    log_every: int, accumulate: int, tmp_path: Path
) -> None:
    logger = MemoryLogger()
    common: dict[str, Any] = {
        "logger": logger, "log_every_n_steps": log_every, "accumulate_grad_batches": accumulate,
        "val_check_interval": 0.5, "default_root_dir": tmp_path,
    }  # fmt: skip
    loaders = regression_loader(10), regression_loader(2)
    stopped = 10 // accumulate + 3  # in the middle of the second epoch
    first = quiet_trainer(max_steps=stopped, **common)
    first.fit(StepTask(_log_both_ways), *loaders)
    first.save_checkpoint(tmp_path / "stopped")
    before = len(logger.rows)
    resumed = quiet_trainer(max_epochs=3, **common)
    resumed.fit(StepTask(_log_both_ways), *loaders, ckpt_path=tmp_path / "stopped")
    assert len(logger.rows) > before
    for name in ("loss_step", "loss_epoch", "val_loss"):
        steps = [step for step, row in logger.rows if name in row]
        assert steps
        assert all(a < b for a, b in itertools.pairwise(steps)), (name, steps)
    assert max(logger.values("val_loss")) == resumed.global_step - 1
