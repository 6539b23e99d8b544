"""Where a run's numbers go: the buffer that `log` fills, the Logger contract and one file for each tracker.

Names are imported when they are first touched; `LOGGERS` holds the short names that a configuration may use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainwright.core.foreign_names import missing

if TYPE_CHECKING:
    from trainwright.loggers.console_logger import ConsoleLogger
    from trainwright.loggers.csv_logger import CSVLogger
    from trainwright.loggers.jsonl_logger import JSONLinesLogger
    from trainwright.loggers.logger import Logger, RunInfo
    from trainwright.loggers.logger_group import LoggerGroup
    from trainwright.loggers.metric_buffer import MetricBuffer
    from trainwright.loggers.metric_ranks import Flushed
    from trainwright.loggers.registry import LOGGERS, resolve_loggers
    from trainwright.loggers.tensorboard_logger import TensorBoardLogger
    from trainwright.loggers.versioned import VersionedLogger
    from trainwright.loggers.wandb_logger import WandbLogger

# Where each public name lives; the block above says the same to editors and type checkers, and a test compares them.
_HOMES = {
    "LOGGERS": "registry",
    "CSVLogger": "csv_logger",
    "ConsoleLogger": "console_logger",
    "Flushed": "metric_ranks",
    "JSONLinesLogger": "jsonl_logger",
    "Logger": "logger",
    "LoggerGroup": "logger_group",
    "MetricBuffer": "metric_buffer",
    "RunInfo": "logger",
    "TensorBoardLogger": "tensorboard_logger",
    "VersionedLogger": "versioned",
    "WandbLogger": "wandb_logger",
    "resolve_loggers": "registry",
}

__all__ = [
    "LOGGERS",
    "CSVLogger",
    "ConsoleLogger",
    "Flushed",
    "JSONLinesLogger",
    "Logger",
    "LoggerGroup",
    "MetricBuffer",
    "RunInfo",
    "TensorBoardLogger",
    "VersionedLogger",
    "WandbLogger",
    "resolve_loggers",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise missing(__name__, name, __all__)
    value = getattr(import_module(f"trainwright.loggers.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
