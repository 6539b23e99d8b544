"""Prepared optimizers, which step once per group of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from trainwright.accelerator.accumulation import Accumulation
from trainwright.accelerator.loss_scale import LossScale
from trainwright.strategies.steps.gradients import parameters_of


class AcceleratedOptimizer(Optimizer):
    """An optimizer that steps once per group of micro-batches, and skips steps whose fp16 gradients overflow.

    Args:
        given: the user's.
        accumulation: knows when a step is due.
        scaler: scaler of the loss; None: the loss is not scaled.

    Attributes:
        optimizer: The one that is stepped, which the engine determines; its groups and state are this one's.
        num_steps: completed steps.
    """

    def __init__(self, given: Optimizer, accumulation: Accumulation, scaler: LossScale | None = None) -> None:
        self.optimizer = self.given = given
        self.scaler = scaler
        self._accumulation = accumulation
        self._skipped = False
        self.num_steps = 0

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

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step that was due was skipped because of non-finite fp16 gradients."""
        return self._skipped

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step if the current micro-batch is the last of its group; otherwise do nothing."""
        if not self._accumulation.sync_gradients:
            return None
        if self.scaler is None:
            self.num_steps += 1
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self._skipped = not self.scaler.step(self.optimizer, closure)
        self.num_steps += not self._skipped
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients if the current micro-batch is the last of its group; otherwise keep accumulating."""
        if self._accumulation.sync_gradients:
            self.optimizer.zero_grad(set_to_none)
            self._accumulation.discard_open_groups(lambda: parameters_of([self.optimizer]))

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
        """Show the optimizer."""
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the optimizer."""
        if name.startswith("__") or "optimizer" not in vars(self):
            raise AttributeError(name)
        return getattr(self.optimizer, name)
