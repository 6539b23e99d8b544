"""The optimizer step of a model whose units are streamed to the device. The optimizer runs on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim import optimizer as of_torch

from trainwright.core.run import Run
from trainwright.core.signatures import overrides
from trainwright.core.state import Group
from trainwright.core.task import TaskModule
from trainwright.strategies.offload.advice import read_ahead
from trainwright.strategies.offload.host_storage import HostStorage
from trainwright.strategies.offload.streamed_unit import Unit
from trainwright.strategies.offload.streaming import WeightStream
from trainwright.strategies.steps.gradients import GradientClip
from trainwright.strategies.steps.step import AutomaticStep, StepParts

# Hooks between an optimizer step and the next forward, which may change weights.
_BETWEEN_STEPS = (
    "on_train_batch_end",
    "on_train_step_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_train_step_start",
    "on_train_batch_start",
)
_MOVING = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class OffloadStep(AutomaticStep):
    """A step with weights, gradients and optimizer state on host or disk.

    Args:
        parts: See `StepParts`.
        stream: Copies units to the device. None computes with the weights in host storage.
        state_storage: Storage of optimizer state on disk, which is in memory only for the unit that steps. None keeps
            all state in memory.
    """

    def __init__(self, parts: StepParts, stream: WeightStream | None, state_storage: HostStorage | None) -> None:
        super().__init__(parts)
        self._stream = stream
        self._state_storage = state_storage
        self._is_early = False  # device copies were updated after the last step
        self._last_of_group = 0
        hooks = parts.hooks
        # `_step_in_portions` also checks that the optimizer can be split, which may change.
        self._in_portions = (stream is not None or state_storage is not None) and self._plain_step
        # Hooks may read all gradients. Without hooks, the gradients of a unit are needed only when it steps.
        has_hooks = bool(hooks.on_after_backward or hooks.on_before_optimizer_step)
        self._waits_late = self._in_portions and self._backward is None and not has_hooks
        moves = any(overrides(parts.task, name, TaskModule) for name in _MOVING)
        quiet = hooks.only_read(_BETWEEN_STEPS) and _only_schedule(parts.run, parts.task) and not moves
        self._copies_early = self._in_portions and quiet
        self._rewritten = moves or not hooks.only_read(("on_train_batch_start", "on_train_batch_end"))
        if stream is not None:
            backward = self._backward
            forward = self._training_step
            self._backward = lambda loss: self._run_backward(stream, backward, loss)
            self._training_step = lambda batch, idx: self._run_training_step(stream, forward, batch, idx)
        for optimizer in self.optimizers:
            self._store_state(optimizer)
        if self._in_portions:
            self._plain_step = False
            self._own_step = self._step_in_portions

    def weights_changed(self) -> None:
        """Record that device copies may be outdated."""
        self._is_early = False

    # Forward and backward

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        if self._stream is not None:
            if not self._is_early:
                self._stream.weights_changed()  # by the last step, or by a callback that averages or loads weights
            self._is_early = False
            self._last_of_group = group.first_idx + len(group.batches) - 1
        return super().forward_backward(group)

    def _run_batch(self, batch: object, idx: int, weight: object, num: int) -> tuple[Any, torch.Tensor | None]:
        stream = self._stream
        if stream is None:
            return super()._run_batch(batch, idx, weight, num)
        complete = False
        try:
            found = super()._run_batch(batch, idx, weight, num)
            complete = True
        finally:
            stream.end()
            if not (complete and self._waits_late and idx == self._last_of_group):
                stream.wait()  # hooks may read gradients, and the next micro-batch accumulates them
        return found

    def _run_training_step(self, stream: WeightStream, own: Callable[..., Any], batch: object, idx: int) -> Any:
        if self._rewritten:  # hooks of the batch may have written weights
            stream.weights_changed()
        stream.begin()
        return own(batch, idx)

    def _run_backward(self, stream: WeightStream, own: Callable[..., Any] | None, loss: torch.Tensor) -> None:
        if own is None:
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        else:
            own(loss)
        stream.end()
        if not self._waits_late:
            stream.wait()  # hooks after the backward may read gradients

    def _zero_gradients(self, idx: int) -> None:
        if self._stream is None:
            super()._zero_gradients(idx)
        else:  # between forward and backward, gradients of parameters on the device are stashed
            self._stream.end()
            super()._zero_gradients(idx)
            self._stream.root.move_to_device()

    # The optimizer

    def optimizer_step(self, clip: GradientClip | None) -> torch.Tensor | None:
        """Clip and step on the host, while gradients and updated weights are still being copied."""
        stream = self._stream
        if clip is not None or self._own_clip is not None or not self._in_portions:
            self._wait_for_gradients()
        if stream is not None:
            stream.weights_changed()  # the task's own step may also write frozen weights
        try:
            norm = super().optimizer_step(clip)
        finally:
            self._wait_for_gradients()  # also of parameters without an optimizer
        if not self._in_portions:
            for optimizer in self.optimizers:
                self._store_state(optimizer)
        if stream is not None and self._copies_early:
            stream.copy_early(stream.all_units)
            self._is_early = True
        return norm

    def _step_in_portions(self, epoch: int, idx: int, optimizer: Any, closure: object) -> None:
        """Step each unit when its gradients are on the host. Only the current unit's state is in memory.

        During the step of a unit, the gradients and states of the next units are read, and the new weights of previous
        units are copied to the device.
        """
        stream = self._stream
        if not can_be_split(optimizer):
            self._wait_for_gradients()
            optimizer.step()
            if stream is not None:
                stream.weights_changed()
            self._store_state(optimizer)
            return
        last = optimizer is self.optimizers[-1]  # others may hold parameters of the same unit

        def before(portion: Portion, following: Iterator[torch.Tensor]) -> None:
            if self._state_storage is not None:
                read_ahead(following)
            if portion.unit is not None:
                portion.unit.wait_for_gradients()

        def after(portion: Portion) -> None:
            self._store_state(optimizer, portion.parameters)
            if stream is not None and portion.unit is not None:
                portion.unit.weights_changed()
                if last and self._copies_early:
                    stream.copy_early([portion.unit])

        portions = portions_of(optimizer, None if stream is None else stream.in_order_of_gradients())
        step_in_portions(optimizer, portions, before=before, after=after)

    def _store_state(self, optimizer: Optimizer, parameters: list[nn.Parameter] | None = None) -> None:
        if self._state_storage is not None:
            self._state_storage.store_state(optimizer, parameters)

    # Gradients between two steps

    def _wait_for_gradients(self) -> None:
        if self._stream is not None:
            self._stream.wait_for_gradients()

    def _skip_batches(self, skipped: list[int], group: Group, weights: object, total: object) -> Any:
        self._wait_for_gradients()
        return super()._skip_batches(skipped, group, weights, total)

    def held_gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self._wait_for_gradients()
        return super().held_gradients()

    def discard_gradients(self) -> None:
        self._wait_for_gradients()
        super().discard_gradients()

    # Evaluation

    def evaluate(
        self, name: str | Callable[..., Any], batch: object, idx: int, dataloader_idx: int | None = None
    ) -> Any:
        if self._stream is None:
            return super().evaluate(name, batch, idx, dataloader_idx)
        if idx == 0:
            self._stream.weights_changed()
        self._stream.begin()
        try:
            return super().evaluate(name, batch, idx, dataloader_idx)
        finally:
            self._stream.end()
            self._stream.wait()  # hooks may write weights


def _only_schedule(trainer: Run, task: TaskModule) -> bool:
    """Return whether all schedulers are torch's, which change optimizers and no weights."""
    return not overrides(task, "lr_scheduler_step", TaskModule) and all(
        type(config.scheduler).__module__.startswith("torch.optim.") for config in trainer.lr_scheduler_configs
    )


# An optimizer step in portions of the parameters, with bitwise the same result


@dataclass(frozen=True, slots=True)
class Portion:
    """Parameters that are stepped together.

    Attributes:
        parameters: Parameters of one optimizer, all with gradients.
        unit: The unit of the parameters. None for parameters outside of units.
    """

    parameters: list[nn.Parameter]
    unit: Unit | None = None


def can_be_split(optimizer: Optimizer) -> bool:
    """Return whether separate steps of parameters have the same effect as one step of all parameters.

    True for torch's own optimizers except L-BFGS: their update of a parameter depends only on its own gradient and
    state. Other optimizers, and subclasses that override `step`, may share a norm, a step size or a call count between
    parameters. Hooks on the step would be called several times.
    """
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        of_torch._global_optimizer_pre_hooks,
        of_torch._global_optimizer_post_hooks,
    )
    of_torchs_own = type(optimizer).step.__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS)
    return of_torchs_own and not any(hooks)


def portions_of(optimizer: Optimizer, units: Sequence[Unit] | None) -> list[Portion]:
    """Divide an optimizer's parameters with gradients: one portion for each unit and each parameter in no unit."""
    left = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    found = []
    for unit in units or ():
        own = [parameter for parameter in unit.parameters if parameter in left]
        for parameter in own:
            del left[parameter]
        if own:
            found.append(Portion(own, unit))
    return found + [Portion([parameter]) for parameter in left]


def step_in_portions(
    optimizer: Optimizer,
    portions: Sequence[Portion],
    *,
    before: Callable[[Portion, Iterator[torch.Tensor]], Any],
    after: Callable[[Portion], Any],
    step: Callable[[], Any] | None = None,
) -> None:
    """Step portion by portion. Meanwhile, the gradients of all other parameters are None, so that they are skipped.

    All gradients are restored afterwards, also after an exception.

    Args:
        optimizer: An optimizer for which `can_be_split` is True.
        portions: All parameters with gradients.
        before: Called before each step with the portion and the tensors that the next portion's step will read.
        after: Called after each step with the portion.
        step: Called for each portion. Default: None, which is `optimizer.step`.
    """
    step = optimizer.step if step is None else step
    gradients = {parameter: parameter.grad for portion in portions for parameter in portion.parameters}
    for parameter in gradients:
        parameter.grad = None
    try:
        for portion, following in zip(portions, [*portions[1:], Portion([])], strict=True):
            before(portion, _touched(optimizer, following.parameters, gradients))
            for parameter in portion.parameters:
                parameter.grad = gradients[parameter]
            step()
            after(portion)
            for parameter in portion.parameters:
                parameter.grad = None
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _touched(optimizer: Optimizer, parameters: list[nn.Parameter], gradients: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a step of the parameters reads: parameters, gradients and state."""
    for parameter in parameters:
        yield parameter.data
        yield gradients[parameter]
        yield from (value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, torch.Tensor))
