"""The step of a task that DeepSpeed's engine trains: it runs backward, averages, clips and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.core.errors import TaskError
from trainwright.core.state import Group
from trainwright.strategies.deepspeed.zero_model import ZeroModel
from trainwright.strategies.steps.gradients import GradientClip, clip_gradients, parameters_of
from trainwright.strategies.steps.step import AutomaticStep, StepParts


class EngineStep(AutomaticStep):
    """A step through an engine.

    Args:
        parts: what it is made of.
        model: in the engine.
        clipping: the norm that the configuration clips by, where the Trainer says nothing; None: it does not clip.
    """

    def __init__(self, parts: StepParts, model: ZeroModel, clipping: float | None) -> None:
        super().__init__(parts)
        self._engine, self._pieces, self._trained = model.engine, model.pieces, model.trained
        self._clipping = None if clipping is None else GradientClip(clipping)
        self._backward = self._run_backward
        self._zeroed = not self._zero_late  # the engine zeroes by itself; listeners are told

    def _run_backward(self, loss: torch.Tensor) -> None:
        if self._trained is not None:
            self._trained.check()
        self._engine.backward(loss, scale_wrt_gas=False)

    def _leave_out(self, skipped: list[int], group: Group, weights: Any, total: Any) -> Any:
        raise TaskError(
            f"{type(self.task).__name__}.training_step returned None on rank {self.parts.rank}: DeepSpeed averages "
            "gradients in the last backward of a step, and would wait for it. Return a loss of zero that is connected "
            "to the parameters instead, for example 0 * output.sum()."
        )

    def optimizer_step(self, clip: GradientClip | None) -> torch.Tensor | None:
        norm = self._prepare_clipping(self._clipping if clip is None else clip)
        if self._own_step is None:
            self._engine.step()
        else:
            stepped: Any = EngineOptimizer(self.optimizers[0], self._engine)
            self._own_step(self.run.state.epoch, self._last_idx, stepped, self._closure())
        self._group = self._loss = None
        self._zeroed = not self._zero_late
        if self._pieces is not None:
            found = self._engine.get_global_grad_norm()
            norm = torch.as_tensor(found, dtype=torch.float32, device=self.parts.device)
        return norm

    def _prepare_clipping(self, clip: GradientClip | None) -> torch.Tensor | None:
        """Clip what the engine does not, and tell it about the rest."""
        if self._pieces is None:
            return None if clip is None else clip_gradients(parameters_of(self.optimizers), clip)
        by_norm = clip is not None and clip.algorithm == "norm"
        self._engine.optimizer.clip_grad = clip.value if by_norm and clip is not None else 0.0
        if clip is not None and not by_norm:
            for _, gradient in self._pieces.gradients():
                gradient.clamp_(-clip.value, clip.value)
        return None

    def _zero_gradients(self, idx: int) -> None:
        for hook in self.hooks.on_before_zero_grad:
            hook(self.run, self.task, self.optimizers[0])
        self._zeroed = True

    def held_gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return super().held_gradients() if self._pieces is None else iter(self._pieces.gradients())

    def discard_gradients(self) -> None:
        if self._pieces is None:
            super().discard_gradients()
            return
        self._pieces.discard_gradients()
        self._group = self._loss = None
        self._zeroed = True
        self._engine.set_gradient_accumulation_boundary(True)


class EngineOptimizer:
    """An optimizer as a task's own `optimizer_step` sees it: its step is the engine's. All else is its own."""

    def __init__(self, optimizer: Optimizer, engine: Any) -> None:
        self.optimizer = optimizer
        self._engine = engine

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average, clip and step; returns the closure's loss."""
        loss = None if closure is None else closure()
        self._engine.step()
        return loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
