from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from tests.data.sources import Numbers, NumberStream
from tests.helpers.runs import fitted, quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask, StepTask, regression_loader
from trainwright.data import DataModule


def test_transfer_moves_the_whole_batch() -> None:
    batch = {"x": torch.ones(2), "name": "a"}
    moved = DataModule().transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert (moved["x"].device.type, moved["name"]) == ("meta", "a")


def test_from_datasets_shuffles_training_only() -> None:
    module = DataModule.from_datasets(Numbers(8), val_dataset=Numbers(4), batch_size=2)
    assert isinstance(module.train_dataloader().sampler, RandomSampler)
    assert isinstance(module.val_dataloader().sampler, SequentialSampler)
    assert module.train_dataloader().batch_size == 2
    assert module.test_dataloader() is None


def test_from_datasets_takes_streams_and_several_data_sets() -> None:
    module = DataModule.from_datasets(
        train_dataset={"a": NumberStream(3), "b": Numbers(2)}, val_dataset=[Numbers(1), Numbers(2)], test_dataset=[5, 6]
    )
    assert list(module.train_dataloader()) == ["a", "b"]
    assert [len(loader) for loader in module.val_dataloader()] == [1, 2]
    assert [batch.item() for batch in module.test_dataloader()] == [5, 6]


def test_from_datasets_builds_the_class_with_what_it_accepts() -> None:
    class Mine(DataModule):
        def __init__(self, batch_size: int, tag: str) -> None:
            self.got: tuple[Any, ...] = (batch_size, tag)

    assert Mine.from_datasets(Numbers(2), batch_size=7, tag="t").got == (7, "t")


def test_a_module_is_loaded_from_a_checkpoint_with_its_arguments_or_others(tmp_path: Path) -> None:
    class Counted(DataModule):
        def __init__(self, count: int, scale: float) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return regression_loader(self.hparams.count)

    trainer = quiet_trainer(max_steps=1)
    trainer.fit(RegressionTask(), datamodule=Counted(4, scale=2.0))
    path = trainer.save_checkpoint(tmp_path / "saved")
    assert Counted.load_from_checkpoint(path, scale=0.5).hparams == {"count": 4, "scale": 0.5}


def test_a_module_may_change_batches_on_the_device() -> None:
    class Doubles(DataModule):
        def train_dataloader(self) -> Any:
            return regression_loader(8, 2)

        def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
            return [2 * part for part in batch]

    seen: list[Batch] = []
    fitted(StepTask(lambda task, batch, idx: seen.append(batch) or task.loss(batch)), Doubles(), max_epochs=1)
    torch.testing.assert_close(seen, [[2 * part for part in batch] for batch in regression_loader(8, 2)])
