"""Group of all loggers of a run. The failure of a logger does not stop the run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.core.errors import ConfigurationError, MissingPackageError, TrainwrightWarning
from trainwright.loggers.logger import Logger, RunInfo, Status
from trainwright.loggers.run_record import RunRecord
from trainwright.loggers.versioned import VersionedLogger

if TYPE_CHECKING:
    import torch

# A failure in one of these methods disables the logger. Other methods are not called for every row.
_ESSENTIAL = ("start", "log_metrics", "log_evaluation_step", "flush", "finish")


class LoggerGroup:
    """Group of loggers: calls each logger in turn, on the main rank only.

    An error of a backend becomes a TrainwrightWarning that names the logger, the method and the error. A logger that
    fails in `start`, in logging metrics, in `flush` or in `finish` is disabled until the group is started again. After
    another failure, such as that of a graph or a checkpoint, the logger continues. `start` raises configuration errors,
    such as a package that is not installed. There is no communication between ranks.

    Args:
        loggers: the loggers, in the order of their calls. Default: `()`.
        is_main: True on the main rank. On other ranks all loggers are muted. Default: True.

    Attributes:
        record: the record of the run, `run.jsonl`, after `start`. None on other ranks than the main rank, or if no
            logger has a folder for each run.
    """

    def __init__(self, loggers: Iterable[Logger] = (), *, is_main: bool = True) -> None:
        self.loggers = list(loggers)
        self.is_main = is_main
        self._failed: list[Logger] = []  # loggers that are disabled until the next `start`
        self.record: RunRecord | None = None
        for logger in self.loggers:
            logger.muted = not is_main

    def __iter__(self) -> Iterator[Logger]:
        return iter(self.loggers)

    def __len__(self) -> int:
        return len(self.loggers)

    def __getitem__(self, index: int) -> Logger:
        return self.loggers[index]

    @property
    def active(self) -> list[Logger]:
        """The loggers that are called: on the main rank all that have not failed, on other ranks none."""
        if not self.is_main:
            return []
        return [logger for logger in self.loggers if logger not in self._failed]

    @property
    def log_dir(self) -> str | None:
        """The folder of the first logger that has a folder. It is known on the main rank after `start`."""
        for logger in self.loggers:
            if logger.log_dir is not None:
                return logger.log_dir
        return None

    def start(self, run: RunInfo) -> None:
        """Start every logger. Loggers with numbered folders in the same parent share the number.

        Raises:
            MissingPackageError, ConfigurationError: a logger is not configured correctly.
        """
        self._failed = []
        versions: dict[str | None, int | str] = {}  # by parent folder
        for logger in self.active:
            # A logger that was used before the Trainer has its version already. The other loggers use it.
            if isinstance(logger, VersionedLogger) and logger.is_started and logger.version is not None:
                versions.setdefault(logger.root_dir, logger.version)
        for logger in self.active:
            if not isinstance(logger, VersionedLogger):
                self._call(logger, "start", run, strict=True)
                continue
            root_dir = logger.root_dir or str(run.root_dir / logger.name)
            if root_dir in versions:
                logger.share_version(versions[root_dir])
            self._call(logger, "start", run, strict=True)
            if logger.version is not None:
                versions.setdefault(root_dir, logger.version)
        self.record = None
        for logger in self.active:
            if isinstance(logger, VersionedLogger) and logger.log_dir is not None:
                self.record = RunRecord(Path(logger.log_dir))
                break

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record hyper-parameters with every logger."""
        self._each("log_hyperparams", params)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record host-side numbers at a step with every logger. No effect without numbers."""
        if metrics:
            self._each("log_metrics", metrics=metrics, step=step)

    def log_evaluation_step(self, metrics: Mapping[str, float], step: int, stage: str) -> None:
        """Record the numbers of one evaluation step with every logger; see `Logger.log_evaluation_step`."""
        self._each("log_evaluation_step", metrics, step, stage)

    def log_graph(self, model: torch.nn.Module, input_array: object = None) -> None:
        """Record the task's graph with the loggers that request it (`wants_graph`)."""
        for logger in self.active:
            if logger.wants_graph:
                self._call(logger, "log_graph", model, input_array)

    def log_checkpoint(self, path: Path, *, aliases: tuple[str, ...] = (), saver: object = None) -> None:
        """Pass a published checkpoint to every logger; `saver` is the run's ModelCheckpoint, if any."""
        for logger in self.active:
            self._call(logger, "log_checkpoint", path, aliases=aliases)
            if saver is not None:
                self._call(logger, "after_save_checkpoint", saver)

    def flush(self) -> None:
        """Flush every logger."""
        self._each("flush")

    def finish(self, status: Status) -> None:
        """Finish every logger. It may be called after an exception, and more than once."""
        self._each("finish", status)
        if self.record is not None:
            self.record.close()
            self.record = None

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all loggers in order, each with the logger's class name."""
        return [{"logger": type(logger).__name__, **logger.state_dict()} for logger in self.loggers]

    def load_state_dict(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Load the states of `state_dict` into the loggers of the same class, in order.

        A logger then removes values that were logged after its state was saved. Loggers may have been added or removed
        since. Call this before `start` if possible.
        """
        states_by_class: dict[str | None, list[Mapping[str, Any]]] = {}
        for state in states:
            states_by_class.setdefault(state.get("logger"), []).append(state)
        for logger in self.loggers:
            states_of_class = states_by_class.get(type(logger).__name__)
            if states_of_class:
                state = states_of_class.pop(0)
                if logger in self.active:
                    self._call(logger, "load_state_dict", state)

    def _each(self, method: str, *args: object, **options: Any) -> None:
        for logger in self.active:
            self._call(logger, method, *args, **options)

    def _call(self, logger: Logger, method: str, *args: object, strict: bool = False, **options: object) -> None:
        """Call a method of a logger. With `strict`, configuration errors are raised. Other errors are warnings."""
        try:
            getattr(logger, method)(*args, **options)
        except Exception as error:  # whatever a tracker raises, the training continues
            if strict and isinstance(error, (ConfigurationError, MissingPackageError)):
                raise
            effect = "Only that is missing."
            if method in _ESSENTIAL:
                self._failed.append(logger)
                effect = "It is disabled for the rest of this run; training and the other loggers continue."
            warnings.warn(
                f"{type(logger).__name__}.{method} failed with {type(error).__name__}: {error}. {effect}",
                TrainwrightWarning,
                stacklevel=3,
            )
