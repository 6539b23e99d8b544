"""The optimizer step of a task whose engine (DeepSpeed) runs backward, averages gradients and updates the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.core.errors import TaskError
from trainwright.core.state import Group
from trainwright.strategies.deepspeed.zero_model import ZeroModel
from trainwright.strategies.steps.gradients import GradientClip, clip_gradients, clip_shards, parameters_of
from trainwright.strategies.steps.step import AutomaticStep, StepParts


class EngineStep(AutomaticStep):
    """A step through a DeepSpeed engine.

    Args:
        parts: See `StepParts`.
        model: The model and its engine.
        clipping: Maximum norm in DeepSpeed's configuration, used if the Trainer sets no clipping. None disables
            clipping.
    """

    def __init__(self, parts: StepParts, model: ZeroModel, clipping: float | None) -> None:
        super().__init__(parts)
        self._engine = model.engine
        self._shards = model.shards
        self._check_trained = model.check_trained
        self._clipping = None if clipping is None else GradientClip(clipping)
        self._backward = self._run_backward
        # The engine frees gradients in its step. `_zero_gradients`, before the next backward, is needed only to call
        # the hooks that the base class has found (`_zero_late`).
        self._zeroed = not self._zero_late

    def _run_backward(self, loss: torch.Tensor) -> None:
        self._check_trained()
        self._engine.backward(loss, scale_wrt_gas=False)

    def _skip_batches(self, skipped: list[int], group: Group, weights: object, total: object) -> Any:
        raise TaskError(
            f"{type(self.task).__name__}.training_step returned None on rank {self.parts.rank}, but DeepSpeed needs a "
            "backward on every rank to average gradients. Return a zero loss that is connected to the parameters, for "
            "example 0 * output.sum()."
        )

    def optimizer_step(self, clip: GradientClip | None) -> torch.Tensor | None:
        norm = self._prepare_clipping(self._clipping if clip is None else clip)
        if self._own_step is None:  # the task does not define `optimizer_step`
            self._engine.step()
        else:
            optimizer: Any = EngineOptimizer(self.optimizers[0], self._engine)
            self._own_step(self.run.state.epoch, self._last_idx, optimizer, self._closure())
        self._group = None
        self._loss = None
        self._zeroed = not self._zero_late
        if self._shards is not None and norm is None:
            # The engine computes the norm in its step, also without clipping.
            engine_norm = self._engine.get_global_grad_norm()
            norm = torch.as_tensor(engine_norm, dtype=torch.float32, device=self.parts.device)
        return norm

    def _prepare_clipping(self, clip: GradientClip | None) -> torch.Tensor | None:
        """Clip the gradients that the engine does not clip, and set the engine's maximum norm.

        Return the norm before clipping if it was computed here.
        """
        if self._shards is None:
            if clip is None:
                return None
            return clip_gradients(parameters_of(self.optimizers), clip)
        self._engine.optimizer.clip_grad = 0.0
        if clip is None:
            return None
        # With an offloaded optimizer the engine uses the norm from backward, before hooks have changed gradients.
        engine_can_clip = clip.algorithm != "value" and not self._engine.zero_cpu_offload()
        if engine_can_clip:
            self._engine.optimizer.clip_grad = clip.value
            return None
        # The engine divides by the loss scale of float16 in its step, so the shards are still multiplied by it.
        scale = float(self._shards.zero.loss_scale)
        # True: no other rank holds the same shard.
        gradients = [(gradient, True) for _, gradient in self._shards.gradients()]
        norm = clip_shards(gradients, replace(clip, value=clip.value * scale), self.parts.device)
        if norm is None:  # clipping by value computes none
            return None
        return norm.float() / scale

    def _zero_gradients(self, idx: int) -> None:
        for hook in self.hooks.on_before_zero_grad:
            hook(self.run, self.task, self.optimizers[0])
        self._zeroed = True

    def held_gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self._shards is None:
            return super().held_gradients()
        return iter(self._shards.gradients())

    def discard_gradients(self) -> None:
        if self._shards is None:
            super().discard_gradients()
            return
        self._shards.discard_gradients()
        self._group = None
        self._loss = None
        self._zeroed = True
        # The next backward is the last of its step again.
        self._engine.set_gradient_accumulation_boundary(True)


class EngineOptimizer:
    """The optimizer that is passed to a task's `optimizer_step`. Its `step` calls the engine's step."""

    def __init__(self, optimizer: Optimizer, engine: Any) -> None:
        self.optimizer = optimizer
        self._engine = engine

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, then the engine's step. Return the closure's loss, or None without a closure."""
        loss = None
        if closure is not None:
            loss = closure()
        self._engine.step()
        return loss

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet, while the object is copied
            raise AttributeError(name)
        return getattr(self.optimizer, name)
