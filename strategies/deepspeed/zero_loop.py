"""Gradients and optimizer steps of user-written training loops with DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.deepspeed.zero_model import ZeroModel
from trainwright.strategies.deepspeed.zero_shards import FlatShards
from trainwright.strategies.steps.gradients import (
    GradientClip,
    Gradients,
    clip_gradients,
    clip_shards,
    free_gradients,
    scale_gradients,
)


class ZeroGradients(Gradients):
    """The gradients of models in DeepSpeed engines.

    Attributes:
        models: All trained models of the loop.
    """

    # Before the last backward, the stages hold different parts of the sums. Afterwards all hold averaged shards.
    scales_sums = False
    accumulates_elsewhere = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.models: list[ZeroModel] = []

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Run backward through the engine of the model that was called since the previous backward.

        Raises:
            ConfigurationError: Several models were called, `kwargs` has other arguments than `retain_graph` and
                `scale_wrt_gas=False`, or the step's last micro-batch has already run backward.
        """
        retain_graph = bool(kwargs.pop("retain_graph", False))
        if kwargs.get("scale_wrt_gas") is False:  # passed by transformers: the loss is already divided
            del kwargs["scale_wrt_gas"]
        if kwargs:
            raise ConfigurationError(
                f"backward({next(iter(kwargs))}=…): DeepSpeed accepts only retain_graph. Remove the argument."
            )
        called = [model for model in self.models if model.was_called] or self.models
        if len(called) != 1:
            raise ConfigurationError(
                f"backward() after the forwards of {len(called)} models, each with its own DeepSpeed engine. Run "
                "forward and backward of one model before the next, or prepare one module that holds all models."
            )
        (model,) = called
        model.was_called = False
        model.check_trained()
        boundary = bool(model.engine.is_gradient_accumulation_boundary())
        if model.is_complete:
            raise ConfigurationError(
                "backward() was called twice for the last micro-batch of a step, but DeepSpeed averages the gradients "
                "in the first call. To accumulate gradients, set Accelerator(gradient_accumulation_steps=n), call "
                "backward and step within accelerator.accumulate(model), and do not set sync_each_batch. To sum "
                "losses, add them and call backward once."
            )
        model.holds_gradients = True
        model.is_complete = boundary
        # The loss is divided by the loop. DeepSpeed would divide it by gradient_accumulation_steps again.
        model.engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def _by_model(self, parameters: Iterable[torch.Tensor]) -> list[tuple[ZeroModel, list[nn.Parameter]]]:
        """Return the models that contain the parameters, each with the parameters that it contains."""
        ids = {id(parameter) for parameter in parameters}
        by_model: list[tuple[ZeroModel, list[nn.Parameter]]] = []
        for model in self.models:
            contained = [parameter for parameter in model.model.parameters() if id(parameter) in ids]
            if contained:
                by_model.append((model, contained))
        return by_model

    @torch.no_grad()
    def clip(self, parameters: Iterable[torch.Tensor], clip: GradientClip) -> torch.Tensor | None:
        parameters = list(parameters)
        by_model = self._by_model(parameters)
        if any(model.shards is None for model, _ in by_model):
            return clip_gradients(parameters, clip)  # stage 0: all gradients are full
        shards: list[tuple[torch.Tensor, bool]] = []  # with True: no other rank holds the same shard
        scales: set[float] = set()
        for model, contained in by_model:
            assert model.shards is not None  # checked above
            ids = {id(parameter) for parameter in contained}
            for parameter, gradient in model.shards.gradients():
                if id(parameter) in ids:
                    shards.append((gradient, True))
            scales.add(float(model.shards.zero.loss_scale))
        if len(scales) > 1:
            raise ConfigurationError(
                f"The parameters of several models were clipped together, whose engines scale their losses by "
                f"{sorted(scales)}. Clip the gradients of each model in a call of its own."
            )
        # The engine divides by the loss scale of float16 in its step, so the shards are still multiplied by it.
        scale = scales.pop() if scales else 1.0
        norm = clip_shards(shards, replace(clip, value=clip.value * scale), self.device)
        return None if norm is None else norm / scale

    def scale(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        for model, contained in self._by_model(parameters):
            if model.shards is None:
                scale_gradients(contained, factor)
                continue
            ids = {id(parameter) for parameter in contained}
            for parameter, gradient in model.shards.gradients():
                if id(parameter) in ids:
                    gradient.mul_(factor)

    def free(self, parameters: Iterable[torch.Tensor]) -> bool:
        had_gradients = False
        for model, contained in self._by_model(parameters):
            had_gradients |= free_gradients(contained)
            if model.shards is not None:
                had_gradients |= any(True for _ in model.shards.gradients())
                model.shards.discard_gradients()
            model.holds_gradients = False
            model.is_complete = False
        for model in self.models:
            model.was_called = False
        return had_gradients


class ZeroOptimizer(Optimizer):
    """Wrapper of an optimizer that DeepSpeed's engine steps. Other attributes are those of the wrapped optimizer."""

    def __init__(self, model: ZeroModel, gradients: ZeroGradients, clipping: float | None) -> None:
        # Without `Optimizer.__init__`, whose `state` and `param_groups` would hide those of the wrapped optimizer.
        self.optimizer = model.optimizer
        self.zero = model
        self._gradients = gradients
        self._clipping = clipping

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip by the configuration, and run the engine's step, which frees the gradients. A `closure` is an error."""
        if closure is not None:
            raise ConfigurationError("step(closure): DeepSpeed does not support closures. Call step().")
        model = self.zero
        model.holds_gradients = False
        model.is_complete = False
        if self._clipping is not None:
            # Not by the engine: with offloading it uses the norm from backward, and would clip again what the loop
            # has clipped.
            self._gradients.clip(model.model.parameters(), GradientClip(self._clipping))
        model.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that no step has used. The engine's step frees the gradients that it uses.

        Args:
            set_to_none: Has no effect: gradients are always freed.
        """
        if self.zero.holds_gradients:
            self._gradients.free(self.zero.model.parameters())

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))  # `Optimizer.__getstate__` omits the wrapped optimizer

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet, while the object is copied
            raise AttributeError(name)
        attribute = getattr(self.optimizer, name)
        if name in ("train", "eval"):
            return partial(self._switch, name, attribute)
        return attribute

    def _switch(self, name: str, switch: Callable[[], Any]) -> None:
        """Call `train` or `eval` of an optimizer with two sets of weights, and update the model. Collective.

        Raises:
            ConfigurationError: The engine is at stage 3, where the optimizer has no parameters between steps.
        """
        shards = self.zero.shards
        if shards is not None and not isinstance(shards, FlatShards):
            raise ConfigurationError(
                f"optimizer.{name}(): at DeepSpeed's stage 3, {type(self.optimizer).__name__} has no parameters "
                "between steps and cannot switch its weights. Use stage 2 or 1, or FSDP."
            )
        switch()
        if shards is not None:
            shards.update_model()

    def __repr__(self) -> str:
        """Show the optimizer."""
        return repr(self.optimizer)
