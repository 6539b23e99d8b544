"""Short names of loggers, and the meaning of `Trainer(logger=...)`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.foreign_names import check_owner
from trainwright.core.registry import Registry
from trainwright.loggers.logger import Logger

LOGGERS: Registry[type[Logger]] = Registry(
    "logger",
    {
        "tensorboard": "trainwright.loggers.tensorboard_logger:TensorBoardLogger",
        "csv": "trainwright.loggers.csv_logger:CSVLogger",
        "jsonl": "trainwright.loggers.jsonl_logger:JSONLinesLogger",
        "console": "trainwright.loggers.console_logger:ConsoleLogger",
        "wandb": "trainwright.loggers.wandb_logger:WandbLogger",
        "mlflow": "trainwright.loggers.trackers.mlflow_logger:MLFlowLogger",
        "comet_ml": "trainwright.loggers.trackers.comet_logger:CometLogger",
        "clearml": "trainwright.loggers.trackers.clearml_logger:ClearMLLogger",
        "dvclive": "trainwright.loggers.trackers.dvclive_logger:DVCLiveLogger",
        "trackio": "trainwright.loggers.trackers.trackio_logger:TrackioLogger",
        "swanlab": "trainwright.loggers.trackers.swanlab_logger:SwanLabLogger",
    },
)
"""Short name → class; `LOGGERS.register("mine", "my_package.module:MyLogger")` adds one."""


def resolve_loggers(
    spec: bool | str | Logger | Iterable[str | Logger] | None, default_root_dir: str | Path
) -> list[Logger]:
    """Return the loggers for `Trainer(logger=spec)`, not started.

    Args:
        spec: a name in `LOGGERS`, a logger, or several of these. True or None selects TensorBoard, or CSV files if
            tensorboard is not installed. False or an empty list disables logging.
        default_root_dir: folder for loggers that are requested by name or by default.

    Raises:
        ConfigurationError: a name is unknown, or an object is not a logger.
    """
    if spec is None or spec is True:
        spec = "tensorboard" if importlib.util.find_spec("tensorboard") is not None else "csv"
    if spec is False:
        return []
    items: Iterable[object] = spec if isinstance(spec, Iterable) and not isinstance(spec, str) else [spec]
    loggers: list[Logger] = []
    for item in items:
        if not isinstance(item, (str, Logger)):
            check_owner(item)
            raise ConfigurationError(
                f"logger={spec!r}: expected True, False, a name ({', '.join(LOGGERS)}), a Logger, or a list of these."
            )
        if isinstance(item, str):
            item = LOGGERS.get(item).in_folder(Path(default_root_dir))
        loggers.append(item)
    return loggers
