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
def test_the_task_is_accepted_as_task_and_as_model_and_not_as_both(verb: str) -> None:
    task = RegressionTask()
    assert _call(verb, task=task).task is _call(verb, model=task).task is task
    with pytest.raises(ConfigurationError, match=rf"{verb}\(\) received two tasks"):
        _call(verb, task, model=RegressionTask())


def test_a_fit_without_a_task_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"fit\(\) needs a task"):
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


def test_tpu_cores_is_an_error_that_names_the_accelerator() -> None:
    with pytest.raises(ConfigurationError, match="accelerator='tpu'"):
        quiet_trainer(tpu_cores=8)
    if importlib.util.find_spec("torch_xla") is None:
        with pytest.raises(ConfigurationError, match=r"pip install torch==\S+ 'torch_xla\[tpu\]=="):
            quiet_trainer(accelerator="tpu")


def test_every_verb_accepts_weights_only_and_a_fit_resumes_all_the_same(tmp_path: Path) -> None:
    trainer = fitted(RegressionTask(), regression_loader(8), max_steps=2)
    checkpoint = trainer.save_checkpoint(tmp_path / "saved")
    trainer = quiet_trainer(max_steps=3)
    trainer.fit(RegressionTask(), regression_loader(8), ckpt_path=checkpoint, weights_only=True)
    assert (trainer.global_step, trainer.resumed) == (3, True)
    for verb in ("validate", "test", "predict"):
        getattr(trainer, verb)(RegressionTask(), regression_loader(8), ckpt_path=checkpoint, weights_only=True)
    assert isinstance(RegressionTask.load_from_checkpoint(checkpoint, weights_only=True), RegressionTask)
