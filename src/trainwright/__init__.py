"""Trainwright: a PyTorch training framework with two front doors, `Trainer` and `Accelerator`, over one engine.

Names are imported when they are first touched (PEP 562), so that `import trainwright` and the command line stay fast:
importing this package imports neither torch nor anything that is not part of Python.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright import callbacks, checkpoint, cli, core, data, loggers, strategies, templates, trainer
    from trainwright.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from trainwright.core.duration import Duration
    from trainwright.core.errors import (
        CheckpointError,
        ConfigurationError,
        MissingPackageError,
        Preempted,
        TaskError,
        TrainwrightError,
        TrainwrightWarning,
        WorkerError,
    )
    from trainwright.core.memory import clear_device_cache, find_executable_batch_size, release_memory
    from trainwright.core.rng import seed_everything
    from trainwright.core.state import StepResult, TrainState
    from trainwright.core.task import TaskModule
    from trainwright.data import CombinedLoader, DataModule, ShardedIterable
    from trainwright.loggers import (
        ConsoleLogger,
        CSVLogger,
        JSONLinesLogger,
        Logger,
        TensorBoardLogger,
        WandbLogger,
    )
    from trainwright.strategies import (
        DDPCommunicationHookType,
        DDPStrategy,
        DistributedDataParallelKwargs,
        FSDPStrategy,
        LocalSGDStrategy,
        SingleDeviceStrategy,
        Strategy,
    )
    from trainwright.trainer.trainer import Trainer
    from trainwright.trainer.tuner import Tuner

    __version__: str

_SUBMODULES = ("callbacks", "checkpoint", "cli", "core", "data", "loggers", "strategies", "templates", "trainer")

# Where each public name lives; the block above says the same to editors and type checkers, and a test compares them.
_HOMES = {
    "Callback": "trainwright.callbacks",
    "CheckpointError": "trainwright.core.errors",
    "clear_device_cache": "trainwright.core.memory",
    "CombinedLoader": "trainwright.data",
    "ConfigurationError": "trainwright.core.errors",
    "ConsoleLogger": "trainwright.loggers",
    "CSVLogger": "trainwright.loggers",
    "DataModule": "trainwright.data",
    "DDPCommunicationHookType": "trainwright.strategies",
    "DDPStrategy": "trainwright.strategies",
    "DistributedDataParallelKwargs": "trainwright.strategies",
    "FSDPStrategy": "trainwright.strategies",
    "Duration": "trainwright.core.duration",
    "EarlyStopping": "trainwright.callbacks",
    "find_executable_batch_size": "trainwright.core.memory",
    "JSONLinesLogger": "trainwright.loggers",
    "LearningRateMonitor": "trainwright.callbacks",
    "LocalSGDStrategy": "trainwright.strategies",
    "Logger": "trainwright.loggers",
    "MissingPackageError": "trainwright.core.errors",
    "ModelCheckpoint": "trainwright.callbacks",
    "Preempted": "trainwright.core.errors",
    "release_memory": "trainwright.core.memory",
    "seed_everything": "trainwright.core.rng",
    "ShardedIterable": "trainwright.data",
    "SingleDeviceStrategy": "trainwright.strategies",
    "StepResult": "trainwright.core.state",
    "Strategy": "trainwright.strategies",
    "TaskError": "trainwright.core.errors",
    "TaskModule": "trainwright.core.task",
    "TensorBoardLogger": "trainwright.loggers",
    "Trainer": "trainwright.trainer.trainer",
    "TrainState": "trainwright.core.state",
    "TrainwrightError": "trainwright.core.errors",
    "TrainwrightWarning": "trainwright.core.errors",
    "Tuner": "trainwright.trainer.tuner",
    "WandbLogger": "trainwright.loggers",
    "WorkerError": "trainwright.core.errors",
}

__all__ = [  # noqa: RUF022 -- classes first, then the folders: the order in which a reader meets them
    "Callback",
    "CheckpointError",
    "clear_device_cache",
    "CombinedLoader",
    "ConfigurationError",
    "ConsoleLogger",
    "CSVLogger",
    "DataModule",
    "DDPCommunicationHookType",
    "DDPStrategy",
    "DistributedDataParallelKwargs",
    "FSDPStrategy",
    "Duration",
    "EarlyStopping",
    "find_executable_batch_size",
    "JSONLinesLogger",
    "LearningRateMonitor",
    "LocalSGDStrategy",
    "Logger",
    "MissingPackageError",
    "ModelCheckpoint",
    "Preempted",
    "release_memory",
    "seed_everything",
    "ShardedIterable",
    "SingleDeviceStrategy",
    "StepResult",
    "Strategy",
    "TaskError",
    "TaskModule",
    "TensorBoardLogger",
    "Trainer",
    "TrainState",
    "TrainwrightError",
    "TrainwrightWarning",
    "Tuner",
    "WandbLogger",
    "WorkerError",
    "__version__",
    "callbacks",
    "checkpoint",
    "cli",
    "core",
    "data",
    "loggers",
    "strategies",
    "templates",
    "trainer",
]

# A checkout whose links to the top-level folders were not created (a clone without symlinks): find them at the root.
_here = os.path.dirname(os.path.abspath(__file__))
_root = os.path.dirname(os.path.dirname(_here))
if not os.path.isdir(os.path.join(_here, "trainer")) and os.path.isfile(os.path.join(_root, "pyproject.toml")):
    __path__.append(_root)


def _find_version() -> str:
    """Return the installed distribution's version; `"0+unknown"` in a checkout that was never installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("trainwright")
    except PackageNotFoundError:
        return "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _find_version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in _SUBMODULES:
        value = import_module(f"trainwright.{name}")
    else:
        raise AttributeError(f"module 'trainwright' has no attribute {name!r}")
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
