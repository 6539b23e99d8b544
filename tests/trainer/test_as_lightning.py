"""Trainwright in the place of Lightning: modules, metadata, scripts, and programs that sub-class Lightning's names."""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import trainwright
from trainwright.checkpoint.task_objects import describe
from trainwright.core.errors import CheckpointError, ConfigurationError
from trainwright.core.names.constants import LIGHTNING_VERSION


@pytest.fixture
def lightning() -> Iterator[Any]:
    with trainwright.as_lightning():
        yield importlib.import_module("lightning")


# Import lines of installed packages; each name is a counterpart, or a class that raises when it is called.
IMPORTS = """
from lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.loggers.logger import Logger, rank_zero_experiment
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn
from lightning.fabric.utilities.seed import isolate_rng
from lightning.fabric.utilities.types import _PATH, LRScheduler, ReduceLROnPlateau
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks, loggers, tuner
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, LearningRateFinder, RichModelSummary
from lightning.pytorch.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from lightning.pytorch.callbacks.lr_monitor import LearningRateMonitor
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.core import LightningDataModule, LightningModule
from lightning.pytorch.core.datamodule import LightningDataModule
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.core.mixins import HyperparametersMixin
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.core.saving import load_hparams_from_yaml
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, RandomDataset
from lightning.pytorch.loggers import CometLogger, CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.utilities import _scan_checkpoints
from lightning.pytorch.loops import _EvaluationLoop, _FitLoop
from lightning.pytorch.loops.utilities import _verify_dataloader_idx_requirement
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.plugins import CheckpointIO, MixedPrecision, PrecisionPlugin
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision.precision import Precision
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS, _OUT_DICT, _ResultCollection
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.tuner.lr_finder import _LRFinder
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities import grad_norm, move_data_to_device, rank_zero_only
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.imports import _OMEGACONF_AVAILABLE, _RICH_AVAILABLE
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.model_summary import LayerSummary, ModelSummary, summarize
from lightning.pytorch.utilities.parsing import AttributeDict, get_init_args, lightning_hasattr
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, STEP_OUTPUT, LRSchedulerConfigType, _EVALUATE_OUTPUT
from lightning.pytorch.utilities.warnings import PossibleUserWarning
""".strip().splitlines()


@pytest.mark.parametrize("line", IMPORTS)
@pytest.mark.usefixtures("lightning")
def test_packages_can_import(line: str) -> None:
    found: dict[str, Any] = {}
    exec(line, found)
    old = line.replace("lightning.pytorch", "pytorch_lightning").replace("lightning.fabric", "lightning_fabric")
    again: dict[str, Any] = {}
    exec(old, again)
    del found["__builtins__"], again["__builtins__"]
    same = [name for name, value in found.items() if not isinstance(value, type(sys)) and again[name] is not value]
    assert same == []


def test_a_class_is_the_same_under_all_spellings(lightning: Any) -> None:
    import pytorch_lightning as pl  # type: ignore[import-not-found]  # exists under the replacement

    assert lightning.LightningModule is pl.LightningModule is lightning.pytorch.LightningModule
    assert pl.LightningModule is trainwright.TaskModule
    assert pl.callbacks.early_stopping.EarlyStopping is trainwright.EarlyStopping
    assert pickle.loads(pickle.dumps(lightning.LightningModule)) is trainwright.TaskModule
    assert "LightningModule" in lightning.pytorch.__all__
    assert not hasattr(lightning, "no_such_name")
    for name in ("lightning", "pytorch-lightning", "pytorch_lightning"):
        assert importlib.metadata.version(name) == lightning.__version__ == pl.__version__ == LIGHTNING_VERSION
        assert "Lightning-AI" in importlib.metadata.metadata(name)["Home-page"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lightning.no_such_module")


def test_a_name_without_a_counterpart_answers_when_it_is_used(lightning: Any) -> None:
    class Environment(lightning.pytorch.plugins.environments.SLURMEnvironment):  # type: ignore[misc]  # defined here
        pass

    with pytest.raises(ConfigurationError, match=r"use trainwright\.Accelerator"):
        lightning.Fabric(devices=1)
    with pytest.raises(ConfigurationError, match="Trainer\\(launcher="):
        Environment()
    with pytest.raises(AttributeError, match="Trainer\\(accelerator='cpu'\\)"):
        lightning.pytorch.accelerators.CUDAAccelerator.is_available()
    assert not isinstance(3, lightning.Fabric)


def test_a_program_trains(lightning: Any) -> None:
    from lightning.pytorch.demos.boring_classes import (  # type: ignore[import-not-found]  # as above
        BoringDataModule,
        BoringModel,
    )

    class Count(lightning.Callback):  # type: ignore[misc]  # as above
        steps = 0

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.steps += 1

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    count = Count()
    trainer = lightning.Trainer(
        max_epochs=1, limit_train_batches=3, callbacks=count, enable_model_summary=False, accelerator="cpu", **quiet
    )
    model = BoringModel()
    before = model.layer.weight.detach().clone()
    trainer.fit(model, datamodule=BoringDataModule())
    assert count.steps == 3
    assert not torch.equal(before, model.layer.weight)


def test_init_args_are_those_of_the_call(lightning: Any) -> None:
    from lightning.pytorch.utilities.parsing import get_init_args  # type: ignore[import-not-found]  # as above

    class Net(lightning.LightningModule):  # type: ignore[misc]  # as above
        def __init__(self, width: int, depth: int = 2, **more: int) -> None:
            super().__init__()
            self.found = get_init_args(sys._getframe())

    assert Net(4, size=5).found == {"width": 4, "depth": 2, "size": 5}


def test_it_refuses_an_imported_lightning_and_can_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with trainwright.as_lightning() as first:
        assert trainwright.as_lightning() is first
        importlib.import_module("pytorch_lightning.callbacks")
    assert not any(name.startswith(("lightning.", "pytorch_lightning")) for name in sys.modules)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", sys)
    with pytest.raises(ConfigurationError, match=r"^pytorch_lightning is imported already"):
        trainwright.as_lightning()


_SCRIPT = """
import sys
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
import trainwright

class Net(BoringModel):
    def on_train_end(self):
        import lightning.pytorch
        assert lightning.pytorch.Trainer is pl.Trainer

if __name__ == "__main__":
    pl.Trainer(fast_dev_run=True, accelerator="cpu", devices=int(sys.argv[1])).fit(Net())
    print(pl.Trainer is trainwright.Trainer, sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("devices", ["1", "2"])
def test_a_script_runs_unchanged(tmp_path: Path, devices: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-m", "trainwright.as_lightning", str(script), devices]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip().endswith(f"True {[devices]}")


class Kept(trainwright.TaskModule):
    """A task that adds an object to its checkpoints, as tasks of libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).mean()
        self.log("loss", loss, batch_size=torch.tensor(1))  # type: ignore[arg-type]  # as neuralforecast does
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"normalizer": object(), "mean": 2.0}


class KeptData(trainwright.DataModule):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(self.hparams.rows, 1))


def test_libraries_load_checkpoints_with_torch_load(lightning: Any, tmp_path: Path) -> None:
    class Loads(lightning.fabric.plugins.io.torch_io.TorchCheckpointIO):  # type: ignore[misc]  # defined here
        def load_checkpoint(self, path: str) -> dict[str, Any]:
            raise NotImplementedError

    with pytest.warns(trainwright.TrainwrightWarning, match="Loads.load_checkpoint is not called"):
        trainer = trainwright.Trainer(
            max_epochs=1, default_root_dir=tmp_path, plugins=[Loads()], logger=False, accelerator="cpu"
        )
    task = Kept()
    with pytest.warns(trainwright.TrainwrightWarning, match="written without the entry 'normalizer'"):
        trainer.fit(task, datamodule=KeptData(2))
    found = torch.load(trainer.checkpoint_callback.best_model_path, map_location="cpu", weights_only=True)
    assert (found["global_step"], found["mean"]) == (2, 2.0)
    assert found[KeptData.CHECKPOINT_HYPER_PARAMS_KEY] == {"rows": 2}
    assert torch.equal(found["state_dict"]["net.weight"], task.net.weight)


def test_a_plugin_is_one_class_and_may_not_save(lightning: Any) -> None:
    plugins = lightning.pytorch.plugins
    assert plugins.TorchCheckpointIO is plugins.io.TorchCheckpointIO
    saver = type("Saver", (), {"save_checkpoint": print})
    saves = type("Saves", (saver, plugins.TorchCheckpointIO), {"load_checkpoint": print})
    with pytest.raises(trainwright.ConfigurationError):
        saves()


def test_objects_with_one_description_compute_the_same() -> None:
    class Power(torch.nn.Module):
        def __init__(self, power: int) -> None:
            super().__init__()
            self._power = power

    Power.__qualname__ = "Power"
    assert describe(Power(2)) == describe(Power(2)) != describe(Power(3))
    assert describe(torch.nn.MSELoss()) == "torch.nn.modules.loss.MSELoss(reduction='mean')"
    hooked = torch.nn.MSELoss()
    hooked.register_forward_hook(lambda *_: None)
    assert describe(hooked) == describe(torch.nn.CrossEntropyLoss(torch.ones(2, device="meta"))) == ""


class Plain(Kept):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        pass


def fit_in(folder: Path, max_epochs: int = 1, ckpt_path: Any = None, **options: Any) -> Any:
    options = {"enable_progress_bar": False, "enable_model_summary": False, **options}
    trainer = trainwright.Trainer(max_epochs=max_epochs, default_root_dir=folder, accelerator="cpu", **options)
    trainer.fit(Plain(), torch.utils.data.DataLoader(torch.ones(2, 1)), ckpt_path=ckpt_path)
    return trainer


def test_files_are_where_programs_look_for_those_of_lightning(lightning: Any, tmp_path: Path) -> None:
    first = fit_in(tmp_path, callbacks=lightning.pytorch.callbacks.ModelCheckpoint(save_last=True))
    runs = tmp_path / "lightning_logs"
    assert first.log_dir == str(runs / "version_0")
    assert first.checkpoint_callback.dirpath == str(first.checkpoint_dir) == str(runs / "version_0/checkpoints")
    assert {"epoch=0-step=2.ckpt", "last.ckpt"} <= set(os.listdir(first.checkpoint_dir))
    assert torch.load(first.checkpoint_callback.last_model_path)["global_step"] == 2
    fit_in(tmp_path, 2)
    assert "epoch=1-step=4.ckpt" in os.listdir(runs / "version_1/checkpoints")
    resumed = fit_in(tmp_path, 3, runs / "version_0/checkpoints/last.ckpt")  # a resumed run keeps its folder
    assert (resumed.global_step, resumed.log_dir) == (6, str(runs / "version_0"))
    assert "epoch=2-step=6.ckpt" in os.listdir(runs / "version_0/checkpoints")
    newest = runs / "version_0/checkpoints/epoch=2-step=6.ckpt"
    assert fit_in(tmp_path, 4, "last").global_step == 8
    assert sorted(os.listdir(runs)) == ["version_0", "version_1"]
    assert not newest.exists()  # the resumed run keeps one checkpoint
    trainer = trainwright.Trainer(default_root_dir=tmp_path, accelerator="cpu", enable_progress_bar=False)
    trainer.predict(PlainPredict(), torch.utils.data.DataLoader(torch.ones(2, 1)), ckpt_path="best")
    assert trainer.ckpt_path == str(runs / "version_0/checkpoints/epoch=3-step=8.ckpt")


class PlainPredict(Plain):
    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch)  # type: ignore[no-any-return]  # a module returns Any


def test_files_without_a_logger_and_with_folders_of_the_program(lightning: Any, tmp_path: Path) -> None:
    silent = fit_in(tmp_path / "silent", logger=False)
    assert silent.checkpoint_callback.best_model_path == str(tmp_path / "silent/checkpoints/epoch=0-step=2.ckpt")
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path / "logs", name="mine", version="here")
    given = fit_in(tmp_path / "given", logger=logger)
    assert os.listdir(tmp_path / "logs/mine/here/checkpoints") == os.listdir(given.checkpoint_dir)
    given.fit(given.task, torch.utils.data.DataLoader(torch.ones(2, 1)))
    crash = lightning.pytorch.callbacks.OnExceptionCheckpoint(tmp_path)
    assert crash.ckpt_path == str(tmp_path / "on_exception.ckpt")


def test_files_have_other_places_if_nothing_is_replaced(tmp_path: Path) -> None:
    trainer = fit_in(tmp_path)
    assert trainer.checkpoint_callback.best_model_path == str(tmp_path / "checkpoints/epoch=0-step=2")
    assert trainer.log_dir == str(tmp_path / "trainwright_logs/version_0")


class WithLoss(Kept):
    """A task that saves its loss as an object and reads it back, as the models of darts do."""

    def __init__(self, loss: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.loss = loss or torch.nn.MSELoss()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["loss"] = self.loss

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loss = checkpoint["loss"]


@pytest.mark.filterwarnings("ignore:on_save_checkpoint")
def test_a_task_keeps_its_own_object_if_the_checkpoint_describes_an_equal_one(lightning: Any, tmp_path: Path) -> None:
    data = torch.utils.data.DataLoader(torch.ones(2, 1))
    options: Any = {"default_root_dir": tmp_path, "logger": False, "accelerator": "cpu", "enable_progress_bar": False}
    trainer = trainwright.Trainer(max_epochs=1, **options)
    trainer.fit(WithLoss(torch.nn.MSELoss(reduction="sum")), data)
    saved = trainer.checkpoint_callback.best_model_path
    assert WithLoss.load_from_checkpoint(saved, loss=torch.nn.MSELoss(reduction="sum")).loss.reduction == "sum"
    with pytest.raises(CheckpointError, match=r"'loss'.*MSELoss\(reduction='sum'\).*no equal object"):
        WithLoss.load_from_checkpoint(saved)
    trainwright.Trainer(max_epochs=2, **options).fit(WithLoss(torch.nn.MSELoss(reduction="sum")), data, ckpt_path=saved)


def test_a_cluster_environment_that_agrees_with_the_variables_is_accepted(lightning: Any) -> None:
    class OfRay(lightning.pytorch.plugins.environments.LightningEnvironment):  # type: ignore[misc]  # defined here
        def world_size(self) -> int:
            return 1

        def global_rank(self) -> int:
            return 0

    class OfTwo(OfRay):
        def world_size(self) -> int:
            return 2

    trainer = trainwright.Trainer(plugins=[OfRay()], logger=False, accelerator="cpu")
    assert trainer.strategy.checkpoint_io is None  # anomalib reads it
    with pytest.raises(ConfigurationError, match="OfTwo is rank 0 of 2, and the environment variables"):
        trainwright.Trainer(plugins=[OfTwo()], logger=False, accelerator="cpu")


def test_a_plugin_that_saves_is_an_error(lightning: Any) -> None:
    class Saves(lightning.fabric.plugins.io.torch_io.TorchCheckpointIO):  # type: ignore[misc]  # defined here
        def save_checkpoint(self, *args: Any) -> None:
            raise NotImplementedError

    with pytest.raises(ConfigurationError, match="a checkpoint is a folder"):
        Saves()


def test_libraries_register_strategies_and_accelerators(lightning: Any) -> None:
    from lightning.pytorch.accelerators import (  # type: ignore[import-not-found]  # as above
        Accelerator,
        AcceleratorRegistry,
    )
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry  # type: ignore[import-not-found]  # as above

    class Chip(Accelerator):  # type: ignore[misc]  # as above
        name = "chip"

    AcceleratorRegistry.register(Chip().name, Chip, description="a chip")
    with pytest.raises(ConfigurationError, match="accelerator='chip' is unknown"):
        lightning.Trainer(accelerator="chip")

    @StrategyRegistry.register("ddp_static", static_graph=True, override=True)
    class Static(DDPStrategy):  # type: ignore[misc]  # as above
        pass

    assert "ddp_static" in StrategyRegistry.available_strategies()
    assert lightning.Trainer(strategy="ddp_static", accelerator="cpu", logger=False).settings is not None


def imported_version() -> str:
    return str(importlib.import_module("lightning").__version__)


@pytest.mark.slow
@pytest.mark.usefixtures("lightning")
def test_spawned_processes_import_trainwright() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(imported_version) == LIGHTNING_VERSION


def test_a_callback_changes_the_batch_through_the_output_of_an_evaluation(tmp_path: Path) -> None:
    class Returns(Kept):
        def test_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
            return batch

    class Marks(trainwright.Callback):
        def on_test_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, *args: Any) -> None:
            outputs["label"] = 1
            assert batch["label"] == 1  # as post-processors of anomalib do

    trainer = trainwright.Trainer(callbacks=[Marks()], logger=False, accelerator="cpu", default_root_dir=tmp_path)
    trainer.test(Returns(), torch.utils.data.DataLoader([{"x": 1.0}]), verbose=False)
