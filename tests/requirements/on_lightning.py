"""Small programs for libraries that are built on Lightning. Prints the losses and results of one as JSON.

The order of shuffled data and the random numbers of loaders differ between Lightning and Trainwright, so both are
fixed (docs/migration.md, Equal numbers).
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset, dataloader

QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
SILENT = {**QUIET, "logger": False, "enable_checkpointing": False}
numbers: list[float] = []


class FixedOrder(Sampler[int]):
    """The same permutation in each epoch."""

    def __init__(self, data_source: Any, *args: Any, **kwargs: Any) -> None:
        self._length = len(data_source)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self._length, generator=torch.Generator().manual_seed(0)).tolist())


def fix_loaders() -> None:
    """Give every loader the fixed order, and a generator of its own."""
    original = DataLoader.__init__

    @functools.wraps(original)
    def create(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator().manual_seed(1)
        original(self, *args, **kwargs)

    DataLoader.__init__ = create  # type: ignore[method-assign]
    dataloader.RandomSampler = FixedOrder  # type: ignore[misc, assignment]


def record_losses() -> None:
    """Record the loss of each backward pass."""
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        loss = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        numbers.append(loss.sum().item())
        original(tensors, *args, **kwargs)

    torch.autograd.backward = backward


def images() -> DataLoader[Any]:
    x = torch.randn(12, 1, 16, 16)
    return DataLoader(TensorDataset(x, (x > 0).float()), batch_size=4, shuffle=True)


def series() -> Any:
    return np.sin(np.arange(60) / 5).astype("float32")


def darts() -> Any:
    from darts import TimeSeries
    from darts.models import NBEATSModel

    values = TimeSeries.from_values(series())
    layers = {"num_stacks": 1, "num_blocks": 1, "layer_widths": 8}
    model = NBEATSModel(10, 2, n_epochs=2, random_state=0, pl_trainer_kwargs=QUIET, **layers)
    model.fit(values[:50], val_series=values[40:])
    return model.predict(3).values()


def gluonts() -> Any:
    from gluonts.dataset.common import ListDataset
    from gluonts.torch.model.deepar import DeepAREstimator

    data = ListDataset([{"start": "2020-01-01", "target": series()}], freq="D")
    sizes = {"prediction_length": 4, "context_length": 8, "hidden_size": 4, "num_batches_per_epoch": 3, "batch_size": 4}
    estimator = DeepAREstimator(freq="D", trainer_kwargs={"max_epochs": 2, **QUIET}, **sizes)
    predictor = estimator.train(data)
    torch.manual_seed(0)
    return next(iter(predictor.predict(data))).mean


def monai() -> Any:
    from lightning.pytorch import LightningModule, Trainer
    from monai.losses import DiceLoss
    from monai.metrics import DiceMetric
    from monai.networks.nets import UNet

    class Segmentation(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = UNet(2, 1, 1, (4, 8), (2,))
            self.loss = DiceLoss(sigmoid=True)
            self.metric = DiceMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.metric((self.net(batch[0]) > 0).float(), batch[1])

        def on_validation_epoch_end(self) -> None:
            self.log("dice", self.metric.aggregate().item())
            self.metric.reset()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    trainer = Trainer(max_epochs=2, **SILENT)
    trainer.fit(Segmentation(), images(), images())
    return trainer.callback_metrics["dice"]


def neuralforecast() -> Any:
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    dates = pd.date_range("2020-01-01", periods=60)
    data = pd.DataFrame({"unique_id": "a", "ds": dates, "y": series()})
    model = NHITS(h=4, input_size=8, max_steps=4, val_check_steps=2, **SILENT)
    forecast = NeuralForecast([model], freq="D")
    forecast.fit(data, val_size=8)
    return forecast.predict()["NHITS"]


def optuna_integration() -> Any:
    import optuna
    from lightning.pytorch import LightningModule, Trainer
    from optuna_integration import PyTorchLightningPruningCallback

    class Convolution(LightningModule):  # type: ignore[misc]
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.net = torch.nn.Conv2d(1, 1, 3, padding=1)
            self.lr = lr

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.net(batch[0]) - batch[1]).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.training_step(batch, batch_idx))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.lr)

    def objective(trial: Any) -> float:
        torch.manual_seed(0)
        pruning = PyTorchLightningPruningCallback(trial, "loss")
        trainer = Trainer(max_epochs=3, callbacks=[pruning], **SILENT)
        trainer.fit(Convolution(trial.suggest_float("lr", 1e-4, 1.0, log=True)), images(), images())
        return float(trainer.callback_metrics["loss"])

    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0), pruner=pruner)
    study.optimize(objective, 4)
    states = [trial.state.value for trial in study.trials]
    assert len(set(states)) == 2, "one trial must be pruned, and one must complete"
    return states


def pytorch_forecasting() -> Any:
    import pandas as pd
    from lightning.pytorch import Trainer
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    table = pd.DataFrame({"time": np.arange(60), "group": "a", "value": series()})
    data = TimeSeriesDataSet(
        table, "time", "value", ["group"], max_encoder_length=8, max_prediction_length=4,
        time_varying_unknown_reals=["value"], target_normalizer=None,
    )  # fmt: skip
    loss = QuantileLoss()
    model = TemporalFusionTransformer.from_dataset(
        data, hidden_size=4, attention_head_size=1, loss=loss, log_interval=0
    )
    loader = data.to_dataloader(train=True, batch_size=8, num_workers=0)
    Trainer(max_epochs=2, limit_train_batches=3, **SILENT).fit(model, loader)
    return [parameter.sum().item() for parameter in model.parameters()]


def torch_geometric() -> Any:
    from lightning.pytorch import LightningModule, Trainer
    from torch_geometric.data import Data
    from torch_geometric.data.lightning import LightningDataset
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Graphs(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = GCNConv(3, 1)

        def forward(self, batch: Any) -> Any:
            return global_mean_pool(self.net(batch.x, batch.edge_index), batch.batch)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self(batch).squeeze(1) - batch.y).square().mean()

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graphs = [Data(x=torch.randn(3, 3), edge_index=edges, y=torch.randn(1)) for _ in range(8)]
    data = LightningDataset(graphs, pred_dataset=graphs, batch_size=4)
    model = Graphs()
    trainer = Trainer(max_epochs=2, **SILENT)
    trainer.fit(model, datamodule=data)
    return torch.cat(trainer.predict(model, datamodule=data))


def hydra() -> Any:
    from hydra.utils import instantiate

    callback = {"_target_": "pytorch_lightning.callbacks.EarlyStopping", "monitor": "val_loss"}
    trainer = instantiate({"_target_": "lightning.pytorch.Trainer", "max_epochs": 2, "callbacks": [callback], **SILENT})
    model = instantiate({"_target_": "lightning.pytorch.demos.boring_classes.DemoModel"})
    data = DataLoader(torch.randn(8, 32), batch_size=2)
    model.validation_step = lambda batch, batch_idx: model.log("val_loss", model(batch).mean())
    trainer.fit(model, data, data)
    return trainer.callback_metrics["val_loss"]


PROGRAMS = (darts, gluonts, hydra, monai, neuralforecast, optuna_integration, pytorch_forecasting, torch_geometric)

if __name__ == "__main__":
    fix_loaders()
    record_losses()
    torch.manual_seed(0)
    np.random.seed(0)  # gluonts draws its windows with NumPy
    chosen = next(program for program in PROGRAMS if program.__name__ == sys.argv[1])
    result = np.asarray(chosen(), dtype=float)
    print(json.dumps(numbers + result.ravel().tolist()))
