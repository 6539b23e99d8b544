from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.callbacks import BatchSizeFinder, LearningRateFinder
from trainwright.core.errors import ConfigurationError, TrainwrightError, TrainwrightWarning
from trainwright.data import DataModule
from trainwright.trainer.search.tuner import Tuner


class _Hungry(RegressionTask):
    """Runs out of memory above `fits` samples in a batch, of training or of another step; `SIZES` has all batches."""

    def __init__(self, fits: int = 10**9, num_samples: int = 64, where: str = "training_step") -> None:
        super().__init__(momentum=0.9)
        self.batch_size = 3
        self.fits = fits
        self.num_samples = num_samples
        self.where = where

    def _eat(self, batch: Batch, where: str) -> None:
        SIZES.append((where, len(batch[0])))
        if where == self.where and len(batch[0]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self._eat(batch, "training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._eat(batch, "validation_step")
        super().validation_step(batch, batch_idx)

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self._eat(batch, "predict_step")
        return self(batch[0])

    def train_dataloader(self) -> Any:
        return regression_loader(self.num_samples, self.batch_size)

    val_dataloader = predict_dataloader = train_dataloader


SIZES: list[tuple[str, int]] = []


@pytest.fixture(autouse=True)
def _no_sizes() -> None:
    SIZES.clear()


def _sizes(where: str = "training_step") -> list[int]:
    return [size for kind, size in SIZES if kind == where]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "fits", "expected"),
    [
        ({}, 20, 16),
        ({"mode": "binsearch", "margin": 0.0}, 20, 20),
        ({"mode": "binsearch"}, 20, 19),
        ({"max_trials": 2}, 10**9, 4),
        ({"max_val": 24}, 10**9, 24),
        ({"num_samples": 100}, 10**9, 64),  # 128 would not be filled
        ({"num_samples": 100, "mode": "binsearch", "margin": 0.0}, 10**9, 100),
        ({"where": "validation_step"}, 9, 8),
    ],
    ids=str,
)
def test_the_largest_size_that_fits_is_found(options: dict[str, Any], fits: int, expected: int) -> None:
    of_task = {name: options[name] for name in ("num_samples", "where") if name in options}
    options = {name: value for name, value in options.items() if name not in of_task}
    task = _Hungry(fits, **of_task)
    assert Tuner(quiet_trainer()).scale_batch_size(task, **options) == expected
    assert task.batch_size == expected
    assert expected in _sizes()


@pytest.mark.parametrize(
    ("stage", "step"), [("fit", "training_step"), ("validate", "validation_step"), ("predict", "predict_step")]
)
def test_a_callback_searches_before_the_stage_which_uses_what_was_found(stage: str, step: str) -> None:
    task = _Hungry(9, where=step)
    finder = BatchSizeFinder(max_trials=3)
    trainer = quiet_trainer(callbacks=finder, max_epochs=1, num_sanity_val_steps=0)
    getattr(trainer, stage)(task)
    assert finder.optimal_batch_size == task.batch_size == 8
    assert _sizes(step)[-8:] == [8] * 8  # the stage itself: 64 samples
    if stage == "fit":
        assert (trainer.global_step, trainer.state.samples) == (8, 64)


def test_the_size_is_set_wherever_it_lies() -> None:
    class Task(_Hungry):
        def __init__(self, batch_size: int = 2) -> None:
            super().__init__(5)
            self.save_hyperparameters()

    class Data(DataModule):
        def __init__(self) -> None:
            self.batch_size = 2

        def train_dataloader(self) -> Any:
            return regression_loader(64, self.batch_size)

    task, data = Task(), Data()
    assert Tuner(quiet_trainer()).scale_batch_size(task, datamodule=data) == 4
    assert task.batch_size == task.hparams.batch_size == data.batch_size == 4


def test_a_new_trainer_has_the_task_and_loaders_of_a_search() -> None:
    task = _Hungry(5)
    trainer = quiet_trainer()
    Tuner(trainer).scale_batch_size(task)
    assert trainer.train_dataloader.batch_size == trainer.val_dataloaders.batch_size == 4
    assert trainer.model is task
    assert task.trainer is trainer
    assert (trainer.global_step, trainer.stage) == (0, None)


class _Fixed(_Hungry):
    def train_dataloader(self) -> Any:
        return regression_loader(64, 16)


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        (_Fixed(), {}, "batch_size was set to 2, but the loader makes batches of 16"),
        (_Hungry(0), {}, "not even one sample fits into memory: OutOfMemoryError: CUDA out of"),
        (_Hungry(), {"train_dataloaders": regression_loader()}, "Define train_dataloader"),
        (_Hungry(), {"method": "fit", "dataloaders": [1]}, "takes train_dataloaders"),
        (_Hungry(), {"method": "tset"}, "Did you mean 'test'"),
        (_Hungry(), {"init_val": 0}, "init_val=0"),
        (_Hungry(), {"steps_per_trial": 1.5}, "steps_per_trial=1.5"),
        (_Hungry(), {"margin": 1.0}, "margin=1.0"),
    ],
)
def test_an_error_leaves_the_size_as_it_was(task: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainwrightError, match=message):
        Tuner(quiet_trainer()).scale_batch_size(task, **arguments)
    assert task.batch_size == 3


FINDERS = pytest.mark.parametrize(
    ("finder", "search"), [(BatchSizeFinder, "scale_batch_size"), (LearningRateFinder, "lr_find")]
)


@FINDERS
def test_a_fast_development_run_does_not_search(finder: Any, search: str) -> None:
    with pytest.warns(TrainwrightWarning, match="fast_dev_run"):
        assert getattr(Tuner(quiet_trainer(fast_dev_run=True)), search)(_Hungry()) is None


@FINDERS
def test_a_tuner_beside_a_finder_is_refused(finder: Any, search: str) -> None:
    with pytest.raises(ConfigurationError, match=f"already contain a {finder.__name__}"):
        getattr(Tuner(quiet_trainer(callbacks=finder())), search)(_Hungry())
