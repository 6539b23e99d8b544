"""Arguments of the Trainer and of its fit, validate, test and predict, under Lightning's names."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import fitted, quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.errors import ConfigurationError
from trainwright.loggers import CSVLogger
from trainwright.trainer.trainer import Trainer

DEFAULTS: dict[str, Any] = {  # of Lightning 2.6.6's Trainer, but for what a test should not do
    "strategy": "auto", "num_nodes": 1, "precision": None, "callbacks": None, "fast_dev_run": False,
    "max_epochs": None, "min_epochs": None, "max_steps": -1, "min_steps": None, "max_time": None,
    "limit_train_batches": None, "limit_val_batches": None, "limit_test_batches": None, "limit_predict_batches": None,
    "overfit_batches": 0.0, "val_check_interval": None, "check_val_every_n_epoch": 1, "num_sanity_val_steps": None,
    "log_every_n_steps": None, "accumulate_grad_batches": 1, "gradient_clip_val": None,
    "gradient_clip_algorithm": None, "deterministic": None, "benchmark": None, "inference_mode": True,
    "use_distributed_sampler": True, "profiler": None, "detect_anomaly": False, "barebones": False, "plugins": None,
    "sync_batchnorm": False, "reload_dataloaders_every_n_epochs": 0, "default_root_dir": None,
    "enable_autolog_hparams": True, "model_registry": None,
}  # fmt: skip


def test_all_defaults_are_accepted() -> None:
    quiet_trainer(**DEFAULTS)
    quiet_trainer(plugins=[])


class WithHyperparameters(RegressionTask):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.save_hyperparameters()


@pytest.mark.parametrize("wanted", [True, False])
def test_enable_autolog_hparams_controls_logging_of_hyperparameters(tmp_path: Path, wanted: bool) -> None:
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(max_steps=1, logger=logger, enable_autolog_hparams=wanted)
    trainer.fit(WithHyperparameters(), regression_loader(4))
    assert trainer.enable_autolog_hparams is wanted
    assert logger.log_dir is not None
    found = Path(logger.log_dir, "hparams.yaml")
    assert (found.exists() and "lr" in found.read_text()) is wanted


VERBS = ("fit", "validate", "test", "predict")


def _call(verb: str, *args: Any, **named: Any) -> Trainer:
    trainer = quiet_trainer(max_steps=2)
    named["train_dataloaders" if verb == "fit" else "dataloaders"] = regression_loader(4)
    getattr(trainer, verb)(*args, **named)
    return trainer


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["model", "task"])
def test_the_task_is_accepted_as_task_and_as_model(verb: str, name: str) -> None:
    task = RegressionTask()
    assert _call(verb, **{name: task}).task is task


@pytest.mark.parametrize("verb", VERBS)
def test_two_different_tasks_are_an_error(verb: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{verb}\(\) received two tasks, as task= and as model=. Pass only"):
        _call(verb, RegressionTask(), model=RegressionTask())


def test_a_fit_without_a_task_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"fit\(\) needs a task: pass a TaskModule as its first argument"):
        _call("fit")


@pytest.mark.parametrize("verb", VERBS)
def test_positional_arguments_come_in_lightnings_order(verb: str) -> None:
    orders = {
        "fit": ["task", "train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path", "weights_only"],
        "validate": ["task", "dataloaders", "ckpt_path", "verbose", "datamodule", "weights_only"],
        "test": ["task", "dataloaders", "ckpt_path", "verbose", "datamodule", "weights_only"],
        "predict": ["task", "dataloaders", "datamodule", "return_predictions", "ckpt_path", "weights_only"],
    }
    parameters = inspect.signature(getattr(Trainer, verb)).parameters.values()
    positional = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional[1:] == orders[verb]


@pytest.mark.parametrize("cores", [1, 8, "auto"])
def test_tpu_cores_is_an_error_that_names_the_accelerator(cores: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        quiet_trainer(tpu_cores=cores)
    assert "accelerator='tpu'" in str(caught.value)
    if importlib.util.find_spec("torch_xla") is None:
        with pytest.raises(ConfigurationError, match=r"pip install torch==\S+ 'torch_xla\[tpu\]=="):
            quiet_trainer(accelerator="tpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    trainer = fitted(RegressionTask(), regression_loader(8), max_steps=2)
    return trainer.save_checkpoint(tmp_path / "saved")


@pytest.mark.parametrize("weights_only", [None, False, True])
def test_weights_only_does_not_change_how_a_fit_resumes(checkpoint: Path, weights_only: bool | None) -> None:
    trainer = quiet_trainer(max_steps=3)
    trainer.fit(RegressionTask(), regression_loader(8), ckpt_path=checkpoint, weights_only=weights_only)
    assert (trainer.global_step, trainer.resumed) == (3, True)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluations_accept_weights_only(checkpoint: Path, verb: str) -> None:
    trainer = quiet_trainer()
    getattr(trainer, verb)(RegressionTask(), regression_loader(8), ckpt_path=checkpoint, weights_only=True)
    assert isinstance(RegressionTask.load_from_checkpoint(checkpoint, weights_only=True), RegressionTask)
