"""The scale of a float16 loss, shared by all optimizers of a task or of a user-written loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError


class LossScale:
    """The loss scale of fp16, shared by all optimizers.

    The scale is updated before the first backward of a group, not after an optimizer's step. All gradients of a group
    therefore have the same scale, even if several optimizers use them.

    Args:
        scaler: The gradient scaler, which no other object uses.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        # True if an optimizer has stepped since the last update.
        self._is_due = False
        self._num_backwards = 0
        # By the id of an optimizer: number of backwards when its gradients were divided. Emptied by each update.
        self._unscaled: dict[int, int] = {}

    def scale(self, loss: torch.Tensor, *, starts_group: bool) -> torch.Tensor:
        """Return the loss times the scale. The first call of a group updates the scale."""
        if starts_group:
            self.update()
        self._num_backwards += 1
        return self.scaler.scale(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale of the next backward, and the state of its growth. Waits for the device."""
        self.update()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.scaler.load_state_dict(state)

    def update(self) -> None:
        """Update the scale if an optimizer has stepped since the last update."""
        if self._is_due:
            self.end_step()

    def end_step(self) -> None:
        """Update the scale after the optimizers have stepped, also if a user's hook has left some of them out."""
        self.scaler.update()
        self._is_due = False
        self._unscaled.clear()

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, once per step.

        Raises:
            ConfigurationError: A backward has added to gradients that were already divided.
        """
        num_at_unscaling = self._unscaled.get(id(optimizer))
        if num_at_unscaling is None:
            self._unscaled[id(optimizer)] = self._num_backwards
            self.scaler.unscale_(optimizer)
        elif num_at_unscaling != self._num_backwards:
            raise ConfigurationError(
                "backward() was called after the gradients of the same optimizer step were unscaled, for example by "
                "clipping. Clip and step only after the last backward of an optimizer step."
            )

    def discard(self) -> None:
        """Discard the record of divided gradients, which are freed before a step. The scale does not change."""
        self.scaler.update(self.scaler.get_scale())  # with a value, torch resets its record and sets this scale
        self._is_due = False
        self._unscaled.clear()

    def step(self, optimizer: Optimizer, **options: Any) -> None:
        """Step an optimizer if all its gradients are finite. Waits for the device, unless the optimizer is fused.

        Args:
            optimizer: The optimizer.
            **options: Further arguments of the optimizer's `step`.
        """
        self.scaler.step(optimizer, **options)
        self._is_due = True

    def try_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step an optimizer like `step`, and return whether it has stepped. Waits for the device.

        Args:
            optimizer: The optimizer.
            closure: Passed to the optimizer's `step`. Default: None.
        """
        guarded = _GuardedStep(optimizer, closure)
        # A scheduler sets the attribute `step` of the object, to count steps. None without a scheduler.
        own_attribute = vars(optimizer).get("step")
        optimizer.step = guarded  # type: ignore[method-assign, assignment]  # the scaler calls it, or does not
        try:
            self.step(optimizer)
        finally:
            if own_attribute is None:
                del optimizer.step
            else:
                optimizer.step = own_attribute  # type: ignore[method-assign]
        return guarded.was_taken


class _GuardedStep:
    """Replacement of an optimizer's `step` that records whether the scaler calls it."""

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> None:
        self._optimizer = optimizer
        self._step = optimizer.step
        self._closure = closure
        self._was_called = False
        # 1.0 on the device if a gradient is not finite. Set by a call for fused optimizers, and None for others.
        self._found_inf: torch.Tensor | None = None

    def __call__(self, **options: Any) -> Any:
        self._was_called = True
        # A fused optimizer is always called: its kernel reads this flag, and does nothing if a gradient is infinite.
        self._found_inf = getattr(self._optimizer, "found_inf", None)
        if self._closure is None:
            return self._step(**options)
        return self._step(self._closure, **options)

    @property
    def was_taken(self) -> bool:
        """True if the optimizer has stepped. Waits for the device if the optimizer is fused."""
        if not self._was_called:
            return False
        return self._found_inf is None or not bool(self._found_inf)
