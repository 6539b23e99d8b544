"""Ranks that see different metrics, wishes and clocks save, stop and choose the best alike, and nothing hangs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.core.errors import ConfigurationError

pytestmark = pytest.mark.distributed


class _OwnNumbers(RegressionTask):
    """Each rank logs its own values, one per epoch; nobody averages them."""

    def __init__(self, values: list[list[float]]) -> None:
        super().__init__()
        self.values = values

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("measure", self.values[self.global_rank][self.current_epoch], sync_dist=False)


def _save(folder: Path, values: list[list[float]]) -> tuple[str, float | None, list[str]]:
    saver = ModelCheckpoint(folder, filename="{epoch}", monitor="measure", save_top_k=2)
    trainer = quiet_trainer(devices="auto", max_epochs=len(values[0]), num_sanity_val_steps=0, callbacks=saver)
    trainer.fit(_OwnNumbers(values), regression_loader(8), regression_loader(4))
    kept = sorted(Path(path).name for path in saver.best_k_models)
    return Path(saver.best_model_path).name, saver.best_model_score, kept


def test_all_ranks_keep_and_prefer_the_same_checkpoints(tmp_path: Path) -> None:
    first, second = run_distributed(_save, 2, tmp_path, [[3.0, 1.0, 2.0, 4.0], [1.0, 4.0, 3.0, 2.0]], init=False)
    assert first == second == ("epoch=1", 1.0, ["epoch=1", "epoch=2"])
    assert sorted(path.name for path in tmp_path.glob("epoch=*")) == ["epoch=1", "epoch=2"]


class _SkewedClock(RegressionTask):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.state.seconds = (batch_idx + 1) * (1.0 if self.global_rank == 0 else 100.0)


def _run_out_of_time() -> int:
    trainer = quiet_trainer(devices="auto", max_time="10 s")
    trainer.fit(_SkewedClock(), regression_loader(200))
    return trainer.global_step


def test_ranks_whose_clocks_differ_run_out_of_time_at_the_same_step() -> None:
    first, second = run_distributed(_run_out_of_time, 2, init=False)
    assert first == second == 10


def _other_lengths() -> str:
    trainer = quiet_trainer(devices="auto", max_epochs=1)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(RegressionTask(), regression_loader(20 if os.environ["RANK"] == "0" else 30, 2))
    return str(caught.value)


def test_a_data_set_whose_length_differs_by_rank_is_refused_on_every_rank() -> None:
    for text in run_distributed(_other_lengths, 2, init=False):
        assert "10 batches and 20 samples on rank 0" in text
        assert "15 batches and 30 samples on rank 1" in text
        assert "use_distributed_sampler=False" in text
