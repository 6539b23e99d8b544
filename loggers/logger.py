"""The contract of loggers: two methods, and optional ones with defaults."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.process import detect

if TYPE_CHECKING:
    import torch

Status = Literal["success", "failed", "interrupted"]


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run that are passed to its loggers.

    Attributes:
        root_dir: folder for loggers without a folder of their own.
        run_name: a name for the run, or None.
    """

    root_dir: Path
    run_name: str | None = None


class DummyExperiment:
    """Object that accepts every call and does nothing. It is `Logger.experiment` on all ranks except the main rank."""

    def __getattr__(self, name: str) -> DummyExperiment:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: object, **kwargs: object) -> DummyExperiment:
        return self

    def __getitem__(self, key: object) -> DummyExperiment:
        return self

    def __setitem__(self, key: object, value: object) -> None:
        return None

    def __iter__(self) -> Iterator[object]:
        # Without this method, Python would iterate by __getitem__, which never ends.
        return iter(())

    def __enter__(self) -> DummyExperiment:
        return self

    def __exit__(self, *exception: object) -> None:
        return None


class Logger(ABC):
    """Base class of loggers.

    The Trainer calls `start` once for each stage, then the `log_*` methods in any order, then `finish`. All calls are
    on the main rank and outside of steps. A finished logger may be started again and continues its log. `LoggerGroup`
    handles errors. A logger that is used without a Trainer starts itself at the first call, on the main rank.

    A sub-class defines the two abstract methods. If necessary, it also overrides `start` (which should call
    `super().start(run)`), `flush` and `finish`. A logger written for Lightning, with `save` and `finalize`, can be used
    unchanged. A logger must be picklable before `start`, because the Trainer sends it to other processes.

    Attributes:
        muted: set by the Trainer and by `Accelerator.init_trackers`: True on all ranks except the main rank. A muted
            logger starts and writes nothing.
        wants_graph: True if `log_graph` is to be called when a fit begins.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap every `log_*` method of a sub-class. The wrapper starts the logger if needed, and does nothing if
        `muted`. A logger whose `start` does not call `super().start` also counts as started.
        """
        super().__init_subclass__(**options)
        for name, method in list(vars(cls).items()):
            if not inspect.isfunction(method):
                continue
            if name == "start":
                cls.start = _noting_the_run(method)  # type: ignore[method-assign]  # wrapped on purpose
            elif name.startswith("log_"):
                # A checkpoint alone does not start a log.
                setattr(cls, name, _on_main_rank(method, starts=name != "log_checkpoint"))

    LOGGER_JOIN_CHAR: ClassVar[str] = "-"
    """Separator of `prefix` and a metric's name."""

    # Defaults for a sub-class whose `__init__` does not call this one.
    prefix: str = ""
    muted: bool = False
    wants_graph: bool = False
    _run: RunInfo | None = None  # None before `start` and after `finish`
    _starting: bool = False  # True while `_begin` calls `start`, which may call a method that starts the logger
    _step_of_call: int = -1  # of the last call of `log_metrics`

    def __init__(self, *, prefix: str = "") -> None:
        self.prefix = prefix

    @classmethod
    def in_folder(cls, root_dir: Path, project: str | None = None, **options: Any) -> Logger:
        """Return a logger that writes below a folder; for `Trainer(logger="csv")` and `Accelerator.init_trackers`.

        The default implementation is for loggers without a folder, a project and options.

        Args:
            root_dir: the folder.
            project: the name of the project or of the run. Default: None, which is the logger's default.
            options: options of the backend.

        Raises:
            ConfigurationError: an option is unknown.
        """
        if options:
            raise ConfigurationError(f"{cls.__name__} has no options, and got {', '.join(options)}.")
        return cls()

    # Opening and closing

    def start(self, run: RunInfo) -> None:
        """Open files or connections. Does nothing if they are open. Raises an error if a package is missing."""
        self._run = run

    def flush(self) -> None:
        """Write pending values to the log. Blocks on the disk. The default implementation calls `save` if it is
        overridden.
        """
        if type(self).save is not Logger.save:
            self.save()

    def finish(self, status: Status) -> None:
        """Flush and close. A second call does nothing. The default implementation calls `flush` and `finalize`."""
        if self._run is not None:
            self.flush()
            self._run = None
            self.finalize(status)

    def save(self) -> None:
        """Write pending values to the log. Lightning's name for `flush`.

        A sub-class overrides at most one of the two. Each default calls the other if that is overridden.
        """
        if type(self).flush is not Logger.flush:
            self.flush()

    def finalize(self, status: Status = "success") -> None:
        """Flush and close: Lightning's name for `finish`.

        A logger written for Lightning overrides it. `finish` calls it after `_run` is None, so that the two defaults do
        not call each other without an end.
        """
        if self._run is not None:
            self.finish(status)

    # The two methods that a sub-class must define

    @abstractmethod
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Record the run's hyper-parameters: nested mappings, sequences and arbitrary objects."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record values at `step`, the 0-based index of the last completed step. A step may have several calls.

        A call without `step` has the step after that of the previous call.
        """

    # Optional

    def log_evaluation_step(self, metrics: Mapping[str, float], step: int, stage: str) -> None:
        """Record what one batch of an evaluation has logged `on_step`. Default: `log_metrics` with this step.

        Args:
            metrics: numbers by name.
            step: number of earlier batches of this stage in the run. These steps are not those of training.
            stage: `"validate"` or `"test"`.
        """
        self.log_metrics(metrics=metrics, step=step)

    def log_image(self, key: str, image: Any, step: int) -> None:
        """Record an image: a tensor C×H×W or H×W, an array H×W×C or H×W (uint8, or floats in [0, 1]), or PIL."""
        _cannot_log(self, "images")

    def log_figure(self, key: str, figure: Any, step: int) -> None:
        """Record a matplotlib figure without closing it."""
        _cannot_log(self, "figures")

    def log_text(self, key: str, text: str, step: int) -> None:
        """Record a text."""
        _cannot_log(self, "text")

    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: object = None,
        step: int | None = None,
    ) -> None:
        """Record a table: `columns` with rows of `data`, or a pandas frame. Default: logged as Markdown text.

        Args:
            key: name of the table.
            columns: names of the columns. Default: None, which is `"0"`, `"1"`, ….
            data: rows of cells. Default: None, for a pandas frame or an empty table.
            dataframe: a pandas frame, instead of `columns` and `data`. Default: None.
            step: 0-based step. Default: None, which is 0 unless the logger has another default.
        """
        if self._begin():
            self._put_table(key, *_cells(columns, data, dataframe), step)

    def _put_table(self, key: str, columns: list[str], rows: list[list[Any]], step: int | None) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        cells = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
        self.log_text(key, "\n".join(f"| {' | '.join(line)} |" for line in cells), step or 0)

    def log_graph(self, model: torch.nn.Module, input_array: object = None) -> None:
        """Record the graph of `model.forward(input_array)`. Default input: `model.example_input_array`."""
        _cannot_log(self, "graphs")

    def log_checkpoint(self, path: Path, *, aliases: tuple[str, ...] = ()) -> None:
        """Record a complete checkpoint folder. `aliases` is `("best",)` for the best one. Default: nothing."""
        return None

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Record a checkpoint of a ModelCheckpoint: Lightning's form of `log_checkpoint`. Default: nothing."""
        return None

    @property
    def group_separator(self) -> str:
        """Separator between the parts of a metric's name."""
        return "/"

    @property
    def save_dir(self) -> str | None:
        """The parent folder of all output; None if there is none or it is not known yet."""
        return None

    @property
    def root_dir(self) -> str | None:
        """The folder of all runs of this name; None if there is none, or it is not known yet."""
        return None

    @property
    def name(self) -> str | None:
        """The name under which runs are grouped: a folder, a project."""
        return None

    @property
    def version(self) -> str | int | None:
        """The version that distinguishes this run from others of the same name; None until it is known."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The folder of this run's log; None if there is none, or it is not known before `start`."""
        return None

    @property
    def experiment(self) -> Any:
        """The backend's object. Starts the logger if needed. On other ranks than the main rank, its methods do
        nothing.
        """
        if self.muted:
            return DummyExperiment()
        return self._backend() if self._begin() else DummyExperiment()

    def _begin(self) -> bool:
        """Start below the current folder if no Trainer has started this logger. Return whether this process logs."""
        if self.muted:
            return False
        if self._run is None and not self._starting:
            # Of the processes that torchrun or srun has started, only one may open a log.
            if detect().rank != 0:
                return False
            self._starting = True
            try:
                self.start(RunInfo(Path.cwd()))
            finally:
                self._starting = False
        return True

    def _backend(self) -> Any:
        """Return the `experiment` of a started logger."""
        return self

    @property
    def is_started(self) -> bool:
        """True between `start` and `finish`."""
        return self._run is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a resumed run continues the same curves: JSON-compatible, without paths."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the log of the logger that returned `state`."""
        return None

    # For sub-classes

    def prefixed(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return `metrics` with `prefix` before each name."""
        start = self.prefix and f"{self.prefix}{self.LOGGER_JOIN_CHAR}"
        return {f"{start}{name}": value for name, value in metrics.items()}

    def warn_once(self, message: str) -> None:
        """Issue a TrainwrightWarning. Each message is issued once per logger."""
        if self.muted:
            return
        warned: set[str] = vars(self).setdefault("_warned", set())
        if message not in warned:
            warned.add(message)
            warnings.warn(message, TrainwrightWarning, stacklevel=3)


def _cells(columns: list[str] | None, data: list[list[Any]] | None, frame: Any) -> tuple[list[str], list[list[Any]]]:
    """Return the columns and rows of a table that is passed as `columns` and `data` or as a pandas frame."""
    if frame is not None:
        return [str(name) for name in frame.columns], frame.to_numpy().tolist()
    rows = [list(row) for row in data or []]
    return columns or [str(index) for index in range(len(rows[0]) if rows else 0)], rows


def _cannot_log(logger: Logger, what: str) -> None:
    logger.warn_once(f"{type(logger).__name__} cannot log {what}; they are skipped.")


def _noting_the_run(start: Callable[..., None]) -> Callable[..., None]:
    """Wrap a sub-class's `start`. The wrapper sets `_run`, also if `start` does not call `super().start`."""

    @functools.wraps(start)
    def call(self: Logger, run: RunInfo) -> None:
        start(self, run)
        if self._run is None:
            self._run = run

    return call


def _on_main_rank(method: Callable[..., Any], *, starts: bool) -> Callable[..., Any]:
    """Wrap a `log_*` method of a sub-class. The wrapper does nothing on other ranks than the main rank.

    With `starts`, it starts the logger if needed. It gives `log_metrics` a step if the caller passes none.
    """

    @functools.wraps(method)
    def call(self: Logger, *args: Any, **options: Any) -> Any:
        if self.muted or (starts and self._run is None and not self._begin()):
            return None
        if method.__name__ == "log_metrics":
            options |= zip(("metrics", "step"), args, strict=False)
            step = options.get("step")
            self._step_of_call = self._step_of_call + 1 if step is None else step
            options["step"] = self._step_of_call
            # By name, because a logger written for Lightning may declare the step first.
            return method(self, **options)
        return method(self, *args, **options)

    return call


class DummyLogger(Logger):
    """Logger that accepts every call and writes nothing. It replaces the loggers in a `fast_dev_run`."""

    @property
    def experiment(self) -> DummyExperiment:
        """An object whose methods do nothing."""
        return DummyExperiment()

    def _ignore(self, *args: Any, **options: Any) -> None:
        """Do nothing, with any arguments."""

    log_hyperparams = log_metrics = log_image = log_figure = log_text = log_table = log_graph = _ignore

    def __getattr__(self, name: str) -> DummyExperiment:  # methods of other loggers
        return getattr(DummyExperiment(), name)  # type: ignore[no-any-return]  # a DummyExperiment


class RemoteLogger(Logger):
    """Base class of loggers whose backend identifies a run by an id.

    Args:
        prefix: text before the name of each metric, followed by a dash. Default: `""`.
        log_model: `"all"` uploads every checkpoint. True uploads the last checkpoint at the end of the fit. Default:
            False.
        project: the logger's `name`. Default: None.
        id: id of the run to continue. It takes precedence over the id in a checkpoint. Default: None.
        dir: folder of the backend's files. Default: None, for a folder that `start` selects or a backend without files.
    """

    _project_argument: ClassVar[str] = "project"  # name of the argument for `in_folder`'s project
    # For `in_folder`: the name of the argument for a folder, and the sub-folder of the run's root folder to pass. None
    # for a backend without files.
    _folder_argument: ClassVar[tuple[str, str] | None] = None

    def __init__(
        self,
        *,
        prefix: str = "",
        log_model: Literal["all"] | bool = False,
        project: str | None = None,
        id: str | None = None,
        dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(prefix=prefix)
        if log_model not in (True, False, "all"):
            raise ConfigurationError(f"{type(self).__name__}(log_model={log_model!r}): expected True, False or 'all'.")
        self._log_model = log_model
        self._project = project
        self._id = id  # None until `start` or `load_state_dict` sets it
        self._is_id_fixed = id is not None  # `load_state_dict` does not replace an id that was passed
        self._dir = None if dir is None else Path(dir).expanduser()
        self._experiment: Any = None  # the backend's run, which `start` opens
        # With `log_model=True`: folder and aliases of the newest checkpoint, which `finish` uploads.
        self._last_checkpoint: tuple[Path, tuple[str, ...]] | None = None

    @classmethod
    def in_folder(cls, root_dir: Path, project: str | None = None, **options: Any) -> Logger:
        """Return a logger for runs of a project. Its files are below `root_dir` if the backend supports it."""
        arguments: dict[str, Any] = {}
        if project is not None:
            arguments[cls._project_argument] = project
        if cls._folder_argument is not None:
            name, folder = cls._folder_argument
            arguments[name] = str(root_dir / folder)
        return cls(**{**arguments, **options})

    @property
    def name(self) -> str | None:
        """The project."""
        return self._project

    @property
    def version(self) -> str | None:
        """The run's id; None until it is known."""
        return self._id

    @property
    def log_dir(self) -> str | None:
        """The folder of the backend's files; None if there is none, or it is not known yet."""
        return None if self._dir is None else str(self._dir)

    save_dir = log_dir

    def state_dict(self) -> dict[str, Any]:
        return {} if self._id is None else {"id": self._id}

    def log_checkpoint(self, path: Path, *, aliases: tuple[str, ...] = ()) -> None:
        """Upload a checkpoint now (`log_model="all"`), at the end of the fit (`True`), or not at all (`False`)."""
        if self._log_model == "all":
            self._put_checkpoint(path, aliases)
        elif self._log_model:
            self._last_checkpoint = (path, aliases)

    @abstractmethod
    def _put_checkpoint(self, path: Path, aliases: tuple[str, ...]) -> None:
        """Upload a checkpoint, or queue its upload."""

    def __getstate__(self) -> dict[str, Any]:
        """Omit the connection. A copy in another process opens a new connection with the same id."""
        return {**self.__dict__, "_run": None, "_experiment": None}
