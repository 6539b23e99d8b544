"""Attributes of Lightning's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import fitted, quiet_trainer
from tests.helpers.tasks import RegressionTask, StepTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.lambda_callback import LambdaCallback
from trainwright.core.errors import ConfigurationError
from trainwright.loggers import CSVLogger, TensorBoardLogger
from trainwright.trainer.lightning_names import INTERNALS
from trainwright.trainer.run_state import RunningStage, TrainerFn, TrainerStatus
from trainwright.trainer.trainer import Trainer

BEFORE_A_FIT: dict[str, Any] = {  # as Lightning 2.6.6 answers
    "check_val_every_n_epoch": 1, "checkpoint_callbacks": [], "ckpt_path": None, "device_ids": [0],
    "distributed_sampler_kwargs": None, "early_stopping_callbacks": [], "enable_autolog_hparams": True,
    "enable_validation": False, "gradient_clip_algorithm": None, "gradient_clip_val": None, "is_last_batch": False,
    "limit_predict_batches": 1.0, "limit_test_batches": 1.0, "limit_train_batches": 4, "limit_val_batches": 1,
    "min_epochs": None, "min_steps": None, "model": None, "node_rank": 0, "num_sanity_val_batches": [],
    "overfit_batches": 0.0, "predict_dataloaders": None, "received_sigterm": False,
    "reload_dataloaders_every_n_epochs": 0, "scaler": None, "test_dataloaders": None, "train_dataloader": None,
    "val_check_batch": None, "val_check_interval": 1.0, "val_dataloaders": None,
}  # fmt: skip


class Watch(Callback):
    def __init__(self) -> None:
        self.last: list[bool] = []
        self.at_end: list[bool] = []
        self.stages: list[str | None] = []
        self.state: tuple[Any, ...] = ()

    def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        self.last.append(trainer.is_last_batch)
        self.stages.append(trainer.state.stage)
        self.state = (trainer.state.fn, trainer.state.status, trainer.state.finished, trainer.val_check_batch)

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at_end.append(trainer.is_last_batch)

    def on_validation_start(self, trainer: Any, task: Any) -> None:
        self.stages.append(trainer.state.stage)


@pytest.fixture(scope="module")
def trained() -> tuple[Trainer, Watch, RegressionTask, Any, Any]:
    """Return a Trainer that has trained one epoch of four batches, and what it was given."""
    watch, task = Watch(), RegressionTask()
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=4, limit_val_batches=1, callbacks=watch)
    train, val = regression_loader(8), regression_loader(8)
    trainer.fit(task, train, val)
    return trainer, watch, task, train, val


def test_arguments_and_the_run_can_be_read_before_a_fit() -> None:
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=4, limit_val_batches=1)
    assert {name: getattr(trainer, name) for name in BEFORE_A_FIT} == BEFORE_A_FIT
    assert (trainer.accelerator, type(trainer.profiler).__name__) == ("cpu", "PassThroughProfiler")


def test_the_run_can_be_read_after_a_fit(trained: tuple[Trainer, Watch, RegressionTask, Any, Any]) -> None:
    trainer, _, task, train, val = trained
    assert trainer.model is task
    assert trainer.train_dataloader is train
    assert trainer.val_dataloaders is val
    assert (trainer.enable_validation, trainer.num_sanity_val_batches, trainer.val_check_batch) == (True, [1], 4)


def test_the_last_batch_of_an_epoch_is_known_while_it_runs(
    trained: tuple[Trainer, Watch, RegressionTask, Any, Any],
) -> None:
    assert trained[1].last == trained[1].at_end == [False, False, False, True]


def test_the_state_says_what_runs_and_how_it_ended(trained: tuple[Trainer, Watch, RegressionTask, Any, Any]) -> None:
    trainer, watch = trained[:2]
    assert watch.stages == ["sanity_check", *["train"] * 4, "validate"]
    assert watch.state == (TrainerFn.FITTING, TrainerStatus.RUNNING, False, 4)
    assert (trainer.state.fn, trainer.state.stage, trainer.state.status) == ("fit", None, "finished")
    assert trainer.state.finished
    assert trainer.state.stopped


def test_the_state_of_a_new_trainer_and_of_a_failed_one() -> None:
    trainer = quiet_trainer(max_epochs=1)
    assert (trainer.state.fn, trainer.state.stage, trainer.state.status) == (None, None, "initializing")
    with pytest.raises(ZeroDivisionError):
        trainer.fit(StepTask(lambda task, batch, batch_idx: 1 / 0), regression_loader(8))
    assert (trainer.state.status, trainer.state.finished) == ("interrupted", False)
    assert RunningStage.SANITY_CHECKING.value == "sanity_check"


def test_internals_of_lightning_are_errors_with_a_replacement() -> None:
    trainer = quiet_trainer()
    for name in INTERNALS:
        with pytest.raises(AttributeError, match=f"trainer.{name} does not exist here: .+"):
            getattr(trainer, name)


def test_the_error_for_a_misspelt_attribute_names_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"'Trainer' has no attribute 'globl_step'. Did you mean 'global_step'\?"):
        _ = quiet_trainer().globl_step


def test_the_checkpoint_that_was_loaded_is_known(tmp_path: Any) -> None:
    trainer = fitted(RegressionTask(), regression_loader(8), max_steps=1)
    saved = trainer.save_checkpoint(tmp_path / "saved")
    trainer = fitted(RegressionTask(), regression_loader(8), ckpt_path=saved, max_steps=2)
    assert trainer.ckpt_path == str(saved)
    trainer.validate(RegressionTask(), regression_loader(8), verbose=False)
    assert trainer.ckpt_path is None


def test_the_loss_scaler_is_known_during_a_fit() -> None:
    found: list[Any] = []

    look = LambdaCallback(on_train_start=lambda trainer, task: found.append(trainer.scaler))
    quiet_trainer(max_steps=1, precision="16-mixed", callbacks=look).fit(RegressionTask(), regression_loader(8))
    assert type(found[0]).__name__ == "GradScaler"


def test_the_logger_can_be_set_between_two_fits(tmp_path: Any) -> None:
    trainer = quiet_trainer(max_steps=1, log_every_n_steps=1, default_root_dir=tmp_path)
    logger = CSVLogger(tmp_path)
    trainer.logger = logger
    assert trainer.loggers == [logger]
    trainer.fit(RegressionTask(), regression_loader(8))
    assert logger.log_dir is not None
    assert Path(logger.log_dir, "metrics.csv").exists()
    trainer.logger = None
    assert trainer.logger is None
    trainer.logger = True
    assert isinstance(trainer.logger, TensorBoardLogger)

    change = LambdaCallback(on_train_start=lambda trainer, task: setattr(trainer, "logger", None))
    with pytest.raises(ConfigurationError, match=r"cannot be changed while fit\(\) runs"):
        quiet_trainer(max_steps=1, callbacks=change).fit(RegressionTask(), regression_loader(8))


class _Keeping(RegressionTask):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"].update(width=5)


def test_on_save_checkpoint_may_change_the_saved_hyperparameters(tmp_path: Path) -> None:
    task = _Keeping()
    fitted(task, regression_loader(2), max_epochs=1).save_checkpoint(tmp_path / "saved")
    assert task.hparams.width == 2
    assert _Keeping.load_from_checkpoint(tmp_path / "saved").hparams.width == 5
