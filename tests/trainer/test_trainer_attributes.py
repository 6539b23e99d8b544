from __future__ import annotations

import importlib.util
import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.runs import fitted, quiet_trainer
from tests.helpers.tasks import RegressionTask, StepTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.lambda_callback import LambdaCallback
from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.loggers import CSVLogger
from trainwright.strategies import DDPStrategy, FSDPStrategy
from trainwright.trainer.configuration.arguments import TrainerArguments
from trainwright.trainer.lightning_names import INTERNALS
from trainwright.trainer.trainer import Trainer

BEFORE_A_FIT: dict[str, Any] = {  # as Lightning 2.6.6 answers
    "check_val_every_n_epoch": 1, "checkpoint_callbacks": [], "ckpt_path": None, "device_ids": [0],
    "distributed_sampler_kwargs": None, "early_stopping_callbacks": [], "enable_autolog_hparams": True,
    "enable_validation": False, "gradient_clip_algorithm": None, "gradient_clip_val": None, "is_last_batch": False,
    "limit_predict_batches": 1.0, "limit_test_batches": 1.0, "limit_train_batches": 4, "limit_val_batches": 1,
    "min_epochs": None, "min_steps": None, "model": None, "node_rank": 0, "num_nodes": 1, "num_sanity_val_batches": [],
    "overfit_batches": 0.0, "predict_dataloaders": None, "received_sigterm": False,
    "reload_dataloaders_every_n_epochs": 0, "scaler": None, "test_dataloaders": None, "train_dataloader": None,
    "val_check_batch": None, "val_check_interval": 1.0, "val_dataloaders": None,
}  # fmt: skip


def test_the_dataclass_of_arguments_has_the_types_and_defaults_of_the_trainer() -> None:
    parameters = inspect.signature(Trainer).parameters.values()
    of_trainer = [(each.name, each.annotation, each.default) for each in parameters]
    assert [(each.name, each.type, each.default) for each in fields(TrainerArguments)] == of_trainer


def test_arguments_and_the_run_can_be_read_before_a_fit() -> None:
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=4, limit_val_batches=1)
    assert {name: getattr(trainer, name) for name in BEFORE_A_FIT} == BEFORE_A_FIT
    assert (trainer.accelerator, type(trainer.profiler).__name__) == ("cpu", "PassThroughProfiler")


@pytest.mark.parametrize("name", ["has_validation", "num_training_batches", "train_batch_size", "task"])
def test_what_needs_a_task_is_an_error_before_the_first_stage(name: str) -> None:
    with pytest.raises(TaskError, match="has no task yet"):
        getattr(quiet_trainer(), name)


def test_the_run_can_be_read_after_a_fit() -> None:
    task, train, val = RegressionTask(), regression_loader(8), regression_loader(8)
    stages: list[Any] = []

    def note(trainer: Any, *_: object) -> None:
        stages.append(trainer.state.stage)

    noting = LambdaCallback(on_validation_start=note, on_train_start=note)
    limits = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 1, "num_sanity_val_steps": 1}
    trainer = fitted(task, train, val, callbacks=noting, **limits)
    assert stages == ["sanity_check", "train", "validate"]
    assert (trainer.state.fn, trainer.state.stage, trainer.state.stopped) == ("fit", None, True)
    assert trainer.model is task
    assert trainer.train_dataloader is train
    assert trainer.val_dataloaders is val
    assert (trainer.enable_validation, trainer.num_sanity_val_batches, trainer.val_check_batch) == (True, [1], 4)


def test_internals_of_lightning_are_errors_with_a_replacement() -> None:
    trainer = quiet_trainer()
    for name in INTERNALS:
        with pytest.raises(AttributeError, match=f"trainer.{name} does not exist here: .+"):
            getattr(trainer, name)


VERBS = ("fit", "validate", "test", "predict")


def _call(verb: str, *args: Any, **named: Any) -> Trainer:
    trainer = quiet_trainer(max_steps=2)
    named["train_dataloaders" if verb == "fit" else "dataloaders"] = regression_loader(4)
    getattr(trainer, verb)(*args, **named)
    return trainer


@pytest.mark.parametrize("verb", VERBS)
def test_the_task_is_accepted_as_task_and_as_model_and_not_as_both(verb: str) -> None:
    task = RegressionTask()
    assert _call(verb, task=task).task is _call(verb, model=task).task is task
    with pytest.raises(ConfigurationError, match=rf"{verb}\(\) received two tasks"):
        _call(verb, task, model=RegressionTask())


def test_a_fit_without_a_task_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"fit\(\) needs a task"):
        _call("fit")


def test_tpu_cores_is_an_error_that_names_the_accelerator() -> None:
    with pytest.raises(ConfigurationError, match="accelerator='tpu'"):
        quiet_trainer(tpu_cores=8)
    if importlib.util.find_spec("torch_xla") is None:
        with pytest.raises(ConfigurationError, match=r"pip install torch==\S+ 'torch_xla\[tpu\]=="):
            quiet_trainer(accelerator="tpu")


def test_fit_loop_has_the_progress() -> None:
    seen: list[tuple[int, ...]] = []

    def step(task: RegressionTask, batch: Any, batch_idx: int) -> torch.Tensor:
        loop = task.trainer.fit_loop
        epochs, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress
        seen.append((loop.batch_idx, loop.total_batch_idx, epochs.ready, epochs.completed))
        assert (batches.current.ready, batches.total.ready) == (loop.batch_idx + 1, loop.total_batch_idx + 1)
        assert loop.epoch_loop.global_step == loop.total_batch_idx // 2
        return task.loss(batch)

    trainer = fitted(StepTask(step), regression_loader(4), max_epochs=2, accumulate_grad_batches=2)
    assert seen == [(total % 4, total, total // 4 + 1, total // 4) for total in range(8)]
    assert trainer.fit_loop.epoch_progress.total.ready == trainer.fit_loop.epoch_progress.current.completed == 2
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == 8
    assert trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    assert trainer.fit_loop.done
    assert not quiet_trainer(max_epochs=-1, max_steps=1).fit_loop.done
    assert quiet_trainer(max_epochs=-1, max_steps=0).fit_loop.done
    assert quiet_trainer(max_epochs=5, limit_train_batches=0).fit_loop.done


def test_libraries_can_read_private_names_of_lightning() -> None:
    """Gluonts asks for validation data, and optuna-integration for several processes."""
    seen: list[object] = []

    def note(trainer: Any, *_: object) -> None:
        loop = trainer.fit_loop
        seen.append((loop._data_source.is_defined(), loop.epoch_loop.val_loop._data_source.is_defined()))
        seen.append(trainer._accelerator_connector.is_distributed)

    for val_loader in (None, regression_loader(4)):
        callback = LambdaCallback(setup=note)
        trainer = fitted(RegressionTask(), regression_loader(4), val_loader, max_epochs=1, callbacks=callback)
    assert seen == [(True, False), False, (True, True), False]
    with pytest.raises(AttributeError, match=r"Use trainer\.num_val_batches"):
        _ = trainer.fit_loop.epoch_loop.val_loop.run
    with pytest.raises(AttributeError, match=r"Use trainer\.strategy"):
        _ = trainer._accelerator_connector.use_ddp
    with pytest.raises(AttributeError, match=r"epoch_progress, and epoch_loop with its val_loop\. See"):
        _ = trainer.fit_loop._results
    epoch_loop = trainer.fit_loop.epoch_loop
    with pytest.raises(AttributeError, match=r"trainer\.fit_loop\.epoch_loop has no 'max_epochs' here") as caught:
        _ = epoch_loop.max_epochs
    names = "max_steps, min_steps, batch_idx, total_batch_idx, global_step, batch_progress, and val_loop"
    assert f"It has the limits and the progress: {names}." in str(caught.value)


@pytest.mark.parametrize("name", ["_data_connector", "_logger_connector", "_checkpoint_connector"])
def test_a_private_name_of_lightning_gets_no_suggestion(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'{name}'. Private parts of Lightning's Trainer do not exist here.$"):
        getattr(quiet_trainer(), name)


def test_libraries_read_the_trainer_of_a_task() -> None:
    task = RegressionTask()
    assert task._trainer is None
    trainer = fitted(task, regression_loader(4), max_epochs=1)
    assert task._trainer is trainer is task.trainer
    assert trainer.strategy.lightning_module is task
    assert trainer.strategy.lr_scheduler_configs == trainer.lr_scheduler_configs
    task.__dict__.pop("_trainer", None)  # as neuralforecast does before it saves
    assert task._trainer is trainer
    task._trainer = None
    assert task._trainer is None
    with pytest.raises(TaskError, match="is not attached to a Trainer"):
        _ = task.trainer


def test_the_limits_of_fit_loop_continue_a_fit() -> None:
    task = RegressionTask()
    trainer = fitted(task, regression_loader(4), max_epochs=1)
    trainer.fit_loop.max_epochs = 3
    trainer.fit_loop.max_steps = 10
    assert (trainer.max_epochs, trainer.max_steps) == (3, 10)
    trainer.fit(task, regression_loader(4))
    assert trainer.global_step == 10
    trainer.fit_loop.max_steps = None
    assert trainer.max_steps == -1
    with pytest.raises(ConfigurationError, match="max_epochs='3': write a whole number"):
        trainer.fit_loop.max_epochs = "3"
    with pytest.raises(AttributeError, match=r"trainer\.fit_loop has no 'setup_data' here"):
        trainer.fit_loop.setup_data()


@pytest.mark.parametrize("verb", ["fit", "predict"])
@pytest.mark.parametrize("other", [False, True])
def test_a_verb_within_a_fit_is_refused_and_the_fit_goes_on(verb: str, other: bool) -> None:
    def call(trainer: Any, task: Any, *_: Any) -> None:
        run = trainer.run
        with pytest.raises(ConfigurationError, match=rf"trainer\.{verb}\(\) was called while fit\(\) runs"):
            getattr(quiet_trainer() if other else trainer, verb)(task, regression_loader(1, 2))
        assert trainer.run is run

    calls = LambdaCallback(on_train_batch_end=call)
    trainer = fitted(RegressionTask(), regression_loader(4, 2), max_epochs=2, callbacks=[calls])
    assert trainer.global_step == 4
    assert trainer.state.finished


def test_what_a_run_knows_can_be_read_and_not_set() -> None:
    trainer = quiet_trainer()
    with pytest.raises(AttributeError, match="global_step is read-only"):
        trainer.global_step = 3
    with pytest.raises(AttributeError, match=r"pass Trainer\(limit_val_batches=3\)"):
        trainer.limit_val_batches = 3
    trainer.log_every_n_steps = 7
    assert trainer.settings.log_every_n_steps == trainer.log_every_n_steps == 7


def test_folders_are_strings_and_the_strategy_has_lightnings_names(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Ask(Callback):
        def on_validation_epoch_end(self, trainer: Any, task: Any) -> None:
            strategy = trainer.strategy
            strategy.barrier("here")
            value = torch.tensor([1.0, 3.0])
            seen.append((trainer.evaluating, strategy.root_device, strategy.is_global_zero, strategy.model is task))
            seen.append((strategy.broadcast({"a": 1}), strategy.reduce(value).tolist(), strategy.reduce(value).shape))

    trainer = quiet_trainer(max_steps=1, default_root_dir=tmp_path, logger=CSVLogger(tmp_path), callbacks=Ask())
    trainer.fit(RegressionTask(), regression_loader(8), regression_loader(8))
    assert seen[-2:] == [(True, torch.device("cpu"), True, True), ({"a": 1}, [1.0, 3.0], (2,))]
    assert trainer.evaluating is False
    assert trainer.log_dir + "/metrics.csv" == str(trainer.logger.metrics_file)
    assert trainer.default_root_dir + "/x" == str(tmp_path / "x")
    for folder in (trainer.logger.log_dir, trainer.logger.save_dir, trainer.logger.root_dir):
        assert isinstance(folder, str)


def test_the_strategy_of_a_trainer_is_an_instance_of_the_configured_class() -> None:
    trainer = quiet_trainer(strategy="ddp", max_epochs=1)
    assert isinstance(trainer.strategy, DDPStrategy)
    assert not isinstance(trainer.strategy, FSDPStrategy)
    assert isinstance(quiet_trainer(strategy=trainer.strategy, max_epochs=1).strategy, DDPStrategy)
