"""Prepared learning-rate schedules, which advance with their optimizers."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.accelerator.accumulation import Accumulation
from trainwright.accelerator.prepared.accelerated_optimizer import AcceleratedOptimizer
from trainwright.core.state import scheduler_state


class AcceleratedScheduler:
    """A learning-rate schedule that advances with optimizer steps, whatever the accumulation.

    Args:
        scheduler: the user's.
        optimizers: prepared; a step that any of them skipped is not counted.
        accumulation: knows when a step is due.
        steps_with_optimizer: False: every call counts, as in a schedule by epochs.
        per_step: number of advances per optimizer step, not beyond the schedule's end (`total_steps`). Default: 1.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: list[AcceleratedOptimizer],
        accumulation: Accumulation,
        *,
        steps_with_optimizer: bool = True,
        per_step: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self._optimizers = optimizers
        self._accumulation = accumulation
        self._steps_with_optimizer = steps_with_optimizer
        self._further = per_step - 1 if steps_with_optimizer else 0

    def step(self, *args: object, **kwargs: object) -> None:
        """Advance the schedule, if an optimizer step is due at this micro-batch and was not skipped."""
        if self._steps_with_optimizer:
            due = self._accumulation.sync_gradients
            if not due or any(optimizer.step_was_skipped for optimizer in self._optimizers):
                return
        self.scheduler.step(*args, **kwargs)
        for _ in range(self._further):
            if self.scheduler.last_epoch < getattr(self.scheduler, "total_steps", math.inf) - 1:
                self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state."""
        return scheduler_state(self.scheduler)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.scheduler.load_state_dict(state_dict)

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        found: list[float] = self.scheduler.get_last_lr()
        return found

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's scheduler."""
        if name.startswith("__") or "scheduler" not in vars(self):
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def holds_optimizer(scheduler: object, optimizer: AcceleratedOptimizer) -> bool:
    """Return whether a scheduler was made for an optimizer, prepared or not."""
    return getattr(scheduler, "optimizer", None) in (optimizer, optimizer.optimizer)


def is_scheduler(value: object) -> bool:
    """Return whether `value` is a learning-rate schedule of torch, or has the methods of one."""
    if isinstance(value, LRScheduler):
        return True
    has = ("step", "state_dict", "load_state_dict", "optimizer")
    return not isinstance(value, (Optimizer, nn.Module)) and all(hasattr(value, name) for name in has)


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A schedule that DeepSpeed advances and saves. There is none: `prepare` returns an `AcceleratedScheduler`."""
