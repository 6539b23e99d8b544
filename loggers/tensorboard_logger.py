"""Metrics as TensorBoard event files."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from trainwright.core.errors import ConfigurationError, nearest, require_package
from trainwright.core.measures import evaluating
from trainwright.core.rng import isolate_rng
from trainwright.loggers.hyperparams import flatten
from trainwright.loggers.images import to_pixels
from trainwright.loggers.logger import RunInfo
from trainwright.loggers.versioned import DEFAULT_NAME, VersionedLogger

_EVENT_PREFIX = "events.out.tfevents."
_EVENT_FILES = f"{_EVENT_PREFIX}*"
_WRITER_OPTIONS = ("comment", "purge_step", "max_queue", "flush_secs", "filename_suffix")


class TensorBoardLogger(VersionedLogger):
    """Logger that writes event files (and `hparams.yaml`) into `save_dir/name/version_N`; view them with
    `tensorboard --logdir`.

    Event files are only appended to. When a run resumes from an earlier step, a restart mark makes TensorBoard hide
    all values that were logged at this step or later.

    Args:
        save_dir, name, version, prefix, sub_dir: see `VersionedLogger`. Event files are in `sub_dir`.
        log_graph: log the task's graph (it needs `example_input_array`). Default: False.
        default_hp_metric: log the metric `hp_metric` with the hyper-parameters, so that TensorBoard lists the run in
            its table of hyper-parameters even if `log_hyperparams` receives no metrics. Default: True.
        writer_options: passed to `torch.utils.tensorboard.SummaryWriter`, for example `flush_secs=10`.

    Raises:
        ConfigurationError: SummaryWriter does not have the option. See also `VersionedLogger`.
    """

    NAME_HPARAMS_FILE = "hparams.yaml"
    _OPEN = ("_writer",)

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = DEFAULT_NAME,
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **writer_options: object,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, sub_dir=sub_dir)
        self.wants_graph = log_graph
        self._default_hp_metric = default_hp_metric
        for option in writer_options:
            if option not in _WRITER_OPTIONS:
                raise ConfigurationError(
                    f"TensorBoardLogger has no option {option!r}.{nearest(option, _WRITER_OPTIONS)} Options of "
                    f"SummaryWriter: {', '.join(_WRITER_OPTIONS)}."
                )
        self._writer_options = writer_options
        self._writer: Any = None  # a SummaryWriter, which the first entry creates

    @property
    def sub_dir(self) -> Path | None:
        """The sub-folder of the version's folder for event files, or None."""
        return self._sub_dir

    @property
    def hparams(self) -> dict[str, Any]:
        """The logged hyper-parameters, as in `hparams.yaml`."""
        return self._hyperparams

    def start(self, run: RunInfo) -> None:
        """Create the version's folder. The first entry creates the event file."""
        require_package("tensorboard", purpose="TensorBoardLogger")
        super().start(run)

    def has_log(self, folder: Path) -> bool:
        return next(folder.glob(_EVENT_FILES), None) is not None

    def last_steps(self) -> dict[str, int]:
        """Read the last step of each tag from the event files. Slow for large files."""
        loader = require_package(
            "tensorboard.backend.event_processing.event_file_loader", purpose="TensorBoardLogger", install="tensorboard"
        )
        last_steps: dict[str, int] = {}
        for path in sorted(self._folder().glob(_EVENT_FILES)):
            for event in loader.EventFileLoader(str(path)).Load():
                if event.HasField("session_log") and event.session_log.status == event.session_log.START:
                    # A restart mark hides values from its step on.
                    last_steps = {tag: min(last, event.step - 1) for tag, last in last_steps.items()}
                for value in event.summary.value:
                    last_steps[value.tag] = event.step
        return last_steps

    def remove_from(self, step: int, names: Collection[str] | None = None) -> None:
        """Hide values of all curves from `step` on. TensorBoard's restart mark cannot be limited to `names`."""
        events = require_package("tensorboard.compat.proto.event_pb2", purpose="TensorBoardLogger")
        mark = events.Event(step=step, session_log=events.SessionLog(status=events.SessionLog.START))
        self._backend().file_writer.add_event(mark, step)
        self._previous = {}  # the mark has hidden the later values of all curves

    def log_hyperparams(
        self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None, step: int = 0
    ) -> None:
        """Write `hparams.yaml` and TensorBoard's table of hyper-parameters.

        Args:
            params: hyper-parameters. The name of a nested entry is joined by slashes, as in `optimizer/lr`.
            metrics: metrics in the table. Default: None, which is `hp_metric` with the value -1. It is omitted without
                `default_hp_metric`, and in a folder with a log, which contains it already.
            step: the step at which `metrics` are logged. Default: 0.
        """
        self.write_hyperparams(params)
        if metrics is None:
            metrics = {}
            if self._default_hp_metric and not self._continues:
                metrics = {"hp_metric": -1.0}
        table = {name: str(value) if value is None else value for name, value in flatten(self._hyperparams).items()}
        summary = require_package("torch.utils.tensorboard.summary", purpose="TensorBoardLogger", install="tensorboard")
        writer = self._backend()
        for part in summary.hparams(table, dict(metrics)):
            writer.file_writer.add_summary(part)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        values = self.prefixed(metrics)
        self.advance(step, values)
        writer = self._backend()
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    def log_image(self, key: str, image: object, step: int) -> None:
        tag, writer = self._entry(key, step)
        writer.add_image(tag, to_pixels(image), step, dataformats="HWC")

    def log_figure(self, key: str, figure: object, step: int) -> None:
        tag, writer = self._entry(key, step)
        writer.add_figure(tag, figure, step, close=False)

    def log_text(self, key: str, text: str, step: int) -> None:
        """Add a text; TensorBoard reads it as Markdown."""
        tag, writer = self._entry(key, step)
        writer.add_text(tag, text, step)

    def log_graph(self, model: torch.nn.Module, input_array: object = None) -> None:
        """Trace `model` on `input_array` and add the graph.

        Runs `model.forward` several times in evaluation mode, because torch.jit.trace also checks the trace.

        Raises:
            ConfigurationError: no input to trace with is known.
        """
        if input_array is None:
            input_array = getattr(model, "example_input_array", None)
        if input_array is None:
            raise ConfigurationError(
                "TensorBoardLogger(log_graph=True) needs an input: set self.example_input_array in the task."
            )
        writer = self._backend()
        with evaluating(model), isolate_rng(), warnings.catch_warnings():
            # Tracing is deprecated in torch and warns of every constant; TensorBoard has no other way to a graph.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)  # the same, since torch 2.14
            warnings.simplefilter("ignore", vars(torch.jit)["TracerWarning"])  # public, but not in torch's annotations
            writer.add_graph(model, input_array)

    def flush(self) -> None:
        for log in self._of_evaluations.values():
            log.flush()
        if self._writer is not None:
            self._writer.flush()

    def _backend(self) -> Any:
        if self._writer is None:
            tensorboard = require_package("torch.utils.tensorboard", purpose="TensorBoardLogger", install="tensorboard")
            _wait_for_a_later_name(self._folder())
            self._writer = tensorboard.SummaryWriter(log_dir=str(self._folder()), **self._writer_options)
        return self._writer

    def _entry(self, key: str, step: int) -> tuple[str, Any]:
        """Hide values of an earlier run that conflict with a value at `step`. Return the tag and the writer."""
        (tag,) = self.prefixed({key: None})
        self.advance(step, [tag])
        return tag, self._backend()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _wait_for_a_later_name(folder: Path) -> None:
    """Wait until a new event file's name sorts after those in `folder`, for at most one second.

    TensorBoard reads the files in the order of their names, which begin with the creation time in seconds. A restart
    mark hides only values in files that are read earlier.
    """
    last = max((path.name for path in folder.glob(_EVENT_FILES)), default="")
    made_s = last.removeprefix(_EVENT_PREFIX).partition(".")[0]
    if made_s.isdigit():
        ahead_s = int(made_s) + 1 - time.time()
        time.sleep(min(max(ahead_s, 0.0), 1.0))  # do not wait longer for a name from a clock that is ahead
