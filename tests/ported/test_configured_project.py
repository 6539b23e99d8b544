"""A project that is built from one nested configuration: `_target_` names the class of each part, as Hydra does."""

from __future__ import annotations

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, random_split
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import trainwright as L
from tests.ported.data import digits


def instantiate(config: Any, **more: Any) -> Any:
    """Build what `_target_` names from the other entries, inner ones first; `_partial_` leaves the call for later."""
    if isinstance(config, list):
        return [instantiate(entry) for entry in config]
    if not isinstance(config, dict):
        return config
    built = {key: instantiate(value) for key, value in config.items() if not key.startswith("_")}
    if "_target_" not in config:
        return built
    module, _, name = config["_target_"].rpartition(".")
    target = getattr(import_module(module), name)
    if config.get("_partial_"):
        return lambda *args, **later: target(*args, **built, **more, **later)
    return target(**built, **more)


class DigitsData(L.DataModule):
    """Splits in `setup`, and is asked for its state."""

    def __init__(self, batch_size: int = 64, splits: tuple[int, int] = (1200, 200), num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train: Any = None

    def prepare_data(self) -> None:
        """Download."""
        digits()

    def setup(self, stage: str | None = None) -> None:
        """Split once."""
        if self.data_train is None:
            generator = torch.Generator().manual_seed(42)
            self.data_train, self.data_val = random_split(digits(), list(self.hparams.splits), generator)
            self.data_test = digits(train=False)
        if self.trainer is not None:
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size

    def loader(self, data: Any, shuffle: bool = False) -> Any:
        """Return a loader with the configured size."""
        return DataLoader(data, self.batch_size_per_device, shuffle=shuffle, num_workers=self.hparams.num_workers)

    def train_dataloader(self) -> Any:
        """Return the training data."""
        return self.loader(self.data_train, shuffle=True)

    def val_dataloader(self) -> Any:
        """Return the validation data."""
        return self.loader(self.data_val)

    def test_dataloader(self) -> Any:
        """Return the test data."""
        return self.loader(self.data_test)

    def teardown(self, stage: str | None = None) -> None:
        """Clean up."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing."""


class DigitsModule(L.TaskModule):
    """Gets its network, its optimizer and its schedule from outside."""

    def __init__(self, net: nn.Module, optimizer: Any, scheduler: Any, compile: bool) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net", "optimizer", "scheduler"])
        self.net, self.optimizer, self.scheduler = net, optimizer, scheduler
        self.train_acc, self.val_acc, self.test_acc = (MulticlassAccuracy(10, average="micro") for _ in range(3))
        self.train_loss, self.val_loss, self.test_loss = MeanMetric(), MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.net(images)

    def on_train_start(self) -> None:
        """Forget what the sanity check has left in the metrics."""
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return loss, predictions, classes."""
        images, classes = batch
        logits = self(images)
        return F.cross_entropy(logits, classes), logits.argmax(dim=1), classes

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Log metric objects."""
        loss, predicted, classes = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(predicted, classes)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Do nothing, as the template does."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log metric objects."""
        loss, predicted, classes = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(predicted, classes)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        """Log the best accuracy so far as a value: the object would be reset."""
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log metric objects."""
        loss, predicted, classes = self.model_step(batch)
        self.test_loss(loss)
        self.test_acc(predicted, classes)
        self.log("test/loss", self.test_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True, prog_bar=True)

    def setup(self, stage: str) -> None:
        """Compile if asked."""
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self) -> Any:
        """Complete the optimizer and the schedule with the parameters."""
        optimizer = self.optimizer(params=self.trainer.model.parameters())
        if self.scheduler is None:
            return {"optimizer": optimizer}
        schedule = {"scheduler": self.scheduler(optimizer=optimizer), "monitor": "val/loss", "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": {**schedule, "frequency": 1}}


class Net(nn.Module):
    """A perceptron with batch normalization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.layers(images)


CONFIG: dict[str, Any] = {
    "seed": 12345,
    "train": True,
    "test": True,
    "ckpt_path": None,
    "data": {"_target_": f"{__name__}.DigitsData", "batch_size": 64},
    "model": {
        "_target_": f"{__name__}.DigitsModule",
        "net": {"_target_": f"{__name__}.Net", "width": 64},
        "optimizer": {"_target_": "torch.optim.Adam", "_partial_": True, "lr": 0.01, "weight_decay": 0.0},
        "scheduler": {
            "_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "_partial_": True, "mode": "min", "factor": 0.1,
            "patience": 10,
        },
        "compile": False,
    },
    "callbacks": {
        "model_checkpoint": {
            "_target_": "trainwright.callbacks.ModelCheckpoint", "filename": "epoch_{epoch:03d}", "monitor": "val/acc",
            "mode": "max", "save_last": True, "auto_insert_metric_name": False,
        },
        "early_stopping": {
            "_target_": "trainwright.callbacks.EarlyStopping", "monitor": "val/acc", "patience": 100, "mode": "max",
        },
        "model_summary": {"_target_": "trainwright.callbacks.ModelSummary", "max_depth": -1},
    },
    "logger": {
        "csv": {"_target_": "trainwright.loggers.CSVLogger", "name": "csv/", "prefix": ""},
        "tensorboard": {
            "_target_": "trainwright.loggers.TensorBoardLogger", "name": None, "log_graph": False,
            "default_hp_metric": True, "prefix": "", "version": "",
        },
    },
    "trainer": {
        "_target_": "trainwright.Trainer", "min_epochs": 1, "max_epochs": 6, "accelerator": "cpu", "devices": 1,
        "check_val_every_n_epoch": 1, "deterministic": False, "enable_progress_bar": False, "log_every_n_steps": 5,
    },
}  # fmt: skip


def log_hyperparameters(objects: dict[str, Any]) -> None:
    """Hand what the run is made of to every logger, before it begins."""
    cfg, model, trainer = objects["cfg"], objects["model"], objects["trainer"]
    if not trainer.logger:
        return
    hparams = {
        "model": cfg["model"],
        "data": cfg["data"],
        "trainer": cfg["trainer"],
        "callbacks": cfg["callbacks"],
        "ckpt_path": cfg["ckpt_path"],
        "seed": cfg["seed"],
        "model/params/total": sum(p.numel() for p in model.parameters()),
        "model/params/trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    for logger in trainer.loggers:
        logger.log_hyperparams(hparams)


def train(cfg: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train and test as the configuration says; return (metrics, everything that was built)."""
    L.seed_everything(cfg["seed"], workers=True)
    datamodule = instantiate(cfg["data"])
    model = instantiate(cfg["model"])
    callbacks = [instantiate(each) for each in cfg["callbacks"].values()]
    logger = [instantiate(each) for each in cfg["logger"].values()]
    trainer = instantiate(cfg["trainer"], callbacks=callbacks, logger=logger)
    objects = {
        "cfg": cfg, "datamodule": datamodule, "model": model, "callbacks": callbacks, "logger": logger,
        "trainer": trainer,
    }  # fmt: skip
    if logger:
        log_hyperparameters(objects)
    if cfg["train"]:
        trainer.fit(model=model, datamodule=datamodule, ckpt_path=cfg["ckpt_path"])
    train_metrics = trainer.callback_metrics
    if cfg["test"]:
        ckpt_path = trainer.checkpoint_callback.best_model_path
        trainer.test(model=model, datamodule=datamodule, ckpt_path=None if ckpt_path == "" else ckpt_path)
    return {**train_metrics, **trainer.callback_metrics}, objects


def configured(folder: Path, **trainer: Any) -> dict[str, Any]:
    """Return a configuration whose files go into `folder`."""
    cfg = copy.deepcopy(CONFIG)
    cfg["trainer"] |= {"default_root_dir": str(folder), **trainer}
    cfg["callbacks"]["model_checkpoint"]["dirpath"] = str(folder / "checkpoints")
    for logger in cfg["logger"].values():
        logger["save_dir"] = str(folder)
    return cfg


def test_the_project_trains_and_tests_its_best(tmp_path: Path) -> None:
    metrics, objects = train(configured(tmp_path))
    assert metrics["val/acc_best"].item() >= 0.95
    assert metrics["test/acc"] >= 0.88
    assert metrics["train/acc"] >= 0.97
    assert {"train/loss", "val/loss", "test/loss"} <= set(metrics)
    assert objects["trainer"].checkpoint_callback.best_model_score == metrics["val/acc_best"]
    assert Path(objects["trainer"].checkpoint_callback.best_model_path).name.startswith("epoch_00")
    assert list(tmp_path.rglob("metrics.csv"))
    assert list(tmp_path.rglob("events.out.tfevents.*"))
    (recorded,) = (tmp_path / "csv").rglob("hparams.yaml")
    assert "weight_decay" in recorded.read_text()


def test_the_project_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    expected, whole = train(configured(tmp_path / "uninterrupted", max_epochs=3))
    train(configured(tmp_path / "stopped", max_epochs=2) | {"test": False})
    cfg = configured(tmp_path / "stopped", max_epochs=3) | {"ckpt_path": str(tmp_path / "stopped/checkpoints/last")}
    metrics, resumed = train(cfg)
    assert {name: float(metrics[name]) for name in expected} == {name: float(v) for name, v in expected.items()}
    torch.testing.assert_close(resumed["model"].net.state_dict(), whole["model"].net.state_dict(), rtol=0, atol=0)


def test_the_project_runs_fast_dev_run(tmp_path: Path) -> None:
    _, objects = train(configured(tmp_path, fast_dev_run=True))
    assert objects["trainer"].global_step == 1
