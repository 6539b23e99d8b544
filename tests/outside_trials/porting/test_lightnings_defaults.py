"""Lightning's arguments are accepted at their defaults; another value of what is not there says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.errors import ConfigurationError
from trainwright.loggers import CSVLogger

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


@pytest.mark.parametrize(
    ("argument", "value", "advice"),
    [
        ("plugins", [object()], "Use precision= for number formats"),
        ("model_registry", "team/model", "ModelCheckpoint"),
        ("tpu_cores", 8, "accelerator='tpu'"),
    ],
)
def test_what_is_not_there_says_what_to_do(argument: str, value: Any, advice: str) -> None:
    with pytest.raises(ConfigurationError, match=argument) as caught:
        quiet_trainer(**{argument: value})
    assert advice in str(caught.value)


class WithHyperparameters(RegressionTask):
    """Saves its one argument."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.save_hyperparameters()


@pytest.mark.parametrize("wanted", [True, False])
def test_hyperparameters_are_logged_unless_told_otherwise(tmp_path: Path, wanted: bool) -> None:
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(max_steps=1, logger=logger, enable_autolog_hparams=wanted)
    trainer.fit(WithHyperparameters(), regression_loader(4))
    assert trainer.enable_autolog_hparams is wanted
    assert logger.log_dir is not None
    found = Path(logger.log_dir, "hparams.yaml")
    assert (found.exists() and "lr" in found.read_text()) is wanted
