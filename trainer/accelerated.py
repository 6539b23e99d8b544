"""What `Accelerator.prepare` makes of a model, an optimizer and a scheduler: objects that behave like the user's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.core.errors import ConfigurationError
from trainwright.core.tree import map_tensors
from trainwright.trainer.accelerated_loader import AcceleratedLoader
from trainwright.trainer.accumulation import Accumulation

_NARROW = (torch.float16, torch.bfloat16)


class AcceleratedModel(nn.Module):
    """A model behind what joins the processes, or behind a mixed precision.

    Its state dict has the model's own names, and attributes that it lacks are the model's.

    Args:
        module: the user's model.
        engine: is called in the model's place; the model itself, or a wrapper that holds it.
        make_context: makes the context of a forward, whose outputs become float32; None: it has none.
    """

    def __init__(
        self, module: nn.Module, engine: nn.Module, make_context: Callable[[], AbstractContextManager[Any]] | None
    ) -> None:
        super().__init__()
        self.module = module
        self.make_context = make_context
        object.__setattr__(self, "engine", engine)  # no child: its parameters are the module's
        self._num_forwards = 0  # that are under way
        self._guard: Any = None
        if engine is not module:
            self._guard = module.register_forward_pre_hook(partial(_refuse_past, weakref.ref(self)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; collective in training, under a strategy of several processes."""
        self._num_forwards += 1
        try:
            if self.make_context is None:
                return self.engine(*args, **kwargs)
            with self.make_context():
                output = self.engine(*args, **kwargs)
        finally:
            self._num_forwards -= 1
        return map_tensors(_widened, output)

    def release(self) -> None:
        """Let another object stand for the same model."""
        if self._guard is not None:
            self._guard.remove()

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of this object is under way."""
        return self._num_forwards > 0

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which backward leaves gradients on this rank; see `Accelerator.no_sync`."""
        found: AbstractContextManager[Any] = getattr(self.engine, "no_sync", nullcontext)()
        return found

    def train(self, mode: bool = True) -> AcceleratedModel:
        """Choose between training and evaluation; returns this object."""
        super().train(mode)
        if self.engine is not self.module:
            self.engine.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own state dict; within another module's, names are torch's usual ones."""
        within = args or kwargs.get("destination") is not None or kwargs.get("prefix")
        return super().state_dict(*args, **kwargs) if within else self.module.state_dict(**kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the model's own names and parameters."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's own names and buffers."""
        return self.module.named_buffers(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the model's own names, on every rank."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model (`config`, `generate`, …)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def _refuse_past(prepared: weakref.ref[AcceleratedModel], module: nn.Module, args: Any) -> None:
    """Raise where a model that is trained by several processes runs past what joins them."""
    owner = prepared()
    if owner is None or owner.is_in_forward or not (torch.is_grad_enabled() and module.training):
        return
    raise ConfigurationError(
        f"{type(module).__name__} was called past what prepare() returned, by a method of its own or unwrapped: its "
        "gradients would stay on each process, and the weights would part. Call the prepared model itself, or this one "
        "under torch.no_grad() or in eval mode."
    )


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _NARROW else tensor


class AcceleratedOptimizer(Optimizer):
    """An optimizer that steps once per group of micro-batches, and not at all where fp16 gradients overflowed.

    Args:
        optimizer: the user's; its groups and state are this one's.
        accumulation: says when a step is due.
        scaler: of the loss; None: it is not scaled.

    Attributes:
        num_steps: steps that it has taken.
    """

    def __init__(self, optimizer: Optimizer, accumulation: Accumulation, scaler: LossScale | None = None) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self._accumulation = accumulation
        self._skipped = False
        self.num_steps = 0

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's state, by parameter."""
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The optimizer's parameter groups."""
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        """The optimizer's default options."""
        return self.optimizer.defaults

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step that was due left the weights as they were, since gradients were not finite in fp16."""
        return self._skipped

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step if the present micro-batch ends its group; nothing happens otherwise."""
        if not self._accumulation.sync_gradients:
            return None
        if self.scaler is None:
            self.num_steps += 1
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self._skipped = not self.scaler.step(self.optimizer, closure)
        self.num_steps += not self._skipped
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients if the present micro-batch ends its group; they go on being added up otherwise."""
        if self._accumulation.sync_gradients:
            self.optimizer.zero_grad(set_to_none)

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
        """Tell an optimizer that has two kinds of weights (schedule-free ones) that training goes on."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Tell an optimizer that has two kinds of weights (schedule-free ones) that an evaluation begins."""
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


class AcceleratedScheduler:
    """A learning-rate schedule that advances once per optimizer step, whatever the accumulation or number of processes.

    Args:
        scheduler: the user's.
        optimizers: prepared; a step that any of them left out is not counted.
        accumulation: says when a step is due.
        steps_with_optimizer: False: every call counts, as in a schedule by epochs.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: list[AcceleratedOptimizer],
        accumulation: Accumulation,
        *,
        steps_with_optimizer: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self._optimizers = optimizers
        self._accumulation = accumulation
        self._steps_with_optimizer = steps_with_optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if an optimizer step is due at this micro-batch and was not left out."""
        if self._steps_with_optimizer:
            due = self._accumulation.sync_gradients
            if not due or any(optimizer.step_was_skipped for optimizer in self._optimizers):
                return
        self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state."""
        found: dict[str, Any] = self.scheduler.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
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


class LossScale:
    """The loss scale of fp16, shared by all optimizers of a loop.

    It changes before the first backward of a group and not after an optimizer's step, so that all gradients of a group
    have one scale, whatever number of optimizers they belong to.

    Args:
        device_type: torch's.
    """

    def __init__(self, device_type: str) -> None:
        self.scaler = torch.amp.GradScaler(device_type)
        self._is_due = False
        self._num_backwards = 0
        self._unscaled: dict[int, int] = {}  # optimizer → backwards until its gradients were divided

    def scale(self, loss: torch.Tensor, *, starts_group: bool) -> torch.Tensor:
        """Return the loss times the scale, which is brought up to date where a group begins."""
        if starts_group:
            self._catch_up()
        self._num_backwards += 1
        return self.scaler.scale(loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and how it grows, as the next backward finds it. Waits for the device."""
        self._catch_up()
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.scaler.load_state_dict(state)

    def _catch_up(self) -> None:
        if self._is_due:
            self.scaler.update()
            self._is_due = False
            self._unscaled.clear()

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, once per step.

        Raises:
            ConfigurationError: more has been added to gradients that were divided already.
        """
        seen = self._unscaled.get(id(optimizer))
        if seen is None:
            self._unscaled[id(optimizer)] = self._num_backwards
            self.scaler.unscale_(optimizer)
        elif seen != self._num_backwards:
            raise ConfigurationError(
                "gradients were added to others that had been unscaled (by clipping) already. Clip, and step, after "
                "the last backward of an optimizer step alone."
            )

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
        """Step an optimizer if all its gradients are finite; returns whether it did. Waits for the device."""
        done = _Step(optimizer, closure)
        before = vars(optimizer).get("step")
        optimizer.step = done  # type: ignore[method-assign, assignment]  # the scaler calls it, or does not
        try:
            self.scaler.step(optimizer)
        finally:
            if before is None:
                del optimizer.step
            else:
                optimizer.step = before  # type: ignore[method-assign]  # a scheduler counts there
        self._is_due = True
        return done.was_taken


class _Step:
    """Stands in for an optimizer's `step` while the scaler decides."""

    def __init__(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> None:
        self._optimizer, self._step, self._closure = optimizer, optimizer.step, closure
        self._was_called = False
        self._found_inf: torch.Tensor | None = None

    def __call__(self) -> Any:
        self._was_called = True
        self._found_inf = getattr(self._optimizer, "found_inf", None)  # a fused kernel's, which decides by itself
        return self._step() if self._closure is None else self._step(self._closure)

    @property
    def was_taken(self) -> bool:
        return self._was_called and not (self._found_inf is not None and bool(self._found_inf))


def holds_optimizer(scheduler: Any, optimizer: AcceleratedOptimizer) -> bool:
    """Tell whether a scheduler was made for an optimizer, or for what was prepared of it."""
    return getattr(scheduler, "optimizer", None) in (optimizer, optimizer.optimizer)


def prepared_from(value: Any) -> Any:
    """Return the user's own object that was prepared; None for what was not."""
    if isinstance(value, AcceleratedModel):
        return value.module
    if isinstance(value, AcceleratedOptimizer):
        return value.optimizer
    if isinstance(value, AcceleratedScheduler):
        return value.scheduler
    return value.prepared.raw if isinstance(value, AcceleratedLoader) else None


def is_scheduler(value: Any) -> bool:
    """Tell whether `value` is a learning-rate schedule, of torch or of the same manner."""
    if isinstance(value, LRScheduler):
        return True
    has = ("step", "state_dict", "load_state_dict", "optimizer")
    return not isinstance(value, (Optimizer, nn.Module)) and all(hasattr(value, name) for name in has)
