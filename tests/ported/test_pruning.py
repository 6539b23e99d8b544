"""A search for hyper-parameters with Optuna: a callback reports each epoch and prunes what looks hopeless."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import trainwright as L
from tests.ported.data import digits

pytestmark = [pytest.mark.slow, pytest.mark.requires("optuna", reason="the search is Optuna's")]


class Pruning(L.Callback):
    """Report a metric after each validation, and end a trial that the study gives up."""

    def __init__(self, trial: Any, monitor: str) -> None:
        self.trial, self.monitor = trial, monitor

    def on_validation_end(self, trainer: L.Trainer, task: L.TaskModule) -> None:
        import optuna

        if trainer.sanity_checking:
            return
        score = trainer.callback_metrics.get(self.monitor)
        if score is None:
            raise KeyError(f"{self.monitor} was not logged; there are {sorted(trainer.callback_metrics)}")
        self.trial.report(score.item(), step=trainer.current_epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned(f"pruned at epoch {trainer.current_epoch}")


class Classifier(L.TaskModule):
    """A perceptron of a suggested width."""

    def __init__(self, width: int, dropout: float, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the cross-entropy."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy."""
        correct = self.net(batch[0]).argmax(dim=1) == batch[1]
        self.log("val_acc", correct.float().mean())
        self.log("hp_metric", correct.float().mean(), on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def test_a_study_prunes_and_finds_a_good_learning_rate(tmp_path: Path) -> None:
    import optuna

    epochs: list[int] = []
    fixed = iter([1e-2, 1e-5, 1e-6])  # good, and two that learn nothing
    loaders = DataLoader(digits(), batch_size=64, shuffle=True), DataLoader(digits(train=False), batch_size=200)

    def objective(trial: Any) -> float:
        L.seed_everything(4)
        lr = next(fixed, None)
        model = Classifier(
            width=trial.suggest_int("width", 32, 64),
            dropout=trial.suggest_float("dropout", 0.0, 0.3),
            lr=trial.suggest_float("lr", lr or 3e-3, lr or 2e-2, log=True),
        )
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_epochs=6, logger=True, enable_checkpointing=False,
            callbacks=[Pruning(trial, "val_acc")], default_root_dir=tmp_path, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.logger.log_hyperparams(trial.params)
        try:
            trainer.fit(model, *loaders)
        finally:
            epochs.append(trainer.current_epoch)
        return trainer.callback_metrics["val_acc"].item()

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0),
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", category=UserWarning, module="optuna"
        )  # three trials have ranges of their own
        study.optimize(objective, n_trials=4)

    states = [trial.state.name for trial in study.trials]
    assert states[:3] == ["COMPLETE", "PRUNED", "PRUNED"]
    assert epochs[:3] == [6, 0, 0]
    assert study.best_value >= 0.88
    assert study.best_params["lr"] >= 3e-3
