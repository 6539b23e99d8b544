"""User-written loops through engines of DeepSpeed: forwards, gradients and optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError
from trainwright.core.tree import map_tensors
from trainwright.strategies.deepspeed.zero_model import ZeroModel
from trainwright.strategies.deepspeed.zero_pieces import FlatPieces
from trainwright.strategies.steps.gradients import (
    GradientClip,
    Gradients,
    clip_gradients,
    clip_shards,
    free_gradients,
    scale_gradients,
)


class ZeroGradients(Gradients):
    """The gradients of models that engines of DeepSpeed hold.

    Attributes:
        models: all trained models of the loop.
    """

    # Until the last backward, what a stage holds of the sums differs; afterwards all hold shards of the averages.
    scales_sums = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.models: list[ZeroModel] = []
        self._called: list[ZeroModel] = []  # whose forwards have run since the last backward

    def note_forward(self, model: ZeroModel) -> None:
        """Record that a loss may depend on a model."""
        if not any(model is one for one in self._called):
            self._called.append(model)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward through the engine of the model whose forward has run."""
        retain = bool(kwargs.pop("retain_graph", False))
        if kwargs.get("scale_wrt_gas") is False:  # as transformers writes it: the loss is divided already
            del kwargs["scale_wrt_gas"]
        if kwargs:
            raise ConfigurationError(
                f"backward({next(iter(kwargs))}=…): an engine of DeepSpeed takes retain_graph only."
            )
        called = self._called or self.models
        if len(called) != 1:
            raise ConfigurationError(
                f"backward() after the forwards of {len(called)} models, each with an engine of DeepSpeed. Run one "
                "forward and one backward for each in turn, or prepare one module that holds both."
            )
        (model,) = called
        self._called = []
        if model.trained is not None:
            model.trained.check()
        boundary = bool(model.engine.is_gradient_accumulation_boundary())
        if model.is_complete:
            raise ConfigurationError(
                "backward() was called twice after the last micro-batch of a step, and an engine of DeepSpeed has "
                "averaged the gradients in the first call. To accumulate gradients, set "
                "Accelerator(gradient_accumulation_steps=n), call backward and step within "
                "accelerator.accumulate(model), and leave sync_each_batch out. To sum losses, add them and call "
                "backward once."
            )
        model.holds_gradients, model.is_complete = True, boundary
        model.engine.backward(loss, retain_graph=retain, scale_wrt_gas=False)

    def _of(self, parameters: Iterable[torch.Tensor]) -> list[tuple[ZeroModel, list[nn.Parameter]]]:
        """Return the models that hold parameters, each with its own."""
        wanted = {id(parameter) for parameter in parameters}
        found = [(model, [p for p in model.model.parameters() if id(p) in wanted]) for model in self.models]
        return [(model, own) for model, own in found if own]

    @torch.no_grad()
    def clip(self, parameters: Iterable[torch.Tensor], clip: GradientClip) -> torch.Tensor | None:
        wanted = list(parameters)
        shards: list[tuple[torch.Tensor, bool]] = []
        for model, own in self._of(wanted):
            if model.pieces is None:
                return clip_gradients(wanted, clip)  # stage 0: all gradients are full
            ids = {id(parameter) for parameter in own}
            shards += [(gradient, True) for p, gradient in model.pieces.gradients() if id(p) in ids]
        return clip_shards(shards, clip, self.device)

    def scale(self, parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
        for model, own in self._of(parameters):
            if model.pieces is None:
                scale_gradients(own, factor)
                continue
            for _, gradient in model.pieces.gradients():
                gradient.mul_(factor)

    def free(self, parameters: Iterable[torch.Tensor]) -> bool:
        had = False
        for model, own in self._of(parameters):
            had |= free_gradients(own)
            if model.pieces is not None:
                had |= any(True for _ in model.pieces.gradients())
                model.pieces.discard_gradients()
            model.engine.set_gradient_accumulation_boundary(True)
            model.holds_gradients = model.is_complete = False
        self._called = []
        return had


class ZeroForward:
    """Runs the forward of one model through its engine. Collective at stage 3."""

    def __init__(self, model: ZeroModel, gradients: ZeroGradients, dtype: torch.dtype | None) -> None:
        self.zero = model
        self._gradients, self._dtype = gradients, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._dtype is not None:
            args, kwargs = map_tensors(self._cast, (args, kwargs))
        if torch.is_grad_enabled() and self.zero.optimizer is not None:
            self._gradients.note_forward(self.zero)
        return self.zero.engine(*args, **kwargs)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


class ZeroOptimizer(Optimizer):
    """An optimizer whose step is the engine's; everything else is its own."""

    def __init__(self, model: ZeroModel, gradients: ZeroGradients, clipping: float | None) -> None:
        self.optimizer, self.zero, self._gradients, self._clipping = model.optimizer, model, gradients, clipping

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step through the engine, which frees the gradients."""
        if closure is not None:
            raise ConfigurationError("step(closure): an engine of DeepSpeed runs no closures. Leave it out.")
        model = self.zero
        model.holds_gradients = model.is_complete = False
        if self._clipping is not None:
            if model.pieces is None:
                clip_gradients(model.model.parameters(), GradientClip(self._clipping))
            else:
                model.engine.optimizer.clip_grad = self._clipping
        model.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that no step has used; the engine frees the others in its step."""
        if self.zero.holds_gradients:
            self._gradients.free(self.zero.model.parameters())

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.optimizer, name)
        return partial(self._switch, name, found) if name in ("train", "eval") else found

    def _switch(self, name: str, switch: Callable[[], Any]) -> None:
        """Switch an optimizer with two sets of weights, and update the model from its shards. Collective.

        Raises:
            ConfigurationError: The engine is at stage 3, where the optimizer holds no parameters between its steps.
        """
        pieces = self.zero.pieces
        if pieces is not None and not isinstance(pieces, FlatPieces):
            raise ConfigurationError(
                f"optimizer.{name}(): DeepSpeed's stage 3 takes the parameters from {type(self.optimizer).__name__} "
                "between two steps, and it cannot switch its weights. Use stage 2 or 1, or FSDP."
            )
        switch()
        if pieces is not None:
            pieces.update_model()

    def __repr__(self) -> str:
        """Show the optimizer."""
        return repr(self.optimizer)
