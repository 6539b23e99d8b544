"""Measure the duration of a run, and end it when its time is up."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from typing import Any, Literal

from trainwright.callbacks.agreed_clock import AgreedClock
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.monitored import from_main_rank
from trainwright.core.duration import Duration, parse_time
from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.run import Run
from trainwright.core.state import StepResult
from trainwright.core.task import TaskModule

_STAGES = ("train", "validate", "test", "predict", "sanity_check")


class Timer(Callback):
    """Callback that measures the time of each stage and stops training after `duration`.

    Training time is added up across resumes, without the time between sessions. Steps that a rollback discards count.
    Rank 0's clock is used. With `interval="epoch"` it is broadcast at every epoch's end. With `"step"` it is broadcast
    at few steps (see `AgreedClock`), and the other steps cost one comparison.

    Args:
        duration: `"00:12:00:00"` (days:hours:minutes:seconds), `"12 h"`, a timedelta, or its arguments as a dict
            (`{"hours": 12}`). None only measures. Default: None.
        interval: when to check: `"step"` or `"epoch"`. Default: `"step"`.
        verbose: print a message when time is up. Default: True.

    Raises:
        ConfigurationError: the duration is not a time, or the interval or stage is unknown.
    """

    reads_only = True

    def __init__(
        self,
        duration: str | datetime.timedelta | Mapping[str, float] | Duration | None = None,
        interval: Literal["step", "epoch"] = "step",
        verbose: bool = True,
    ) -> None:
        if interval not in ("step", "epoch"):
            raise ConfigurationError(f"Timer(interval={interval!r}): write 'step' or 'epoch'.")
        self.interval = interval
        self.verbose = verbose
        self.duration_s = None if duration is None else parse_time(duration, "duration").value
        # Stage → its last start and end by `time.monotonic`. A running stage has no end.
        self._started_s: dict[str, float] = {}
        self._ended_s: dict[str, float] = {}
        self._offset_s = 0.0  # training time of earlier fits and of the run that is resumed
        self._clock = AgreedClock(self._remaining_or_forever)
        self._is_over = False  # this fit has requested its end

    def start_time(self, stage: str = "train") -> float | None:
        """Return the last start of `stage`, in seconds of `time.monotonic`; None before it."""
        return self._started_s.get(_known(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return the last end of `stage`, in seconds of `time.monotonic`; None before it and while the stage runs."""
        return self._ended_s.get(_known(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds spent in `stage`: for training in total, for an evaluation in its latest run."""
        start = self.start_time(stage)
        offset = self._offset_s if stage == "train" else 0.0
        if start is None:
            return offset
        end = self.end_time(stage)
        if end is None:  # the stage is running
            end = time.monotonic()
        return offset + end - start

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds of the duration that `stage` has not used (negative once it is over).

        None without a duration.
        """
        return None if self.duration_s is None else self.duration_s - self.time_elapsed(stage)

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {"train": self.time_elapsed()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        is_training = "train" in self._started_s and "train" not in self._ended_s
        if is_training:  # the run rolls back: the time of the steps that it discards counts, too
            return
        self._offset_s = float(state_dict["time_elapsed"]["train"])
        self._started_s.pop("train", None)
        self._ended_s.pop("train", None)

    def on_fit_start(self, trainer: Run, task: TaskModule) -> None:
        self._is_over = False
        if self.duration_s is not None:
            self._check_time(trainer)  # a resumed run may have used up its time already

    def on_train_start(self, trainer: Run, task: TaskModule) -> None:
        self._start("train")
        self._clock.start(trainer)

    def on_train_end(self, trainer: Run, task: TaskModule) -> None:
        self._end("train")

    def on_exception(self, trainer: Run, task: TaskModule, exception: BaseException) -> None:
        if "train" in self._started_s and "train" not in self._ended_s:
            self._end("train")  # so that a later fit does not count the time between

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        if self.duration_s is not None and self.interval == "step" and self._clock.is_up(trainer):
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        if self.duration_s is not None and self.interval == "epoch":
            self._check_time(trainer)

    def on_sanity_check_start(self, trainer: Run, task: TaskModule) -> None:
        self._start("sanity_check")

    def on_sanity_check_end(self, trainer: Run, task: TaskModule) -> None:
        self._end("sanity_check")

    def on_validation_start(self, trainer: Run, task: TaskModule) -> None:
        if not trainer.sanity_checking:
            self._start("validate")

    def on_validation_end(self, trainer: Run, task: TaskModule) -> None:
        if not trainer.sanity_checking:
            self._end("validate")

    def on_test_start(self, trainer: Run, task: TaskModule) -> None:
        self._start("test")

    def on_test_end(self, trainer: Run, task: TaskModule) -> None:
        self._end("test")

    def on_predict_start(self, trainer: Run, task: TaskModule) -> None:
        self._start("predict")

    def on_predict_end(self, trainer: Run, task: TaskModule) -> None:
        self._end("predict")

    def _start(self, stage: str) -> None:
        if stage == "train":
            self._offset_s = self.time_elapsed()  # a second fit continues the time of the first
        self._started_s[stage] = time.monotonic()
        self._ended_s.pop(stage, None)

    def _end(self, stage: str) -> None:
        self._ended_s[stage] = time.monotonic()

    def _check_time(self, trainer: Run) -> None:
        """Stop if time is up by rank 0's clock. Collective with several processes."""
        if from_main_rank(trainer, self._remaining_or_forever() <= 0):
            self._stop(trainer)

    def _stop(self, trainer: Run) -> None:
        if self._is_over:
            return
        self._is_over = True
        message = f"Timer: the {self.duration_s:g} s of training are over."
        trainer.request_stop(message, closes_epoch=False)
        if self.verbose:
            trainer.print(message)

    def _remaining_or_forever(self) -> float:
        remaining_s = self.time_remaining()
        return float("inf") if remaining_s is None else remaining_s


def _known(stage: str) -> str:
    if stage not in _STAGES:
        raise ConfigurationError(f"there is no stage {stage!r}.{nearest(stage, _STAGES)} Stages: {', '.join(_STAGES)}.")
    return stage
