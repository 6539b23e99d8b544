"""Prepared optimizers and schedules, which step in the last micro-batch of `gradient_accumulation_steps`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.accelerator.gradient_state import GradientState, LoopGroups
from trainwright.core.errors import TrainwrightWarning
from trainwright.core.state import scheduler_state
from trainwright.processes.partial_state import PartialState
from trainwright.strategies.steps.gradients import parameters_of
from trainwright.strategies.steps.loss_scale import LossScale


class AcceleratedOptimizer(Optimizer):
    """An optimizer that steps only in the last micro-batch of each group, and skips steps if fp16 gradients overflow.

    A group is the micro-batches of one optimizer step.

    Args:
        optimizer: The user's optimizer.
        device_placement: Accepted without effect: an optimizer's state is where its parameters are. Default: True.
        scaler: Loss scaler. A `GradScaler` is updated after each step. Default: None: the loss is not scaled.
        groups: The loop's groups. Default: None, which are those of the newest Accelerator.

    Attributes:
        given: The user's optimizer.
        optimizer: The optimizer that `step` calls: `given`, or the strategy's replacement of it, which `prepare` sets.
        scaler: The loss scale. None: the loss is not scaled.
        num_steps: Number of completed steps, without skipped ones. `load_state` restores it.
        step_was_skipped: The last due step was skipped because of non-finite fp16 gradients.
    """

    _is_accelerate_prepared = True  # Accelerate's mark, which programs read

    step_was_skipped: bool = False

    # Without `Optimizer.__init__`: state and parameter groups are those of `optimizer`, through the properties below.
    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        scaler: LossScale | torch.amp.GradScaler | None = None,
        *,
        groups: LoopGroups | None = None,
    ) -> None:
        self.given = optimizer
        self.optimizer = optimizer
        self.device_placement = device_placement
        # False for the scale of an Accelerator, which all of its optimizers share.
        self._owns_scale = isinstance(scaler, torch.amp.GradScaler)
        self.scaler = LossScale(scaler) if isinstance(scaler, torch.amp.GradScaler) else scaler
        self._groups = groups or LoopGroups.newest()
        self.num_steps = 0

    @property
    def gradient_state(self) -> GradientState:
        """The state of gradient accumulation that determines when the optimizer steps."""
        return GradientState(groups=self._groups)

    @property
    def state(self) -> Any:  # type: ignore[override]  # the inner one holds it
        """The optimizer's state, by parameter."""
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]  # the inner one holds it
        """The optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]  # the inner one holds it
        """The optimizer's default options."""
        return self.optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step if the current micro-batch is the last of its group.

        Returns:
            The result of the optimizer's `step`. None with a loss scaler, or if no step was due.

        Raises:
            TaskError: The group has not run its last backward, so that its gradients are not complete.
        """
        if not self._groups.sync_gradients:
            return None
        self._groups.refuse_unfinished(self.optimizer)
        if self.scaler is None:
            self.num_steps += 1
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self.step_was_skipped = not self.scaler.try_step(self.optimizer, closure)
        if self._owns_scale:  # the scale of an Accelerator is updated by the first backward of the next group
            self.scaler.update()
        if not self.step_was_skipped:
            self.num_steps += 1
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients if the current micro-batch is the last of its group. Otherwise, do nothing.

        `set_to_none=False` sets them to zero instead.
        """
        if self._groups.sync_gradients:
            self.optimizer.zero_grad(set_to_none)
            self._groups.discard_open(lambda: parameters_of([self.optimizer]))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state dict."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch an optimizer with two sets of weights (a schedule-free one) to its training weights."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Switch an optimizer with two sets of weights (a schedule-free one) to its evaluation weights."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "optimizer" not in vars(self):
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class AcceleratedScheduler:
    """A learning-rate schedule that advances with optimizer steps, not with micro-batches.

    Args:
        scheduler: The user's schedule.
        optimizers: One or several optimizers. If any of these optimizers skipped its last step, `step` has no effect.
            An optimizer that is not prepared skips no step.
        step_with_optimizer: False: each `step` call advances the schedule. Default: True.
        split_batches: The batch size is the total over all processes. Default: False, with which each optimizer step
            advances the schedule by the number of processes, as in Accelerate.
        groups: The loop's groups. Default: None, which are those of the newest Accelerator.
        further: Number of additional advances at each step, until the schedule's end (`total_steps`). Default: None,
            which follows from `step_with_optimizer` and `split_batches`.
    """

    _is_accelerate_prepared = True  # Accelerate's mark, which programs read

    def __init__(
        self,
        scheduler: Any,
        optimizers: Optimizer | Sequence[Optimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        groups: LoopGroups | None = None,
        further: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        # Not a copy: the list of `prepare` grows with optimizers that are prepared later.
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self._groups = groups or LoopGroups.newest()
        if further is None:
            advances_per_process = step_with_optimizer and not split_batches
            further = PartialState().num_processes - 1 if advances_per_process else 0
        self._further = further
        self._has_warned = False  # of the schedule's end

    @property
    def gradient_state(self) -> GradientState:
        """The state of gradient accumulation that determines when the schedule advances."""
        return GradientState(groups=self._groups)

    def step(self, *args: object, **kwargs: object) -> None:
        """Advance the schedule if an optimizer step is due at this micro-batch and was not skipped."""
        if self.step_with_optimizer:
            if not self._groups.sync_gradients:
                return
            for optimizer in self.optimizers:
                if isinstance(optimizer, AcceleratedOptimizer) and optimizer.step_was_skipped:
                    return
        for _ in range(1 + self._further):
            # OneCycleLR raises an error after its last step. As in Accelerate, a loop may be longer than the schedule.
            if self._has_ended:
                self._warn_of_end()
                return
            self.scheduler.step(*args, **kwargs)

    @property
    def _has_ended(self) -> bool:
        """True if the schedule has made `total_steps` steps. False for a schedule without this attribute."""
        total_steps: int | None = getattr(self.scheduler, "total_steps", None)
        return total_steps is not None and self.scheduler.last_epoch >= total_steps

    def _warn_of_end(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{type(self.scheduler).__name__} has ended after total_steps={self.scheduler.total_steps}. The learning "
            "rate does not change any more.",
            TrainwrightWarning,
            stacklevel=3,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state."""
        return scheduler_state(self.scheduler)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.scheduler.load_state_dict(state_dict)

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def print_lr(self, is_verbose: bool, group: object, lr: float, epoch: int | None = None) -> None:
        """Print a learning rate of a parameter group, as schedules of earlier torch versions do."""
        if is_verbose:
            prefix = "" if epoch is None else f"Epoch {epoch}: "
            print(f"{prefix}Adjusting learning rate of group {group} to {lr:.4e}.")  # noqa: T201  # what it is for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "scheduler" not in vars(self):
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def is_scheduler(value: object) -> bool:
    """Return whether `value` is a learning-rate schedule of torch, or has the methods of one."""
    if isinstance(value, LRScheduler):
        return True
    if isinstance(value, (Optimizer, nn.Module)):
        return False
    return all(hasattr(value, name) for name in ("step", "state_dict", "load_state_dict", "optimizer"))


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """Accelerate's class for schedules of DeepSpeed. Unused, because `prepare` returns an `AcceleratedScheduler`."""
