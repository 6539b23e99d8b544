"""Log learning rates, and optionally momentum and weight decay."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer

from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.run import Run
from trainwright.core.state import Group, StepResult
from trainwright.core.task import TaskModule


class LearningRateMonitor(Callback):
    """Callback that logs the learning rates of each optimizer.

    The name is `lr-AdamW`, or `lr-AdamW-1` for a second AdamW, or the `name` in the scheduler's configuration. With
    several parameter groups `/pg1`, `/pg2`, … or the groups' own names are appended. Rates are read at log steps and,
    for the interval `"epoch"`, at the start of epochs.

    Args:
        logging_interval: `"step"` logs at every log step, `"epoch"` at the first step of every epoch. Default: None,
            which uses the interval of the optimizer's scheduler, and both intervals for an optimizer without a
            scheduler.
        log_momentum: also log `…-momentum` (the first beta of an Adam; 0 for an optimizer without momentum).
            Default: False.
        log_weight_decay: also log `…-weight_decay`. Default: False.

    Attributes:
        lrs: the rates of the latest fit by name, in the order in which they were read.
        last_momentum_values, last_weight_decay_values: the latest values by name, if they are logged.

    Raises:
        ConfigurationError: the interval is unknown. In a run: the Trainer has no logger, or several groups of one
            optimizer have the same name.
    """

    reads_only = True

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ConfigurationError(
                f"LearningRateMonitor(logging_interval={logging_interval!r}): write 'step', 'epoch' or None."
            )
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float] = {}
        self.last_weight_decay_values: dict[str, float] = {}
        self._pending: dict[str, float] = {}  # values that were read and are logged at the end of the step
        self._step_at_start = 0  # completed steps when the current group began

    def on_train_start(self, trainer: Run, task: TaskModule) -> None:
        if not trainer.loggers and not trainer.fast_dev_run:
            raise ConfigurationError(
                "LearningRateMonitor has nothing to log to: the Trainer has no logger. Pass Trainer(logger=...) or "
                "remove the callback."
            )
        if self.log_momentum and not any(_has_momentum(optimizer) for optimizer in trainer.optimizers):
            warnings.warn(
                "LearningRateMonitor(log_momentum=True): the optimizers do not have momentum, so 0 is logged.",
                TrainwrightWarning,
                stacklevel=2,
            )
        self._pending = {}
        self.lrs = {}
        # Detects groups of equal names before the first step.
        for named in _named_optimizers(trainer):
            for name in named.group_names:
                self.lrs[name] = []

    def on_train_epoch_start(self, trainer: Run, task: TaskModule) -> None:
        if self.logging_interval != "step":
            self._pending.update(self._read(trainer, "epoch"))

    def on_train_step_start(self, trainer: Run, task: TaskModule, group: Group) -> None:
        # Read before the step: after it a scheduler has set the next step's rate.
        is_log_step = (trainer.state.step + 1) % trainer.log_every_n_steps == 0
        if is_log_step and self.logging_interval != "epoch":
            self._pending.update(self._read(trainer, "step"))
        self._step_at_start = trainer.state.step

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        # A group whose loss was None does not count as a step.
        if self._pending and trainer.state.step > self._step_at_start:
            trainer.log_now(self._pending)
            self._pending = {}

    def _read(self, trainer: Run, interval: str) -> dict[str, float]:
        values: dict[str, float] = {}
        for named in _named_optimizers(trainer):
            if self.logging_interval is None and named.interval not in (None, interval):
                continue
            for name, group in zip(named.group_names, named.optimizer.param_groups, strict=True):
                values[name] = float(group["lr"])
                self.lrs.setdefault(name, []).append(values[name])  # groups may be added in training
                if self.log_momentum:
                    momentum = _momentum(group)
                    values[f"{name}-momentum"] = momentum
                    self.last_momentum_values[f"{name}-momentum"] = momentum
                if self.log_weight_decay:
                    decay = float(group.get("weight_decay", 0.0))
                    values[f"{name}-weight_decay"] = decay
                    self.last_weight_decay_values[f"{name}-weight_decay"] = decay
        trainer.show_now(values)
        return values


@dataclass(frozen=True, slots=True)
class _NamedOptimizer:
    optimizer: Optimizer
    group_names: list[str]
    interval: str | None  # of its first scheduler; None without a scheduler


def _named_optimizers(trainer: Run) -> list[_NamedOptimizer]:
    named: list[_NamedOptimizer] = []
    num_of_class: Counter[str] = Counter()  # optimizers without a name from a scheduler
    for optimizer in trainer.optimizers:
        name: str | None = None
        interval: str | None = None
        for config in trainer.lr_scheduler_configs:
            if getattr(config.scheduler, "optimizer", None) is not optimizer:
                continue
            if interval is None:
                interval = config.interval
            if name is None:
                name = config.name
        if name is None:
            name = f"lr-{type(optimizer).__name__}"
            number = num_of_class[name]
            num_of_class[name] += 1
            if number > 0:
                name = f"{name}-{number}"
        named.append(_NamedOptimizer(optimizer, _group_names(name, optimizer), interval))
    return named


def _group_names(name: str, optimizer: Optimizer) -> list[str]:
    groups = optimizer.param_groups
    if len(groups) == 1:
        group_name = groups[0].get("name")
        return [f"{name}/{group_name}" if group_name else name]
    names: list[str] = []
    for number, group in enumerate(groups, start=1):
        group_name = group.get("name") or f"pg{number}"
        full_name = f"{name}/{group_name}"
        if full_name in names:
            raise ConfigurationError(
                f"LearningRateMonitor: several parameter groups of one {type(optimizer).__name__} are called "
                f"{full_name!r}. Give each group its own 'name'."
            )
        names.append(full_name)
    return names


def _has_momentum(optimizer: Optimizer) -> bool:
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


def _momentum(group: dict[str, Any]) -> float:
    if "betas" in group:
        return float(group["betas"][0])
    return float(group.get("momentum", 0.0))
