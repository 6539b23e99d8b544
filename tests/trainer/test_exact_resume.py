"""A run that was ended and resumed is the run that never ended: the same samples, losses and weights, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.core.errors import TrainwrightWarning
from trainwright.core.task import TaskModule

# Each resumed run writes to a folder of its own, and says that the earlier checkpoints are not there.
pytestmark = pytest.mark.filterwarnings("ignore:ModelCheckpoint.*not found:UserWarning")

_SAMPLES, _STEPS_PER_EPOCH, _EPOCHS = 48, 6, 3
MID_FIRST_EPOCH, BOUNDARY, MID_SECOND_EPOCH = 3, 6, 9


class NoisySamples(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """(index, input, target), with noise drawn where it is fetched: in the worker, if there is one."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        inputs = torch.full((4,), index / _SAMPLES) + 0.1 * torch.randn(4)
        return index, inputs, inputs.sum(dim=0, keepdim=True)


@dataclass(frozen=True)
class Setting:
    kind: str = "sgd"
    workers: int = 0
    accumulate: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-{self.workers}workers-{self.accumulate}x"


class RestlessTask(TaskModule):
    """Uses whatever a resume could forget: dropout, momentum, several optimizers, schedules, running statistics."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.automatic_optimization = True  # its two optimizers share a loss on purpose
        self.kind = kind
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.4))
            self.head = nn.Linear(16, 1)
        self.ids: list[list[int]] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids, inputs, targets = batch
        loss = nn.functional.mse_loss(self.head(self.body(inputs)).float(), targets)
        self.ids.append(ids.tolist())
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(3)
        self.log("val_loss", self.head(self.body(batch[1])).mean())

    def configure_optimizers(self) -> Any:
        if self.kind != "two optimizers":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        first = torch.optim.AdamW(self.body.parameters(), lr=0.01)
        second = torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        by_step = torch.optim.lr_scheduler.OneCycleLR(first, max_lr=0.02, total_steps=40)
        by_epoch = torch.optim.lr_scheduler.StepLR(second, step_size=1, gamma=0.5)
        return [
            {"optimizer": first, "lr_scheduler": {"scheduler": by_step, "interval": "step"}},
            {"optimizer": second, "lr_scheduler": by_epoch},
        ]


def train(setting: Setting, folder: Path, ckpt_path: Path | None = None) -> RestlessTask:
    """Run to the end, and keep a checkpoint of every third step, with the state of the generators."""
    torch.manual_seed(77 if ckpt_path is None else 78)
    task = RestlessTask(setting.kind)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = quiet_trainer(
        devices="auto",
        max_epochs=_EPOCHS,
        accumulate_grad_batches=setting.accumulate,
        precision="16-mixed" if setting.kind == "scaler" else None,
        callbacks=[saver],
    )
    world = trainer.settings.selection.topology.world_size
    batch_size = _SAMPLES // _STEPS_PER_EPOCH // world // setting.accumulate
    # By "fork" also in ranks that a fork server has started, whose default would start workers from scratch: 4 s each.
    workers: Any = {"num_workers": setting.workers, "multiprocessing_context": "fork"} if setting.workers else {}
    loader = DataLoader(NoisySamples(), batch_size=batch_size, shuffle=True, **workers)
    trainer.fit(task, loader, DataLoader(NoisySamples(), batch_size=24), ckpt_path=ckpt_path)
    return task


def resume_and_compare(setting: Setting, folder: Path, steps: tuple[int, ...]) -> list[list[int]]:
    """Compare runs from each of `steps` with one without an end; returns the sample ids of its batches."""
    whole = train(setting, folder / "whole")
    per_step = setting.accumulate
    assert len(whole.losses) == _EPOCHS * _STEPS_PER_EPOCH * per_step
    for step in steps:
        resumed = train(setting, folder / f"from-{step}", folder / "whole" / f"step={step}")
        assert resumed.ids == whole.ids[step * per_step :], (setting, step)
        assert resumed.losses == whole.losses[step * per_step :], (setting, step)
        assert_equal_weights(weights_of(resumed), weights_of(whole))
    return whole.ids


ALL_STEPS = (MID_FIRST_EPOCH, BOUNDARY, MID_SECOND_EPOCH)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [Setting("scaler"), Setting("two optimizers", accumulate=2)], ids=str)
def test_one_process_goes_on_exactly(setting: Setting, tmp_path: Path) -> None:
    resume_and_compare(setting, tmp_path, ALL_STEPS)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("setting", "steps"),
    [
        (Setting("two optimizers", accumulate=2), (MID_SECOND_EPOCH,)),
        pytest.param(Setting("scaler"), ALL_STEPS, marks=pytest.mark.exhaustive),
        pytest.param(Setting(workers=2), (BOUNDARY, MID_SECOND_EPOCH), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_two_processes_go_on_exactly_and_share_the_data(
    setting: Setting, steps: tuple[int, ...], tmp_path: Path
) -> None:
    by_rank = run_distributed(resume_and_compare, 2, setting, tmp_path, steps, init=False, timeout=150)
    batches = _STEPS_PER_EPOCH * setting.accumulate
    for epoch in range(_EPOCHS):
        of_epoch = slice(epoch * batches, (epoch + 1) * batches)
        rows = [ids for of_rank in by_rank for ids in of_rank[of_epoch]]
        assert sorted(itertools.chain.from_iterable(rows)) == list(range(_SAMPLES))


def test_a_resume_that_freezes_otherwise_in_the_middle_of_an_epoch_is_told(tmp_path: Path) -> None:
    class AtEpochs(Callback):
        def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
            self.set(trainer, task)

        def set(self, trainer: Any, task: Any) -> None:
            first, *_ = task.parameters()
            first.requires_grad_(trainer.current_epoch > 0)

    def fit(callback: Callback, max_steps: int, path: Path | None = None) -> Any:
        task = RegressionTask()
        next(task.parameters()).requires_grad_(False)
        trainer = quiet_trainer(max_steps=max_steps, callbacks=[callback], default_root_dir=tmp_path, seed=1)
        trainer.fit(task, regression_loader(16, 4), ckpt_path=path)
        return trainer

    class AtTheStartToo(AtEpochs):
        def on_train_start(self, trainer: Any, task: Any) -> None:
            self.set(trainer, task)

    whole = fit(AtEpochs(), 8)
    path = fit(AtEpochs(), 6).save_checkpoint(tmp_path / "six")
    with pytest.warns(TrainwrightWarning, match=r"'\S+weight' was trained\. .*Set requires_grad also in"):
        fit(AtEpochs(), 8, path)
    assert_equal_weights(weights_of(fit(AtTheStartToo(), 8, path).task), weights_of(whole.task))
    at_end = fit(AtEpochs(), 4).save_checkpoint(tmp_path / "four")  # the next epoch begins, and its hooks with it
    assert_equal_weights(weights_of(fit(AtEpochs(), 8, at_end).task), weights_of(whole.task))
