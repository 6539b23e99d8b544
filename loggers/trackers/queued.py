"""Base class of loggers that queue their calls. A thread sends them to the backend."""

from __future__ import annotations

import atexit
import contextlib
import io
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from trainwright.core.errors import require_package
from trainwright.loggers.hyperparams import plain
from trainwright.loggers.images import to_pixels
from trainwright.loggers.logger import DummyExperiment, RemoteLogger, RunInfo, Status

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class QueuedLogger(RemoteLogger):
    """Logger that never waits for its backend while training runs.

    A daemon thread opens the run and writes logged values in order. Each call converts its values, puts them onto a
    bounded queue and returns. A full queue drops the new call, with one warning. `finish` reports the number of dropped
    calls. After an error of the backend nothing more is written, and every later call raises the error, `finish` as the
    last one. The next `start` opens the run again.

    A sub-class defines the abstract methods, and those of the following that its backend supports:
    `_write_image(key, pixels, step)` with pixels H×W×C of 1, 3 or 4 channels, `_write_text(key, text, step)`,
    `_write_table(key, columns, rows, step)`, `_write_checkpoint(path, aliases)`. The thread calls all of them.

    Attributes:
        capacity: the number of calls that the queue holds. Default: 10,000.
        start_patience: the number of seconds that `start` waits for the run. Default: 10.
        patience: the number of seconds that `finish` waits for the queue. Default: 60.
        dropped: the number of calls that a full queue has dropped since the last `start`.
    """

    capacity: int = 10_000
    start_patience: float = 10.0
    patience: float = 60.0
    # The backend's module. `start` imports it in the caller before it waits for the thread, because the import may take
    # longer than `start_patience`. None if there is nothing to import.
    _package: ClassVar[str | None] = None
    _closes_in_caller: ClassVar[bool] = False  # True: `finish` calls `_close` in the caller's thread
    # None: the backend does not support it. Then the base class warns or, for a table, logs text.
    _write_image: Any = None
    _write_text: Any = None
    _write_table: Any = None
    _write_checkpoint: Any = None
    dropped: int = 0
    _worker: _Worker | None = None  # the thread between `start` and `finish`
    _exists: bool = False  # True if this logger, or the one in the checkpoint, has opened the run before
    # True from `load_state_dict` until the run is open: the thread then reads which steps the run already has. A later
    # start of the same logger continues after its own last step, and reads nothing.
    _resumes: bool = False

    @abstractmethod
    def _open(self, run: RunInfo) -> None:
        """Open the run `_id`, or create a run if `_id` is None. Set `_experiment` and `_id`."""

    @abstractmethod
    def _write_metrics(self, metrics: dict[str, float], step: int, seconds: float) -> None:
        """Write values that were logged at the time `seconds`, in seconds since 1970. Names are from `_metric_name`."""

    @abstractmethod
    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        """Write nested dicts and lists of numbers, text and None."""

    @abstractmethod
    def _close(self, status: Status) -> None:
        """Close the run."""

    def _flush(self) -> None:
        """Write values that the backend has buffered. Default: no effect."""

    def _metric_name(self, name: str) -> str:
        """Return the name under which the backend stores a metric, as in `_last_steps`. Default: the same name."""
        return name

    def _last_steps(self) -> Mapping[str, int]:
        """Return the last step of each curve of the resumed run. Values up to that step are not written again.

        Default: an empty dict, for a backend that cannot read them. All values are written.
        """
        return {}

    def start(self, run: RunInfo) -> None:
        """Open the run in the thread, and wait for it at most `start_patience` seconds. If opening fails within this
        time, raise the backend's error. Warn if the run is not open by then.

        Does nothing if the run is open. After an error of the backend the run is closed and opened again.
        """
        if self._worker is not None and self._worker.error is not None:
            self._finish_silently()
        if self._run is not None:
            return
        if self._package is not None:
            pip = self._package.partition(".")[0].replace("_", "-")
            require_package(self._package, purpose=type(self).__name__, install=pip)
        self.dropped = 0
        worker = _Worker(self, run)
        has_answered = worker.has_answered.wait(self.start_patience)
        if has_answered and worker.error is not None:
            raise worker.error
        self._worker = worker
        if not has_answered:
            self.warn_once(
                f"{type(self).__name__}: the backend has not answered within {self.start_patience:g} s. Training "
                "continues. What is logged waits in the queue, and is written once the backend answers."
            )
        super().start(run)
        atexit.register(self._finish_silently)  # a program may end without `finish`, and the thread is a daemon

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue values. Values at steps that a resumed history already contains are skipped."""
        values = {self._metric_name(name): float(value) for name, value in self.prefixed(metrics).items()}
        # An unbound method, because `_worker` is None before `start`; `_put` then returns.
        self._put(_Worker.write_metrics, self._worker, values, int(step), time.time())

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._put(self._write_hyperparams, plain(params))

    def log_image(self, key: str, image: object, step: int) -> None:
        if self._write_image is None:
            return super().log_image(key, image, step)
        self._put(self._write_image, key, to_pixels(image), int(step))

    def log_figure(self, key: str, figure: Any, step: int) -> None:
        """Draw a matplotlib figure and queue its pixels."""
        if self._write_image is None:
            return super().log_figure(key, figure, step)
        from PIL import Image  # matplotlib needs it

        file = io.BytesIO()
        figure.savefig(file, format="png")
        self.log_image(key, Image.open(file).convert("RGB"), step)

    def log_text(self, key: str, text: str, step: int) -> None:
        if self._write_text is None:
            return super().log_text(key, text, step)
        self._put(self._write_text, key, str(text), int(step))

    def _put_table(self, key: str, columns: list[str], rows: list[list[Any]], step: int | None) -> None:
        if self._write_table is None:
            return super()._put_table(key, columns, rows, step)
        self._put(self._write_table, key, list(columns), plain(rows), int(step or 0))

    def _put_checkpoint(self, path: Path, aliases: tuple[str, ...]) -> None:
        self._put(_upload, self, path, aliases)

    def flush(self) -> None:
        """Queue a flush of the backend. It does not wait."""
        self._put(self._flush)

    def finish(self, status: Status) -> None:
        """Wait for the queue, at most `patience` seconds, and close the run. Warn about lost calls.

        Raises the first error of the backend, if there was one.
        """
        if self._run is None or self._worker is None:
            return
        worker = self._worker
        self._worker = None
        self._run = None
        atexit.unregister(self._finish_silently)
        # Not by `_put`: a full queue would drop the checkpoint.
        if self._last_checkpoint is not None:
            worker.calls.put(partial(_upload, self, *self._last_checkpoint))
            self._last_checkpoint = None
        worker.calls.put(status)  # the thread ends after it
        worker.join(self.patience)
        worker.is_abandoned = worker.is_alive()
        lost = _num_lost(worker) if worker.is_abandoned else 0
        if self._closes_in_caller and worker.was_opened and not lost:
            self._close(status)
        if lost or self.dropped:
            self.warn_once(
                f"{type(self).__name__}: {lost + self.dropped} calls are lost: the queue was full for {self.dropped}, "
                f"and {lost} were not written within {self.patience:g} s of the end."
            )
        if worker.error is not None:
            raise worker.error

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the run of `state` at the next `start`, unless the logger has the id of another run.

        If the run of `state` is already open, steps that it already has are not written again. If another run is open,
        it continues, with a warning.
        """
        saved_id = state.get("id")
        if saved_id is None or (self._is_id_fixed and saved_id != self._id):
            return
        if self._run is None:
            self._id = saved_id
            self._exists = True
            self._resumes = True
        elif saved_id != self._id:
            self.warn_once(
                f"the checkpoint belongs to the run {saved_id!r} of {type(self).__name__}, but the run {self._id!r} is "
                "already open and continues as a new one."
            )
        else:
            self._put(_Worker.read_last_steps, self._worker)

    def _backend(self) -> Any:
        if self._worker is not None and not self._worker.was_opened:
            self.warn_once(f"{type(self).__name__}: the run is not open yet; `experiment` does nothing.")
            return DummyExperiment()
        return self._experiment

    def _put(self, call: Callable[..., None], *values: object) -> None:
        """Queue a call, or drop it if the queue is full. Raise the backend's error if it has failed."""
        worker = self._worker
        if worker is None:  # not started, or finished
            return
        if worker.error is not None:
            raise worker.error
        if worker.calls.qsize() < self.capacity:
            worker.calls.put(partial(call, *values))
            return
        self.dropped += 1
        self.warn_once(
            f"{type(self).__name__}: {self.capacity} calls wait for the backend, and further ones are dropped. Their "
            "number is reported at the end."
        )

    def _finish_silently(self) -> None:
        """Finish at the program's exit or after an error that an earlier call has raised, so without errors."""
        with contextlib.suppress(Exception):
            self.finish("interrupted")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_worker": None}  # a thread cannot be pickled


def to_image(pixels: Pixels) -> Any:
    """Return pixels as an image of PIL."""
    from PIL import Image  # the packages of trackers need it

    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _upload(logger: QueuedLogger, path: Path, aliases: tuple[str, ...]) -> None:
    """Upload a checkpoint, unless a newer one has replaced it while the call was in the queue or during the upload."""
    try:
        if path.exists():
            logger._write_checkpoint(path, aliases)
    except OSError:
        if path.exists():
            raise


def _num_lost(worker: _Worker) -> int:
    """Return the number of calls that an abandoned worker does not complete.

    Its queue contains the waiting calls and, as the last entry, the status. The running call is not in the queue, and
    is lost, too. Plus the running call and minus the status, the result is the size of the queue. An empty queue means
    that the thread closes the run, which counts as one call.
    """
    return max(worker.calls.qsize(), 1)


class _Worker(threading.Thread):
    """Daemon thread that opens a run, makes queued calls until the first error, and closes the run.

    The constructor starts the thread. The last entry of the queue is the run's status.

    Attributes:
        calls: the queue. The caller's thread puts, this one takes.
        error: the first error of the backend. Later calls are taken from the queue and not made.
        has_answered: set when the run is open, or opening it has failed.
        was_opened: True after the run has been opened without an error, also after it has been closed.
        is_abandoned: set by `finish` after its patience: the thread ends after the call that it makes.
    """

    def __init__(self, logger: QueuedLogger, info: RunInfo) -> None:
        super().__init__(name=type(logger).__name__, daemon=True)
        self.calls: queue.SimpleQueue[Callable[[], None] | Status] = queue.SimpleQueue()
        self.error: Exception | None = None
        self.has_answered = threading.Event()
        self.was_opened = False
        self.is_abandoned = False
        self._logger = logger
        self._info = info
        self._last_steps: Mapping[str, int] = {}  # of each metric, the last step that a resumed run already has
        self.start()

    def run(self) -> None:
        self._call(self._open)
        self.has_answered.set()
        while self.was_opened and not self.is_abandoned:
            call = self.calls.get()
            if isinstance(call, str):  # the run's status
                if not self._logger._closes_in_caller:
                    self._call(partial(self._logger._close, call))
                return
            if self.error is None:
                self._call(call)

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # every error of a backend is raised in the caller
            self.error = self.error or error

    def _open(self) -> None:
        logger = self._logger
        logger._open(self._info)
        if logger._resumes:
            self.read_last_steps()
        logger._exists = True
        logger._resumes = False
        self.was_opened = True

    def read_last_steps(self) -> None:
        self._last_steps = self._logger._last_steps()

    def write_metrics(self, values: dict[str, float], step: int, seconds: float) -> None:
        if self._last_steps:
            values = {name: value for name, value in values.items() if step > self._last_steps.get(name, -1)}
        if values:
            self._logger._write_metrics(values, step, seconds)
