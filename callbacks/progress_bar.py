"""The base class of progress bars, which writes plain lines."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, Literal

from trainwright.callbacks.callback import Callback, Order
from trainwright.core.errors import ConfigurationError, visible
from trainwright.core.hooks import StepOutput
from trainwright.core.process import try_output
from trainwright.core.run import Run, Stage
from trainwright.core.state import StepResult
from trainwright.core.task import TaskModule
from trainwright.core.tree import Batch

Kind = Literal["train", "eval"]
REDRAW_S = 0.1
LINE_S = 30.0

# Methods that sub-classes of Lightning's bars override.
_LIGHTNING_METHODS = (
    "init_sanity_tqdm",
    "init_train_tqdm",
    "init_validation_tqdm",
    "init_test_tqdm",
    "init_predict_tqdm",
    "sanity_check_description",
    "train_description",
    "validation_description",
    "test_description",
    "predict_description",
    "configure_columns",
)


class ProgressBar(Callback):
    """Callback that shows the progress of a run on the main process.

    This class writes lines, for files and logs: one at every epoch's end, and one every 30 s in a long epoch. A
    sub-class that draws bars overrides `can_draw`, `open`, `draw`, `close` and `write`. If `can_draw` returns False,
    for example because the output is not a terminal, lines are written. Progress is counted in micro-batches of one
    rank.

    Each step reads the clock once. A bar is drawn at most ten times per second. It shows the metrics logged with
    `prog_bar=True`, as of the last flush, and never waits for the device.

    Args:
        refresh_rate: minimum number of batches between two updates. 0 disables the display. Default: 1.
        leave: keep every epoch's bar on the screen. Default: False.

    Raises:
        ConfigurationError: the refresh rate is negative, or a sub-class overrides a method of Lightning's bars.
    """

    reads_only = True
    order = Order.LAST
    is_progress_bar = True  # marks the callback whose output `print` must not break

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        if refresh_rate < 0:
            raise ConfigurationError(f"{type(self).__name__}(refresh_rate={refresh_rate}): write 0 (off) or more.")
        self._refuse_lightning_methods()
        self.refresh_rate = refresh_rate
        self.leave = leave
        self._enabled = True  # set by `enable` and `disable`
        self._active = False  # this process shows the progress of the current stage
        self._draws = False  # `_active`, and bars are drawn instead of lines
        self._output_failed = False  # standard output is closed: nothing more is written
        # By the monotonic clock. Steps before this time only read the clock.
        self._next_update_s = 0.0
        self._training: _Progress | None = None  # the current epoch, also during its validation
        self._evaluating: _Progress | None = None

    def _refuse_lightning_methods(self) -> None:
        """Check that sub-classes do not override methods of Lightning's progress bars, which are never called."""
        for name in _LIGHTNING_METHODS:
            if hasattr(type(self), name):
                raise ConfigurationError(
                    f"{type(self).__name__}.{name} is never called: here a bar is created by open(kind, description, "
                    "total, done), with kind 'train' or 'eval', updated by draw and ended by close. Override these."
                )

    # For sub-classes

    def can_draw(self) -> bool:
        """Return whether the output supports drawing. Otherwise lines are written."""
        return False

    def open(self, kind: Kind, description: str, total: int | None, done: int) -> None:
        """Start a bar at `done` of `total` batches; None for an unknown total.

        An evaluation bar is below the training bar.
        """

    def draw(self, kind: Kind, done: int, metrics: Mapping[str, str]) -> None:
        """Update a bar to `done` batches and show `metrics`."""

    def close(self, kind: Kind, *, leave: bool, paused_s: float = 0.0) -> None:
        """End a bar. `leave` keeps it on the screen.

        `paused_s` is the number of seconds for which the other bar, if any, was paused. 0 for a training bar.
        """

    def write(self, text: str) -> None:
        """Write a line without breaking a bar."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def get_metrics(self, trainer: Run, task: TaskModule) -> dict[str, Any]:
        """Return the metrics next to the bar, by name. Override it to add or remove metrics."""
        return dict(trainer.progress_bar_metrics)

    # Public

    @property
    def is_enabled(self) -> bool:
        """True if progress is shown."""
        return self._enabled and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """True if no progress is shown."""
        return not self.is_enabled

    def enable(self) -> None:
        """Show progress from the next stage on."""
        self._enabled = True

    def disable(self) -> None:
        """Show no progress from now on."""
        self._enabled = False
        self._active = False

    def print(
        self,
        *values: object,
        sep: str | None = None,
        end: str | None = None,
        file: IO[str] | None = None,
        flush: bool = False,
    ) -> None:
        """Print without breaking the bar, with the arguments of Python's print.

        A line end is always added, because a bar follows. Output to another file is not changed.
        """
        if file is not None:
            print(*values, sep=sep, end=end, file=file, flush=flush)
            return
        separator = " " if sep is None else sep
        text = separator.join(map(str, values))
        if end is not None:
            text += end.removesuffix("\n")  # `write` adds it
        self._output(self.write, text)

    # The run

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        self._active = self.is_enabled and trainer.is_global_zero and not trainer.barebones
        self._draws = self._active and self.can_draw()

    def on_train_start(self, trainer: Run, task: TaskModule) -> None:
        if trainer.state.batch_in_epoch:  # resumed in the middle of an epoch, which does not begin again
            self.on_train_epoch_start(trainer, task)

    def on_train_epoch_start(self, trainer: Run, task: TaskModule) -> None:
        if not self._active:
            return
        self._finish_training(trainer, task, leave=self.leave)
        state = trainer.state
        description = f"Epoch {state.epoch}"
        if trainer.max_epochs > 0:
            description += f"/{trainer.max_epochs - 1}"
        total = _total([trainer.num_training_batches])
        self._training = self._begin("train", description, total, state.batch_in_epoch)

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        if self._active and time.monotonic() >= self._next_update_s:
            self._advance(self._training, trainer.state.batch_in_epoch, trainer, task)

    def on_train_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        # The epoch's own metrics are flushed after this event: its bar is finished when the next epoch or the end of
        # training begins, and then shows them.
        if self._training is not None:
            self._training.end(trainer.state.batch_in_epoch)

    def on_train_end(self, trainer: Run, task: TaskModule) -> None:
        self._finish_training(trainer, task, leave=True)

    def on_sanity_check_start(self, trainer: Run, task: TaskModule) -> None:
        self._begin_evaluation("Sanity check", trainer)

    def on_validation_start(self, trainer: Run, task: TaskModule) -> None:
        if not trainer.sanity_checking:
            self._begin_evaluation("Validation", trainer)

    def on_validation_batch_end(
        self, trainer: Run, task: TaskModule, outputs: StepOutput, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count(trainer, task)

    def on_validation_end(self, trainer: Run, task: TaskModule) -> None:
        if not trainer.sanity_checking:
            self._finish_evaluation(trainer, task)

    def on_test_start(self, trainer: Run, task: TaskModule) -> None:
        self._begin_evaluation("Test", trainer)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_test_end(self, trainer: Run, task: TaskModule) -> None:
        self._finish_evaluation(trainer, task)

    on_sanity_check_end = on_predict_end = on_test_end

    def on_predict_start(self, trainer: Run, task: TaskModule) -> None:
        self._begin_evaluation("Predict", trainer)

    def on_exception(self, trainer: Run, task: TaskModule, exception: BaseException) -> None:
        self._close_all()

    def teardown(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        self._close_all()
        self._active = False
        self._draws = False

    # Implementation

    def _output(self, output: Callable[..., None], *args: object, **options: object) -> None:
        """Call a function that writes, unless an earlier write to standard output has failed."""
        if not self._output_failed:
            self._output_failed = not try_output(output, *args, **options)

    def _begin(self, kind: Kind, description: str, total: int | None, done: int) -> _Progress:
        progress = _Progress(kind, description, total, done)
        if self._draws:
            self._output(self.open, kind, description, total, done)
        self._next_update_s = progress.started_s + self._update_interval_s
        return progress

    @property
    def _update_interval_s(self) -> float:
        return REDRAW_S if self._draws else LINE_S

    def _begin_evaluation(self, description: str, trainer: Run) -> None:
        if self._active:
            self._evaluating = self._begin("eval", description, _total(trainer.num_eval_batches), 0)

    def _count(self, trainer: Run, task: TaskModule) -> None:
        progress = self._evaluating
        if progress is None:
            return
        progress.done += 1
        if time.monotonic() >= self._next_update_s:
            self._advance(progress, progress.done, trainer, task)

    def _advance(self, progress: _Progress | None, done: int, trainer: Run, task: TaskModule) -> None:
        if progress is None or done - progress.shown < self.refresh_rate:
            return
        progress.done = done
        progress.shown = done
        metrics = _as_text(self.get_metrics(trainer, task))
        if self._draws:
            self._output(self.draw, progress.kind, done, metrics)
        else:
            self._output(self.write, progress.line(metrics))
        self._next_update_s = time.monotonic() + self._update_interval_s

    def _finish_training(self, trainer: Run, task: TaskModule, *, leave: bool) -> None:
        progress = self._training
        self._training = None
        if progress is None:
            return
        if progress.ended_s is None:  # the epoch was not completed, for example because a step limit was reached
            progress.end(trainer.state.batch_in_epoch)
        metrics = _as_text(self.get_metrics(trainer, task))
        if self._draws:
            self._output(self.draw, "train", progress.done, metrics)
            self._output(self.close, "train", leave=leave)
        else:
            self._output(self.write, progress.line(metrics))

    def _finish_evaluation(self, trainer: Run, task: TaskModule) -> None:
        progress = self._evaluating
        self._evaluating = None
        if progress is None:
            return
        progress.end(progress.done)
        is_in_fit = self._training is not None or trainer.sanity_checking or trainer.stage == "fit"
        paused_s = time.monotonic() - progress.started_s
        if self._training is not None:
            # The rate of training does not include the time of validation.
            self._training.started_s += paused_s
        if self._draws:
            self._output(self.draw, "eval", progress.done, {})
            self._output(self.close, "eval", leave=not is_in_fit, paused_s=paused_s)
            if self._training is not None:
                metrics = _as_text(self.get_metrics(trainer, task))
                self._output(self.draw, "train", trainer.state.batch_in_epoch, metrics)
        elif not is_in_fit:
            metrics = _as_text(self.get_metrics(trainer, task))
            self._output(self.write, progress.line(metrics))

    def _close_all(self) -> None:
        if self._draws:
            for progress in (self._evaluating, self._training):
                if progress is not None:
                    self._output(self.close, progress.kind, leave=True)
        self._training = None
        self._evaluating = None


class _Progress:
    """Progress of one epoch or evaluation, with its start time.

    Attributes:
        done: completed batches, as of the last update.
        done_at_start: completed batches at the start, in an epoch that is resumed in its middle.
        shown: `done` when it was last displayed.
        started_s: start by the monotonic clock. For training, validations move it forward by their duration.
        ended_s: end by the monotonic clock; None before it.
    """

    def __init__(self, kind: Kind, description: str, total: int | None, done: int) -> None:
        self.kind = kind
        self.description = description
        self.total = total
        self.done_at_start = done
        self.done = done
        self.shown = done
        self.started_s = time.monotonic()
        self.ended_s: float | None = None

    def end(self, done: int) -> None:
        self.done = done
        if self.ended_s is None:
            self.ended_s = time.monotonic()

    def line(self, metrics: Mapping[str, str]) -> str:
        """Return, for example, `Epoch 0/9: 50/100 (50%) [00:10<00:10, 5.0 batch/s] loss=0.5`."""
        now_s = time.monotonic() if self.ended_s is None else self.ended_s
        elapsed_s = now_s - self.started_s
        num_batches = self.done - self.done_at_start
        rate = num_batches / elapsed_s if elapsed_s > 0 else 0.0
        position = f"{self.done}"
        clock = _clock(elapsed_s)
        if self.total:
            position = f"{self.done}/{self.total} ({100 * self.done // self.total}%)"
            if rate > 0 and self.ended_s is None:
                remaining_s = (self.total - self.done) / rate
                clock += f"<{_clock(remaining_s)}"
        if num_batches:  # a resumed epoch may have no batch left
            speed = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
            clock += f", {speed} batch/s"
        metrics_text = "".join(f" {name}={value}" for name, value in metrics.items())
        return f"{self.description}: {position} [{clock}]{metrics_text}"


def _total(counts: Iterable[int | float]) -> int | None:
    total = sum(counts)
    return int(total) if math.isfinite(total) else None


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes:02}:{seconds:02}"


def _as_text(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Format names and values, and escape control characters, which could change the terminal."""
    texts = {}
    for name, value in metrics.items():
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        texts[visible(name)] = visible(text)
    return texts
