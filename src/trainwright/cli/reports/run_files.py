"""Read the folder of a run: its record (`run.jsonl`), curves and hyper-parameters.

Curves come from files of the loggers: `metrics.csv`, `metrics.jsonl` or TensorBoard's event files. Folders without a
record, such as Lightning's `lightning_logs/version_0`, have curves only.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwright.core.errors import ConfigurationError, TrainwrightError, require_package
from trainwright.loggers.run_record import RECORD_FILE

STAGES = ("fit", "validate", "test", "predict")
_EVENT_FILES = "events.out.tfevents.*"
_MAX_STEP = 2**31  # reports store steps as int32
_NOT_METRICS = frozenset({"step", "time", "epoch", "hp_metric"})  # hp_metric is TensorBoard's placeholder
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class RunFileError(TrainwrightError):
    """Raised for a file of a run that cannot be read."""


@contextlib.contextmanager
def damage_named(file: Path | str) -> Iterator[None]:
    """Context for reading a file or using what was read. Errors of its content become a RunFileError.

    A damaged file can have any value at any place: a text as a step, a time in the year 30000, lists 1,000 deep.
    """
    try:
        yield
    except TrainwrightError:
        raise
    except OSError as error:
        raise RunFileError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, csv.Error) as error:
        raise RunFileError(f"{file} is damaged. {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class Curve:
    """Values of one metric, sorted by step.

    Attributes:
        steps: int64, shape [n].
        values: float64, shape [n]; may contain NaN.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(slots=True)
class RunFiles:
    """Contents of the files of a run.

    Attributes:
        folder: folder of the record or, without one, of the curves.
        curves: by metric name.
        events: lines of the record in order, except the lines in `progress`.
        progress: measurements at log steps in order, except steps that a rollback or resume has undone.
        trained: the line that the last `fit` with at least one step wrote when it began. Empty without such a fit.
        sources: files that were read. The record is the first.
    """

    folder: Path
    curves: dict[str, Curve] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    progress: list[dict[str, Any]] = field(default_factory=list)
    trained: dict[str, Any] = field(default_factory=dict)
    sources: list[Path] = field(default_factory=list)

    @property
    def named_in_errors(self) -> Path:
        """The path that errors name for wrong content: the record, or the first file of curves, or the folder."""
        return next(iter(self.sources), self.folder)

    @property
    def start(self) -> dict[str, Any]:
        """The line that the last `fit` with a step wrote when it began. Empty without a record.

        A `fit` that failed before its first step, such as a resume, does not describe the run. Without any trained
        step it is the last `fit`, or else the last other stage.
        """
        if self.trained:
            return self.trained
        starts = [event for event in self.events if event["event"] in STAGES]
        fits = [event for event in starts if event["event"] == "fit"]
        candidates = fits or starts
        return candidates[-1] if candidates else {}


def read_run(path: str | Path) -> RunFiles:
    """Read a run.

    The record is in the folder, below it, or in the folder of another logger of the run. The curves are in the folders
    of the run's loggers, or else beside the record.

    Args:
        path: folder of a run, a file in it, or a folder above several runs, of which the newest in which a fit
            began is read.

    Raises:
        ConfigurationError: `path` does not exist, or contains no run.
        RunFileError: a file cannot be read or is damaged.
        MissingPackageError: the curves are in event files, and tensorboard is not installed.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist. Pass the folder of a run, such as runs/version_0.")
    top = path if path.is_dir() else path.parent
    record = _newest(top, RECORD_FILE) or _record_of(top)
    run = RunFiles(top if record is None else record.parent)
    if record is not None:
        with damage_named(record):
            _read_record(record, run)
            log_folders = _log_folders(run)
        for folder in log_folders:
            if not run.curves:  # several loggers have the same curves
                _read_curves(folder, run)
    if not run.curves:
        _read_curves(run.folder.resolve(), run)
    if record is None and not run.curves:
        run.folder = _newest_logs(path, top)
        _read_curves(run.folder, run)
    return run


def _log_folders(run: RunFiles) -> list[Path]:
    """Return the folders of the run's loggers, as its record names them: relative to its own folder."""
    names = run.start.get("folders", {}).get("logs", [])
    return [(run.folder / name).resolve() for name in names]


def _newest_logs(path: Path, top: Path) -> Path:
    """Return the folder below `top` with the newest file of curves. `path` is the user's path, for the error."""
    files: list[Path] = []
    for pattern in _READERS:
        file = _newest(top, pattern)
        if file is not None:
            files.append(file)
    if not files:
        raise ConfigurationError(
            f"{path} is not the folder of a run, and has none below it: there is no {RECORD_FILE}, metrics.csv, "
            "metrics.jsonl or event file of TensorBoard. Pass the folder of a run."
        )
    return max(files, key=lambda file: file.stat().st_mtime).parent


def run_folders(top: str | Path) -> list[Path]:
    """Return the folders in `top` that have a record or curves, sorted by path. Sub-folders of these are omitted."""
    folders: set[Path] = set()
    for pattern in (RECORD_FILE, *_READERS):
        folders |= {file.parent for file in Path(top).rglob(pattern)}
    # A logger may write the values of evaluation steps into a sub-folder of its own.
    return sorted(folder for folder in folders if folder.parent not in folders)


def _record_of(logs: Path) -> Path | None:
    """Return the record of the run that wrote a folder of logs. The record may be in the folder of another logger."""
    logs = logs.resolve()
    if len(logs.parents) < 2:
        return None
    # runs/csv/version_0 has its record in runs/tensorboard/version_0, for example.
    for path in logs.parents[1].glob(f"*/*/{RECORD_FILE}"):
        with contextlib.suppress(RunFileError):  # a damaged record of another run
            run = RunFiles(path.parent)
            with damage_named(path):
                _read_record(path, run)
                if logs in _log_folders(run):
                    return path
    return None


def _newest(top: Path, pattern: str) -> Path | None:
    """Return the newest file with a name in a folder or, without one, in the folders below it.

    Runs in which a fit began come before those that only evaluated.
    """
    files = [*top.glob(pattern)] or [*top.rglob(pattern)]
    with_fit: set[Path] = set()
    if pattern == RECORD_FILE:
        for file in files:
            with damage_named(file):
                if b'"event": "fit"' in file.read_bytes():
                    with_fit.add(file)
    return max(files, key=lambda file: (file in with_fit, file.stat().st_mtime, file.name), default=None)


def _read_record(path: Path, run: RunFiles) -> None:
    """Read a record into `run.events`, `run.progress`, `run.trained` and `run.sources`."""
    run.sources.append(path)
    latest_fit: dict[str, Any] = {}
    for number, line in _json_lines(path):
        if not _is_event(line):
            raise RunFileError(f"{path}, line {number}: not an event of a run's record. The file is damaged.")
        if line["event"] == "fit":
            latest_fit = line
            # The steps from here on are run again.
            run.progress = [each for each in run.progress if each["step"] <= line["step"]]
        elif latest_fit and line["step"] > latest_fit["step"]:
            run.trained = latest_fit
        if line["event"] == "progress":
            run.progress.append(line)
        else:
            run.events.append(line)


def _is_event(line: object) -> bool:
    if not isinstance(line, dict):
        return False
    has_step = type(line.get("step")) is int  # True is an int for isinstance
    has_time = isinstance(line.get("time"), (int, float))
    return has_step and has_time and isinstance(line.get("event"), str)


def _read_curves(folder: Path, run: RunFiles) -> None:
    """Read the curves in a folder, from the first kind of file that has values."""
    for pattern, read in _READERS.items():
        files = sorted(folder.glob(pattern))
        points: dict[str, list[tuple[int, float]]] = {}  # metric → (step, value)
        for file in files:
            with damage_named(file):
                read(file, points)
                # After each file, so that an error of a value names the file that contains it. `if values`, because a
                # column of a CSV file may have none.
                curves = {name: _curve(values) for name, values in sorted(points.items()) if values}
        if points:
            run.sources += files
            run.curves = curves
            return


def _curve(points: list[tuple[int, float]]) -> Curve:
    """Return the curve of (step, value) points. Raise ValueError for a step that reports cannot store."""
    table = np.array(points, dtype=np.float64).reshape(-1, 2)
    if np.abs(table[:, 0]).max(initial=0) >= _MAX_STEP:
        raise ValueError(f"a step is beyond {_MAX_STEP}")
    order = np.argsort(table[:, 0], kind="stable")  # values of one step keep their order
    return Curve(table[order, 0].astype(np.int64), table[order, 1])


def _read_csv(path: Path, points: dict[str, list[tuple[int, float]]]) -> None:
    """Add the values of a CSV file to `points`. An empty cell has no value."""
    with open(path, encoding="utf-8", newline="") as file:
        # A crash may truncate the last line.
        rows = csv.reader(line for line in file if line.endswith("\n"))
        names = next(rows, [])
        if "step" not in names:
            raise RunFileError(f"{path}: the first line has no column 'step', so this is not a log of a run.")
        step_column = names.index("step")
        columns: list[tuple[int, list[tuple[int, float]]]] = []
        for i, name in enumerate(names):
            if name not in _NOT_METRICS:
                columns.append((i, points.setdefault(name, [])))
        for number, row in enumerate(rows, start=2):
            try:
                step = int(float(row[step_column]))
                for i, values in columns:
                    if i < len(row) and row[i]:
                        values.append((step, float(row[i])))
            except (ValueError, IndexError) as error:
                raise RunFileError(f"{path}, line {number}: {error}. The file is damaged.") from None


def _read_jsonl(path: Path, points: dict[str, list[tuple[int, float]]]) -> None:
    """Add the numbers in the lines of a JSON Lines file to `points`."""
    for number, line in _json_lines(path):
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise RunFileError(f"{path}, line {number}: expected an object with the key 'step'.")
        for name, value in line.items():
            if isinstance(value, str):
                value = _NOT_FINITE.get(value, value)
            if name not in _NOT_METRICS and isinstance(value, (int, float)):
                points.setdefault(name, []).append((line["step"], float(value)))


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line, without a last line that a crash has truncated."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith("\n"):
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise RunFileError(f"{path}, line {number}: {error}. The file is damaged.") from None


def _read_events(path: Path, points: dict[str, list[tuple[int, float]]]) -> None:
    """Read the scalars of an event file. A restart event removes all earlier values from its step on."""
    protos = require_package("tensorboard.compat.proto.event_pb2", purpose="reading event files", install="tensorboard")
    for event in _records(path, protos.Event):
        if event.HasField("session_log") and event.session_log.status == protos.SessionLog.START:
            for name, values in points.items():
                points[name] = [point for point in values if point[0] < event.step]
        for value in event.summary.value:
            if value.tag in _NOT_METRICS:
                continue
            if value.HasField("simple_value"):
                points.setdefault(value.tag, []).append((event.step, value.simple_value))
            elif value.HasField("tensor") and len(value.tensor.float_val) == 1:
                points.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))


def _records(path: Path, kind: Any) -> Iterator[Any]:
    """Yield the events of a file in TensorFlow's record format. An event that a crash has truncated ends the file.

    Format (`tensorflow/core/lib/io/record_writer.h`): length (uint64), checksum of the length (uint32), data, checksum
    of the data.
    """
    checksums = require_package(
        "tensorboard.compat.tensorflow_stub.pywrap_tensorflow", purpose="reading event files", install="tensorboard"
    )
    with open(path, "rb") as file:
        while len(header := file.read(12)) == 12:
            length, checksum = struct.unpack("<QI", header)
            begin = file.tell() - len(header)
            if checksum != checksums.masked_crc32c(header[:8]):
                raise RunFileError(f"{path}, byte {begin}: a checksum does not match. The file is damaged.")
            if length + 4 > path.stat().st_size - file.tell():  # truncated; a wrong length may be 1 TiB
                return
            data = file.read(length + 4)
            try:
                yield kind.FromString(data[:-4])
            except Exception as error:  # noqa: BLE001  # DecodeError of protobuf, which may have several versions
                raise RunFileError(f"{path}, byte {begin}: {error}. The file is damaged.") from None


_READERS = {"metrics.csv": _read_csv, "metrics.jsonl": _read_jsonl, _EVENT_FILES: _read_events}


def times_of(run: RunFiles) -> tuple[list[int], list[float]]:
    """Return steps and their times, sorted by step. Both are empty without a record.

    Steps are those of progress lines and of the start of each fit. Times are seconds since the first of them.
    """
    points: dict[int, float] = {}
    fits = [event for event in run.events if event["event"] == "fit"]
    for line in (*fits, *run.progress):
        # A resume starts at a step that the run has reached before: the later time counts.
        points[line["step"]] = max(line["time"], points.get(line["step"], 0.0))
    first = min(points.values(), default=0.0)
    steps = sorted(points)
    return steps, [points[step] - first for step in steps]
