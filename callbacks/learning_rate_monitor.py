"""Log learning rates, and optionally momentum and weight decay."""

from __future__ import annotations

import warnings
from collections import Counter
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
    several parameter groups `/pg1`, `/pg2`, … or the groups' own names are appended. Rates are read on the host, at log
    steps only.

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
        self._pending: dict[str, float] = {}
        self._read_at = 0

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
        for _, names, _ in _named_optimizers(trainer):
            for name in names:
                self.lrs[name] = []

    def on_train_epoch_start(self, trainer: Run, task: TaskModule) -> None:
        if self.logging_interval != "step":
            self._pending.update(self._read(trainer, "epoch"))

    def on_train_step_start(self, trainer: Run, task: TaskModule, group: Group) -> None:
        # Read before the step: after it a scheduler has set the next step's rate.
        if (trainer.state.step + 1) % trainer.log_every_n_steps == 0 and self.logging_interval != "epoch":
            self._pending.update(self._read(trainer, "step"))
        self._read_at = trainer.state.step

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        if self._pending and trainer.state.step > self._read_at:  # a group whose loss was None does not count as a step
            trainer.log_now(self._pending)
            self._pending = {}

    def _read(self, trainer: Run, interval: str) -> dict[str, float]:
        values: dict[str, float] = {}
        for optimizer, names, stepped in _named_optimizers(trainer):
            if self.logging_interval is None and stepped not in (None, interval):
                continue
            for name, group in zip(names, optimizer.param_groups, strict=True):
                values[name] = float(group["lr"])
                self.lrs.setdefault(name, []).append(values[name])  # groups may be added in training
                if self.log_momentum:
                    values[f"{name}-momentum"] = self.last_momentum_values[f"{name}-momentum"] = _momentum(group)
                if self.log_weight_decay:
                    decay = float(group.get("weight_decay", 0.0))
                    values[f"{name}-weight_decay"] = self.last_weight_decay_values[f"{name}-weight_decay"] = decay
        trainer.show_now(values)
        return values


def _named_optimizers(trainer: Run) -> list[tuple[Optimizer, list[str], str | None]]:
    """Return every optimizer with the names of its groups and the interval of its first scheduler, if it has one."""
    found: list[tuple[Optimizer, list[str], str | None]] = []
    seen: Counter[str] = Counter()
    for optimizer in trainer.optimizers:
        mine = [c for c in trainer.lr_scheduler_configs if getattr(c.scheduler, "optimizer", None) is optimizer]
        name = next((config.name for config in mine if config.name is not None), None)
        if name is None:
            kind = f"lr-{type(optimizer).__name__}"
            name = f"{kind}-{seen[kind]}" if seen[kind] else kind
            seen[kind] += 1
        found.append((optimizer, _group_names(name, optimizer), mine[0].interval if mine else None))
    return found


def _group_names(name: str, optimizer: Optimizer) -> list[str]:
    groups = optimizer.param_groups
    if len(groups) == 1:
        own = groups[0].get("name")
        return [f"{name}/{own}" if own else name]
    names = [f"{name}/{group.get('name') or f'pg{index}'}" for index, group in enumerate(groups, start=1)]
    twice = [one for one, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigurationError(
            f"LearningRateMonitor: several parameter groups of one {type(optimizer).__name__} are called {twice[0]!r}. "
            "Give each group its own 'name'."
        )
    return names


def _has_momentum(optimizer: Optimizer) -> bool:
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


def _momentum(group: dict[str, Any]) -> float:
    if "betas" in group:
        return float(group["betas"][0])
    return float(group.get("momentum", 0.0))
