"""Stop when a metric stops improving, reaches a threshold, or diverges."""

from __future__ import annotations

import math
import warnings
from enum import StrEnum
from functools import partial
from typing import Any

from trainwright.callbacks.callback import Callback
from trainwright.callbacks.monitored import (
    check_mode,
    from_json,
    from_main_rank,
    is_better,
    missing_metric,
    to_json,
    worst,
)
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.metric_value import MetricValue
from trainwright.core.run import Run
from trainwright.core.task import TaskModule


class EarlyStoppingReason(StrEnum):
    """Reason for which `EarlyStopping` has requested the end of training."""

    NOT_STOPPED = "not_stopped"
    STOPPING_THRESHOLD = "stopping_threshold"
    DIVERGENCE_THRESHOLD = "divergence_threshold"
    PATIENCE_EXHAUSTED = "patience_exhausted"
    NON_FINITE_METRIC = "non_finite_metric"


class EarlyStopping(Callback):
    """Callback that ends training when a monitored metric stops improving.

    The metric is checked after every validation or, without validation, after every training epoch. The check runs at
    the end of the step, when training and validation metrics are known. Rank 0's value is broadcast, so that all ranks
    stop at the same step. The stop takes effect once min_epochs and min_steps are reached.

    Args:
        monitor: the metric to monitor.
        min_delta: smaller changes of the metric are not an improvement. Default: 0.0.
        patience: stop after this many consecutive checks without improvement. Default: 3.
        verbose: print a message when the metric improves or training ends. Default: False.
        mode: `"min"` if lower values are better, `"max"` if higher values are better. Default: `"min"`.
        strict: raise an error if the metric was not logged. False warns and skips the check. Default: True.
        check_finite: stop when the metric is NaN or infinite. Default: True.
        stopping_threshold: stop as soon as the metric is better than this. None disables it. Default: None.
        divergence_threshold: stop as soon as the metric is worse than this. None disables it. Default: None.
        check_on_train_epoch_end: True checks at the end of the training epoch, False after validations. Default: None,
            which checks after validations, or at the end of the epoch if the fit has none.
        log_rank_zero_only: Accepted without effect: only the main rank prints. Default: False.

    Attributes:
        wait_count: checks since the last improvement.
        stopped_epoch: 0-based epoch in which the callback requested the end; 0 before a request.
        best_score: the best value that counted as an improvement, with the methods of a tensor; ±inf before the first
            one. A check that stops training does not change it.
        stopping_reason, stopping_reason_message: the reason, as a member of `EarlyStoppingReason` and as text. Before a
            request they are `NOT_STOPPED` and None.

    Raises:
        ConfigurationError: the mode is unknown. In a run with `strict`: the metric was not logged.
    """

    reads_only = True

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: str = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        self.mode = check_mode(mode, "EarlyStopping")
        self.monitor = monitor
        self.min_delta = abs(min_delta)
        self.patience = patience
        self.verbose = verbose
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.log_rank_zero_only = log_rank_zero_only
        self.wait_count = 0
        self.stopped_epoch = 0
        self.best_score = MetricValue(worst(self.mode))
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None

    @property
    def state_key(self) -> str:
        return f"EarlyStopping(monitor={self.monitor!r}, mode={self.mode!r})"

    def state_dict(self) -> dict[str, Any]:
        return {
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "best_score": to_json(self.best_score),
            "stopping_reason": str(self.stopping_reason),
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        best = from_json(state_dict["best_score"])
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.best_score = MetricValue(worst(self.mode) if best is None else best)
        # States of Lightning before 2.6 have no reason.
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", EarlyStoppingReason.NOT_STOPPED))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")

    def on_validation_end(self, trainer: Run, task: TaskModule) -> None:
        if trainer.stage != "fit" or trainer.sanity_checking:
            return
        if not self._checks_at_epoch_end(trainer):
            trainer.at_step_end(partial(self._check, trainer, trainer.state.epoch))

    def on_train_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        if self._checks_at_epoch_end(trainer):
            trainer.at_step_end(partial(self._check, trainer, trainer.state.epoch))

    def _checks_at_epoch_end(self, trainer: Run) -> bool:
        if self.check_on_train_epoch_end is not None:
            return self.check_on_train_epoch_end
        return not trainer.has_validation

    def _check(self, trainer: Run, epoch: int) -> None:
        """Check the metric and request the end if needed. Collective with several processes."""
        if trainer.fast_dev_run:
            return
        value = from_main_rank(trainer, trainer.callback_metrics.get(self.monitor))
        if value is None:
            self._report_missing_metric(trainer)
            return
        reason, message = self.judge(float(value))
        if message is not None and self.verbose:
            trainer.print(message)
        if reason is not EarlyStoppingReason.NOT_STOPPED:
            self.stopped_epoch = epoch
            self.stopping_reason = reason
            self.stopping_reason_message = message
            trainer.request_stop(f"EarlyStopping: {message}")

    def judge(self, value: float) -> tuple[EarlyStoppingReason, str | None]:
        """Check a new value. Update `best_score` and `wait_count`, unless the value stops training at once.

        Returns:
            The reason to stop, or `NOT_STOPPED`, and a message about it, or None if there is nothing to report.
        """
        name = self.monitor
        best = self.best_score
        if self.check_finite and not math.isfinite(value):
            return (
                EarlyStoppingReason.NON_FINITE_METRIC,
                f"{name}={value} is not finite; the best before was {best:.5g}.",
            )
        if self.stopping_threshold is not None and is_better(value, self.stopping_threshold, self.mode):
            comparison = "<" if self.mode == "min" else ">"
            return (
                EarlyStoppingReason.STOPPING_THRESHOLD,
                f"{name}={value:.5g} {comparison} stopping_threshold={self.stopping_threshold}.",
            )
        if self.divergence_threshold is not None and is_better(self.divergence_threshold, value, self.mode):
            return (
                EarlyStoppingReason.DIVERGENCE_THRESHOLD,
                f"{name}={value:.5g} is worse than divergence_threshold={self.divergence_threshold}.",
            )
        # The value must be better than the best one by more than `min_delta`.
        margin = self.min_delta if self.mode == "min" else -self.min_delta
        if is_better(value + margin, best, self.mode):
            self.best_score = MetricValue(value)
            self.wait_count = 0
            since = f" from {best:.5g}" if math.isfinite(best) else ""
            return EarlyStoppingReason.NOT_STOPPED, f"{name} improved{since} to {value:.5g}."
        self.wait_count += 1
        if self.wait_count >= self.patience:
            return (
                EarlyStoppingReason.PATIENCE_EXHAUSTED,
                f"{name} did not improve in the last {self.wait_count} checks; the best was {best:.5g}.",
            )
        return EarlyStoppingReason.NOT_STOPPED, None

    def _report_missing_metric(self, trainer: Run) -> None:
        message = missing_metric(
            f"EarlyStopping(monitor={self.monitor!r})", self.monitor, trainer.callback_metrics, trainer
        )
        if self.strict:
            raise ConfigurationError(
                f"{message} Log it with self.log({self.monitor!r}, ...), choose when to check with "
                "check_on_train_epoch_end, or pass strict=False to continue without it."
            )
        if trainer.is_global_zero:
            warnings.warn(message, TrainwrightWarning, stacklevel=2)
