"""Experiment trackers of user-written training loops, with the names of Hugging Face Accelerate."""

from __future__ import annotations

import inspect
import math
import numbers
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainwright.core.errors import ConfigurationError, MissingPackageError, TrainwrightWarning, unknown
from trainwright.core.names.constants import LoggerType
from trainwright.core.names.foreign_names import check_owner
from trainwright.loggers.logger import DummyExperiment, Logger, RunInfo
from trainwright.loggers.registry import LOGGERS
from trainwright.processes.partial_state import PartialState


class GeneralTracker:
    """Base class of trackers.

    A subclass defines the class attributes `name` and `requires_logging_directory` (True if the tracker writes into the
    folder of the project), and the property `tracker`, which returns the object of the library. It implements
    `store_init_configuration` and `log`. `start` and `finish` are optional. Pass an instance to
    `Accelerator(log_with=…)`.

    Attributes:
        main_process_only: Only the first process calls the tracker. Default: True.
    """

    main_process_only: bool = True
    name: str
    requires_logging_directory: bool

    def start(self) -> None:
        """Open the run. Called by `init_trackers`. Does nothing by default."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the configuration of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Record values. `kwargs` are the tracker's options in `log_kwargs` of `Accelerator.log`."""

    def finish(self) -> None:
        """Write all data and close the run. Called by `end_training`. Does nothing by default."""


# The classes of `Accelerator(log_with="name")`, by name.
LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make a tracker available by its name: `Accelerator(log_with="name")`. Call it before the Accelerator is created.

    `init_trackers` calls the class with the project's name, with the logging folder if `requires_logging_directory` is
    True, and with the tracker's options of `init_kwargs` as keywords. A class with the name of an earlier one replaces
    it with a warning.

    Args:
        tracker_class: A subclass of `GeneralTracker` with the class attributes `name` and
            `requires_logging_directory`.

    Raises:
        ConfigurationError: `tracker_class` is another object, or lacks one of the attributes.
    """
    if not isinstance(tracker_class, type) or not issubclass(tracker_class, GeneralTracker):
        raise ConfigurationError(f"register_tracker_class({tracker_class!r}): pass a sub-class of GeneralTracker.")
    for attribute in ("name", "requires_logging_directory"):
        if not hasattr(tracker_class, attribute):
            raise ConfigurationError(
                f"the tracker {tracker_class.__name__} has no class attribute {attribute}. Add it."
            )
    name = tracker_class.name
    if name in LOGGER_TYPE_TO_CLASS:
        earlier = LOGGER_TYPE_TO_CLASS[name].__name__
        text = f"log_with={name!r} now creates a {tracker_class.__name__} instead of a {earlier}."
        warnings.warn(text, TrainwrightWarning, stacklevel=2)
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


class LoggerTracker(GeneralTracker):
    """Tracker that writes to a logger of `trainwright.loggers`. Each supported library has a subclass.

    Numbers, tensors with one element, strings, and mappings of these are recorded. The first value of another type
    raises a warning. Only the first process writes.

    Args:
        run_name: Name of the project.
        logging_dir: Folder of the project. Default: None, which is the current folder.
        options: Options of the library: the tracker's entry in `init_kwargs` of `init_trackers`.
    """

    # `class TensorBoardTracker(LoggerTracker, kind=LoggerType.TENSORBOARD)` calls this method and registers the class.
    def __init_subclass__(cls, kind: LoggerType | None = None, requires_folder: bool = False) -> None:
        if kind is not None:
            cls.name = kind.value
            cls.requires_logging_directory = requires_folder
            LOGGER_TYPE_TO_CLASS[cls.name] = cls

    def __init__(self, run_name: str, logging_dir: str | None = None, **options: Any) -> None:
        self._make_logger(run_name, logging_dir, options)

    # Not in `__init__`, whose arguments have other names and defaults in some sub-classes.
    def _make_logger(self, run_name: str, logging_dir: str | None, options: dict[str, Any]) -> None:
        self.run_name = run_name
        self._folder = Path(logging_dir or ".")
        self.logger: Logger = LOGGERS.get(self.name).in_folder(self._folder, run_name, **options)
        self._step = -1  # of the newest `log`
        self._has_warned = False  # of a value that cannot be recorded

    @property
    def tracker(self) -> Any:
        """The run's object of the tracker's library. On all processes except the first, an object without effect."""
        return self.logger.experiment

    def start(self) -> None:
        # Not in `__init__`: a tracker may be created before the Accelerator, which connects the processes.
        self.logger.muted = not PartialState().is_main_process
        if not self.logger.muted:
            self.logger.start(RunInfo(self._folder, self.run_name))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.logger.log_hyperparams(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Record values. Step None is the previous step + 1. Any of `kwargs` raises a ConfigurationError."""
        self._refuse(kwargs)
        self._step = self._step + 1 if step is None else int(step)
        metrics: dict[str, float] = {}
        for name, value in _flat(values):
            is_array = isinstance(value, (torch.Tensor, np.ndarray, np.generic))
            if is_array and math.prod(value.shape) == 1:
                value = value.item()
            if isinstance(value, numbers.Real):
                metrics[name] = float(value)
            elif isinstance(value, str):
                self.logger.log_text(name, value, self._step)
            elif not self._has_warned:
                self._has_warned = True
                kind = type(value).__name__
                article = "an" if kind[0] in "aeiouAEIOU" else "a"
                self.logger.warn_once(
                    f"{self.name} cannot log {name!r}, {article} {kind}; it is skipped, and so are later ones without "
                    "a warning."
                )
        if metrics:
            self.logger.log_metrics(metrics, self._step)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: object) -> None:
        """Record names with lists or arrays of images; see `Logger.log_image`. For `kwargs` see `log`.

        Step None is the step of the newest `log`, or 0. The names of several images are `name/0`, `name/1`, ….
        """
        self._refuse(kwargs)
        for key, images in values.items():
            for index, image in enumerate(images):
                name = key if len(images) == 1 else f"{key}/{index}"
                self.logger.log_image(name, image, self._step_beside_log(step))

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: object = None,
        step: int | None = None,
        **kwargs: object,
    ) -> None:
        """Record a table: `columns` and rows of `data`, or a pandas frame. For `kwargs` see `log`.

        Step None is the step of the newest `log`, or 0.
        """
        self._refuse(kwargs)
        self.logger.log_table(table_name, columns, data, dataframe, self._step_beside_log(step))

    def _step_beside_log(self, step: int | None) -> int:
        """Return the step of a value that `log` does not record. It does not advance the steps of `log`."""
        return max(self._step, 0) if step is None else int(step)  # a float or a tensor, as in `log`

    def _refuse(self, options: dict[str, object]) -> None:
        if options:
            raise ConfigurationError(
                f"log_kwargs={{{self.name!r}: {options!r}}} is not supported. Call the library's own method: "
                f"accelerator.get_tracker({self.name!r}, unwrap=True)."
            )

    def finish(self) -> None:
        self.logger.finish("success")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values of nested mappings: `{"a": {"b": 1}}` becomes `("a/b", 1)`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


class TensorBoardTracker(LoggerTracker, kind=LoggerType.TENSORBOARD, requires_folder=True):
    """TensorBoard: event files in `logging_dir/run_name`; options are those of `SummaryWriter`."""


class WandBTracker(LoggerTracker, kind=LoggerType.WANDB):
    """Weights & Biases: `run_name` is the project; options are those of `WandbLogger` and `wandb.init`."""


class CometMLTracker(LoggerTracker, kind=LoggerType.COMETML):
    """Comet: `run_name` is the project; options are those of `CometLogger`."""


class MLflowTracker(LoggerTracker, kind=LoggerType.MLFLOW):
    """MLflow: options are those of `MLFlowLogger`.

    Args:
        experiment_name: Name of the experiment. Default: None, which is `"Default"`, as in MLflow.
        logging_dir: See `LoggerTracker`.
        options: See `LoggerTracker`. `run_name` is the name of the run.
    """

    def __init__(self, experiment_name: str | None = None, logging_dir: str | None = None, **options: Any) -> None:
        self._make_logger(experiment_name or "Default", logging_dir, options)

    def log_figure(self, figure: object, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a figure of matplotlib or plotly as an artifact. For `save_kwargs` see `MlflowClient.log_figure`."""
        self.tracker.log_figure(self.logger.version, figure, artifact_file, **save_kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file as an artifact, in the folder `artifact_path` of the run. Default: its root."""
        self.tracker.log_artifact(self.logger.version, local_path, artifact_path)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store all files of a folder as artifacts; see `log_artifact`."""
        self.tracker.log_artifacts(self.logger.version, local_dir, artifact_path)


class ClearMLTracker(LoggerTracker, kind=LoggerType.CLEARML):
    """ClearML: `run_name` is the project; options are those of `ClearMLLogger` and `Task.init`."""


class DVCLiveTracker(LoggerTracker, kind=LoggerType.DVCLIVE):
    """DVCLive: files in `dvclive/run_name` of the folder; options are those of `DVCLiveLogger` and `dvclive.Live`.

    Args:
        run_name: Default: None, which is `"default"`.
        logging_dir, options: See `LoggerTracker`.
    """

    def __init__(self, run_name: str | None = None, logging_dir: str | None = None, **options: Any) -> None:
        self._make_logger(run_name or "default", logging_dir, options)


class TrackioTracker(LoggerTracker, kind=LoggerType.TRACKIO):
    """Trackio: `run_name` is the project; options are those of `TrackioLogger` and `trackio.init`."""


class SwanLabTracker(LoggerTracker, kind=LoggerType.SWANLAB):
    """SwanLab: `run_name` is the project; options are those of `SwanLabLogger` and `swanlab.init`."""


class CSVTracker(LoggerTracker, kind=LoggerType.CSV, requires_folder=True):
    """CSV: `metrics.csv` in `logging_dir/run_name`, without another package; options are those of `CSVLogger`."""


_REQUIRED = ("name", "requires_logging_directory", "tracker")


def read_trackers(log_with: object, folder: str | None) -> list[str | GeneralTracker]:
    """Return the trackers of `Accelerator(log_with=…)`.

    `"all"` selects every registered tracker, except CSV, whose package is installed and whose folder is set if it needs
    one.

    Raises:
        MissingPackageError: The package of a tracker is not installed.
        ConfigurationError: An entry is unknown or incomplete, or needs the folder of the project, which is not set.
    """
    trackers: list[str | GeneralTracker] = []
    if log_with is None:
        entries: list[Any] = []
    elif isinstance(log_with, (list, tuple)):
        entries = list(log_with)
    else:
        entries = [log_with]
    for one in entries:
        if isinstance(one, GeneralTracker):
            missing = [name for name in _REQUIRED if inspect.getattr_static(one, name, None) is None]
            if missing:
                raise ConfigurationError(f"the tracker {type(one).__name__} has no {', no '.join(missing)}. Add it.")
            trackers.append(one)
        elif one == LoggerType.ALL:
            for name in LOGGER_TYPE_TO_CLASS:
                if name == LoggerType.CSV or name in trackers:  # CSV is not a tracker of another library
                    continue
                if _reason_against(name, folder) is None:
                    trackers.append(name)
        elif isinstance(one, str) and (one in LOGGER_TYPE_TO_CLASS or one == LoggerType.AIM):
            name = str(one)
            error = _reason_against(name, folder)
            if error is not None:
                raise error
            if name not in trackers:
                trackers.append(name)
        else:
            check_owner(one)
            hint = (
                " Another tracker is an object of a sub-class of GeneralTracker, or a name of register_tracker_class."
            )
            names = [*LOGGER_TYPE_TO_CLASS, LoggerType.ALL.value]
            raise unknown("log_with", one if isinstance(one, str) else repr(one), names, hint)
    return trackers


def _reason_against(name: str, folder: str | None) -> Exception | None:
    """Return an error if the library is unsupported or not installed, or lacks a folder. Otherwise, return None."""
    if name not in LOGGER_TYPE_TO_CLASS:
        return ConfigurationError(
            "log_with='aim' is not supported: Aim's reader does not find the files that were written. Sub-class "
            "GeneralTracker to use it."
        )
    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    if name in LoggerType.list() and issubclass(tracker_class, LoggerTracker) and find_spec(name) is None:
        package = name.replace("_", "-")
        return MissingPackageError(
            f"log_with={name!r} needs a package that is not installed. Run: pip install {package}"
        )
    if tracker_class.requires_logging_directory and folder is None:
        return ConfigurationError(
            f"log_with={name!r} needs a folder. Pass project_dir='…', or "
            "project_config=ProjectConfiguration(logging_dir='…')."
        )
    return None


class LoopTrackers:
    """The trackers of an Accelerator. A tracker that raises an error is no longer used, with a warning.

    Args:
        kinds: The result of `read_trackers`: names, and the user's own objects.
        folder: The folder of the trackers, or None.

    Attributes:
        started: The trackers that are in use. Empty before `start` and after `finish`. A tracker that fails is removed.
    """

    def __init__(self, kinds: Sequence[str | GeneralTracker], folder: str | None) -> None:
        self._kinds = kinds
        self._folder = folder
        self.started: list[GeneralTracker] = []
        self._all: list[GeneralTracker] = []  # the trackers since `start`, including those that have failed
        self._unopened: list[GeneralTracker] = []  # the trackers that have failed in `start`

    def start(self, project: str, config: dict[str, Any] | None, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Open a run of each tracker with the hyper-parameters `config`. `options` maps names of trackers to options.

        Raises:
            ConfigurationError: `options` names an unknown tracker, or an option is not valid. No run remains open.
        """
        if self._kinds:  # without trackers, a script may still pass the options of those that it can use
            _check_names("init_kwargs", options, self._names)
        self.finish()
        self._unopened = []
        trackers = []
        for kind in self._kinds:
            if isinstance(kind, GeneralTracker):
                trackers.append(kind)
            else:
                trackers.append(self._make(kind, project, options.get(kind, {})))
        self._all = trackers
        self.started = list(trackers)
        try:
            self.each("start")
            if config is not None:
                self.each("store_init_configuration", config)
        except ConfigurationError:
            self.finish()
            raise

    @property
    def _names(self) -> list[str]:
        return [kind.name if isinstance(kind, GeneralTracker) else kind for kind in self._kinds]

    def _make(self, name: str, project: str, options: Mapping[str, Any]) -> GeneralTracker:
        """Create the tracker with a name. An unknown option of a logger is a ConfigurationError."""
        tracker_class: Any = LOGGER_TYPE_TO_CLASS[name]
        takes_folder = tracker_class.requires_logging_directory or issubclass(tracker_class, LoggerTracker)
        arguments = [project, self._folder] if takes_folder else [project]
        try:
            tracker: GeneralTracker = tracker_class(*arguments, **options)
        except TypeError as error:
            if not issubclass(tracker_class, LoggerTracker):  # a class of the user, whose error may be of its own code
                raise
            raise ConfigurationError(f"init_kwargs={{{name!r}: {dict(options)!r}}} is wrong: {error}.") from error
        return tracker

    def log(self, method: str, values: object, step: object, options: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Call `log` or `log_images` of each tracker. `options` maps names of trackers to options of the method.

        Raises:
            ConfigurationError: `values` is not a mapping, `step` is not a number, or `each` raises.
        """
        if self._kinds and not isinstance(values, Mapping):
            raise ConfigurationError(f"accelerator.{method}({values!r}): expected a mapping of names to values.")
        if self._kinds and step is not None and (isinstance(step, str) or not hasattr(step, "__int__")):
            raise ConfigurationError(f"accelerator.{method}(…, step={step!r}): expected a whole number or None.")
        self.each(method, values, step, options=options)

    @property
    def _starts_on_main_only(self) -> bool:
        """True on processes other than the main one, if the script starts trackers on the main process only.

        It is also True there before `start`, so that calls have no effect instead of raising an error.
        """
        return not self._all and not PartialState().is_main_process

    def each(self, method: str, *args: object, options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Call a method of each tracker that has this method. `options` maps names of trackers to options.

        Without trackers, the call has no effect. An error of a tracker is a warning, and removes it from `started`.

        Raises:
            ConfigurationError: Trackers are not started, an option is not valid, or `options` names an unknown tracker.
        """
        if self._starts_on_main_only:
            return
        if self._kinds and not self._all:
            raise ConfigurationError("the trackers are not started. Call accelerator.init_trackers('project') first.")
        _check_names("log_kwargs", options or {}, [tracker.name for tracker in self._all])
        is_main = PartialState().is_main_process
        for tracker in list(self.started):
            if not hasattr(tracker, method) or (tracker.main_process_only and not is_main):
                continue
            try:
                getattr(tracker, method)(*args, **(options or {}).get(tracker.name, {}))
            except ConfigurationError:
                raise
            except Exception as error:  # whatever a tracker raises, the training continues
                self.started.remove(tracker)
                is_option = isinstance(error, TypeError) and "unexpected keyword argument" in str(error)
                if method == "start" and is_option and isinstance(tracker, LoggerTracker):
                    text = f"an option in init_kwargs[{tracker.name!r}] is wrong: {error}."
                    raise ConfigurationError(text) from error
                if method == "start":
                    self._unopened.append(tracker)
                warnings.warn(
                    f"the tracker {tracker.name!r} failed in {method} with {type(error).__name__}: {error}. It is not "
                    "used any more; training and the other trackers continue.",
                    TrainwrightWarning,
                    stacklevel=3,
                )

    def get(self, name: str, *, unwrap: bool) -> Any:
        """Return a tracker, or with `unwrap` its library's object.

        The result is an object without effect if the tracker's start failed (with a warning), and on processes other
        than the first if the tracker has `main_process_only` or the script starts trackers on the first process only.

        Raises:
            ConfigurationError: No tracker has this name.
        """
        by_name = {tracker.name: tracker for tracker in self._all}
        if self._starts_on_main_only and name in self._names:
            return DummyExperiment()
        _check_names("get_tracker", [name], list(by_name))
        tracker = by_name[name]
        if tracker.main_process_only and not PartialState().is_main_process:
            return DummyExperiment()
        if tracker in self._unopened:
            text = f"the tracker {name!r} failed at its start: what get_tracker returns does nothing."
            warnings.warn(text, TrainwrightWarning, stacklevel=3)
            return DummyExperiment()
        return tracker.tracker if unwrap else tracker  # type: ignore[attr-defined]  # checked by read_trackers

    def finish(self) -> None:
        """Close all trackers. Repeated calls have no effect."""
        if self.started:
            self.each("finish")
        self.started = []
        self._all = []


def _check_names(argument: str, passed_names: Iterable[str], known_names: Sequence[str]) -> None:
    for name in passed_names:
        if name not in known_names:
            raise unknown(argument, name, known_names)
