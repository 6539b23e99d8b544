"""A Trainer's steps on a stand-in for an accelerator: what reads the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from tests.helpers.stand_in_device import STAND_IN, Reads, StandInStrategy, is_there, stand_in_device
from trainwright.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging
from trainwright.core.task import TaskModule
from trainwright.trainer.trainer import Trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("_in_a_folder_of_its_own"),
    pytest.mark.requires("torch>=2.13", reason="torch 2.9 crashes when Python collects tensors of this stand-in"),
]
NUM_BATCHES = 12
Batches = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Classifier(TaskModule):
    """Two layers with dropout and batch statistics, which logs what one usually logs."""

    norm: type[nn.Module] = nn.BatchNorm1d

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Linear(4, 8), self.norm(8), nn.Dropout(0.1), nn.Linear(8, 3))
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, validate_args=False).to(STAND_IN)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scores = self.net(batch[0])
        loss = nn.functional.cross_entropy(scores, batch[1])
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"share": 0.5, "largest": scores.max()}, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.net(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(scores, batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_BATCHES)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class WithoutBatchStatistics(Classifier):
    """For averages of weights, after which torch counts batch statistics with a read of each layer and batch."""

    norm = nn.LayerNorm


class ByStep(Callback):
    """Notes what had been fetched after each step."""

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self.values: list[int] = []
        self.copies: list[int] = []

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        """Note it; whatever a step gave is still on the device."""
        assert is_there(result.loss)
        self.values.append(self.reads.values)
        self.copies.append(self.reads.copies)


def batches() -> Batches:
    return [(torch.ones(4, 4), torch.zeros(4, dtype=torch.long)) for _ in range(NUM_BATCHES)]


def rehearse(
    task: TaskModule, *callbacks: Callback, validate: bool = False, log_every_n_steps: int = 1000, **arguments: Any
) -> tuple[ByStep, Trainer]:
    """Train for one epoch on the stand-in; returns what each step had fetched."""
    with stand_in_device() as reads:
        by_step = ByStep(reads)
        trainer = Trainer(
            strategy=StandInStrategy(), accelerator="cpu", max_epochs=1, logger="csv", default_root_dir="runs",
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            num_sanity_val_steps=0, callbacks=[*callbacks, by_step], log_every_n_steps=log_every_n_steps, **arguments,
        )  # fmt: skip
        trainer.fit(task, batches(), batches()[:3] if validate else None)
    return by_step, trainer


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, 12),
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "detect_anomaly": False}, 6),
    ],
)
def test_no_step_reads_the_device(arguments: dict[str, Any], steps: int) -> None:
    by_step, _ = rehearse(Classifier(), **arguments)
    assert (by_step.values, by_step.copies) == ([0] * steps, [0] * steps)


def test_what_is_logged_is_read_once_an_interval() -> None:
    by_step, _ = rehearse(Classifier(), log_every_n_steps=4)
    assert by_step.values == [0] * 4 + [1] * 4 + [2] * 4  # after the hook of the steps 4, 8 and 12
    assert by_step.copies == [0] * 12


@pytest.mark.parametrize(
    "callback",
    [lambda: EMAWeightAveraging(decay=0.9), lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=0.0)],
)
def test_callbacks_beside_the_step_read_nothing(callback: Any) -> None:
    by_step, _ = rehearse(WithoutBatchStatistics(), callback())
    assert by_step.values == [0] * NUM_BATCHES


def test_a_run_that_ends_at_what_is_not_finite_looks_where_metrics_are_read() -> None:
    by_step, _ = rehearse(Classifier(), log_every_n_steps=4, on_nonfinite="raise")
    assert by_step.values == [0] * 4 + [2] * 4 + [4] * 4  # a flush and a flag
    assert by_step.copies == [0] * NUM_BATCHES


def test_collecting_a_checkpoint_copies_no_weight_and_reads_only_what_the_epoch_has_logged() -> None:
    class Collects(Callback):
        def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
            if trainer.global_step == 3:
                self.found = trainer.run.contents.collect(weights_only=False)

    callback = Collects()
    by_step, _ = rehearse(Classifier(), callback)
    assert all(is_there(tensor) for tensor in callback.found.model.values())
    # One read for what the epoch has logged so far, one for what this step has logged, to be shown with it.
    assert by_step.values == [0] * 2 + [2] * 10
    assert by_step.copies == [0] * NUM_BATCHES
