from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.distributed import RankError, run_distributed
from tests.helpers.tasks import Batch, RegressionTask, StepTask, regression_loader
from tests.trainer.runs import Endless, Tally, fitted, quiet_trainer
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.data import CombinedLoader


@pytest.mark.parametrize(
    ("limits", "batches"),
    [((0.2, 0.4, 0.4), (12, 25, 25)), ((10, 64, 1000), (10, 64, 64)), ((1.0, 1, 1.0), (64, 1, 64))],
)
def test_a_limit_is_a_fraction_or_a_number_of_batches(
    limits: tuple[float, float, float], batches: tuple[int, int, int]
) -> None:
    tally, task = Tally(), RegressionTask()
    names = ("limit_train_batches", "limit_val_batches", "limit_test_batches")
    trainer = quiet_trainer(max_epochs=1, callbacks=tally, **dict(zip(names, limits, strict=True)))
    trainer.fit(task, regression_loader(), regression_loader())
    trainer.test(task, regression_loader(), verbose=False)
    found = tally.train_batches, tally.batches["validation"][0], tally.batches["test"][0]
    assert found == batches


@pytest.mark.parametrize("name", ["limit_train_batches", "val_check_interval"])
def test_a_fraction_of_data_without_length_is_refused(name: str) -> None:
    trainer = quiet_trainer(max_epochs=1, **{name: 0.5})
    with pytest.raises(ConfigurationError, match=f"{name}=0.5 is a fraction of an epoch"):
        trainer.fit(RegressionTask(), DataLoader(Endless()), regression_loader(4))


@pytest.mark.parametrize(("mode", "batches"), [("min_size", 16), ("max_size_cycle", 64), ("max_size", 64)])
def test_several_training_loaders_are_as_long_as_their_mode_says(mode: Any, batches: int) -> None:
    missing: list[bool] = []

    def step(task: RegressionTask, batch: Any, batch_idx: int) -> torch.Tensor:
        missing.append(batch["b"] is None)
        return torch.stack([task.loss(item) for item in batch.values() if item is not None]).sum()

    loader = CombinedLoader({"a": regression_loader(64), "b": regression_loader(16)}, mode)
    trainer = fitted(StepTask(step), loader, max_epochs=1)
    assert trainer.global_step == len(missing) == batches
    assert sum(missing) == (48 if mode == "max_size" else 0)


class _LoadsByEpoch(RegressionTask):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int]] = []

    def train_dataloader(self) -> Any:
        self.asked.append(("train", self.current_epoch))
        return regression_loader(2)

    def val_dataloader(self) -> Any:
        self.asked.append(("val", self.current_epoch))
        return regression_loader(1)


@pytest.mark.slow
@pytest.mark.parametrize(("every", "validate_every"), [(0, 1), (2, 2)])
def test_a_resumed_run_requests_loaders_with_the_epoch_of_the_uninterrupted_one(
    every: int, validate_every: int, tmp_path: Path
) -> None:
    def fit(ckpt_path: Path | None = None) -> list[tuple[str, int]]:
        task = _LoadsByEpoch()
        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        arguments = {"reload_dataloaders_every_n_epochs": every, "check_val_every_n_epoch": validate_every}
        fitted(task, ckpt_path=ckpt_path, max_epochs=5, callbacks=saver, **arguments)
        return task.asked

    whole = fit()
    for step in (4, 7):
        epoch = step // 2
        reloaded = epoch - epoch % every if every else 0
        last = {
            kind: max((e for k, e in whole if k == kind and reloaded <= e <= epoch), default=epoch)
            for kind in ("train", "val")
        }
        wanted = [(kind, e) for kind, e in whole if e >= last[kind]]
        assert sorted(fit(tmp_path / f"step={step}")) == sorted(wanted), step


def test_overfitting_reads_the_same_unshuffled_batches_in_every_epoch() -> None:
    seen: list[float] = []

    def step(task: RegressionTask, batch: Batch, batch_idx: int) -> torch.Tensor:
        seen.append(batch[0].sum().item())
        return task.loss(batch)

    tally = Tally()
    trainer = quiet_trainer(max_epochs=3, overfit_batches=4, callbacks=tally)
    with pytest.warns(TrainwrightWarning) as caught:
        trainer.fit(StepTask(step), regression_loader(shuffle=True), regression_loader(shuffle=True))
    ignored = [str(w.message) for w in caught if "or sampler (RandomSampler) is ignored" in str(w.message)]
    assert ["train_dataloader" in text or "val_dataloader" in text for text in ignored] == [True, True]
    first = [batch[0].sum().item() for batch in regression_loader()][:4]
    assert seen == first * 3
    assert tally.batches["validation"] == {0: 12}


class _ChangesLength(RegressionTask):
    """Gives its data another length at the end of each epoch, and notes what the epochs have seen."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self.lengths = lengths
        self.data = list(range(lengths[0]))
        self.seen: dict[int, list[int]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.setdefault(self.current_epoch, []).extend(batch.tolist())
        return self(torch.ones(1, 4)).mean()

    def on_train_epoch_end(self) -> None:
        self.data[:] = range(self.lengths[(self.current_epoch + 1) % len(self.lengths)])


def _train_on_changing_data(second_length: int) -> dict[int, list[int]]:
    task = _ChangesLength(6, second_length + int(os.environ.get("RANK", 0)), 4)
    loader = DataLoader(task.data, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    quiet_trainer(max_epochs=3, devices="auto").fit(task, loader)
    return task.seen


def test_the_length_of_data_is_read_in_each_epoch() -> None:
    seen = _train_on_changing_data(9)
    assert [sorted(of_epoch) for of_epoch in seen.values()] == [list(range(n)) for n in (6, 9, 4)]


@pytest.mark.distributed
def test_a_length_that_differs_between_ranks_is_an_error() -> None:
    with pytest.raises(RankError, match=r"7 samples on rank 0, 8 samples on rank 1"):
        run_distributed(_train_on_changing_data, 2, 7)
