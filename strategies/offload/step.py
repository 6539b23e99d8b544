"""The optimizer step of a model whose units are streamed to the device. The optimizer runs on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim import optimizer as optimizer_module

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
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


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
        hooks = parts.hooks
        # True from an optimizer step that has queued its new weights to the next group. `weights_changed` resets it.
        self._copies_are_current = False
        # Index of the last micro-batch of the current group, set by `forward_backward`.
        self._last_idx_of_group = 0
        # Step each unit separately. A task's own `optimizer_step` or a closure steps all parameters at once.
        # `_step_in_portions` also checks that the optimizer can be split, which may change.
        self._in_portions = (stream is not None or state_storage is not None) and self._plain_step
        # Wait for the gradients of a unit only when the unit steps, while those of other units are still being copied.
        # Hooks and the task's own `backward` may read all gradients, so that the backward then waits.
        has_hooks = bool(hooks.on_after_backward or hooks.on_before_optimizer_step)
        self._waits_late = self._in_portions and self._backward is None and not has_hooks
        # Copy a unit to the device right after its step, if nothing can write its weights before the next forward.
        overrides_transfer = any(overrides(parts.task, name, TaskModule) for name in _TRANSFER_HOOKS)
        schedulers_only_read = _all_schedulers_only_read(parts.run, parts.task)
        only_read = hooks.only_read(_BETWEEN_STEPS) and schedulers_only_read and not overrides_transfer
        self._copies_early = self._in_portions and only_read
        # Hooks of a micro-batch may write weights, also within a group. If True, `_copies_early` is False.
        self._hooks_may_write = overrides_transfer or not hooks.only_read(
            ("on_train_batch_start", "on_train_batch_end")
        )
        # Last: the lines above read the task's own functions, which are replaced here.
        if stream is not None:
            own_backward = self._backward
            own_training_step = self._training_step
            self._backward = lambda loss: self._run_backward(stream, own_backward, loss)
            self._training_step = lambda batch, idx: self._run_training_step(stream, own_training_step, batch, idx)
        for optimizer in self.optimizers:
            self._store_state(optimizer)
        if self._in_portions:
            # `AutomaticStep` then calls `_step_in_portions` as if it were the task's own `optimizer_step`.
            self._plain_step = False
            self._own_step = self._step_in_portions

    def weights_changed(self) -> None:
        """Record that device copies may be outdated."""
        self._copies_are_current = False

    # Forward and backward

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        if self._stream is not None:
            # The last step, or a callback that averages or loads weights, may have written weights.
            if not self._copies_are_current:
                self._stream.weights_changed()
            self._copies_are_current = False
            self._last_idx_of_group = group.first_idx + len(group.batches) - 1
        return super().forward_backward(group)

    def _run_batch(self, batch: object, idx: int, weight: object, num: int) -> tuple[Any, torch.Tensor | None]:
        stream = self._stream
        if stream is None:
            return super()._run_batch(batch, idx, weight, num)
        is_complete = False
        try:
            output_and_loss = super()._run_batch(batch, idx, weight, num)
            is_complete = True
        finally:
            stream.end()
            is_last = idx == self._last_idx_of_group
            # Hooks may read gradients, the next micro-batch accumulates them, and after an error anything may follow.
            if not (is_complete and is_last and self._waits_late):
                stream.wait()
        return output_and_loss

    def _run_training_step(
        self, stream: WeightStream, own_training_step: Callable[..., Any], batch: object, idx: int
    ) -> Any:
        if self._hooks_may_write:
            stream.weights_changed()
        stream.begin()
        return own_training_step(batch, idx)

    def _run_backward(self, stream: WeightStream, own_backward: Callable[..., Any] | None, loss: torch.Tensor) -> None:
        if own_backward is None:
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        else:
            own_backward(loss)
        stream.end()
        if not self._waits_late:
            stream.wait()  # hooks after the backward may read gradients

    def _zero_gradients(self, idx: int) -> None:
        if self._stream is None:
            super()._zero_gradients(idx)
            return
        # Called between forward and backward. The root unit is on the device, so that the `grad` of its parameters is
        # None and their gradients are stored in the unit: move it to the host, where `zero_grad` frees them.
        self._stream.end()
        super()._zero_gradients(idx)
        self._stream.root.move_to_device()

    # The optimizer

    def optimizer_step(self, clip: GradientClip | None) -> torch.Tensor | None:
        """Clip and step on the host, while gradients and updated weights are still being copied."""
        stream = self._stream
        needs_all_gradients = clip is not None or self._own_clip is not None or not self._in_portions
        if needs_all_gradients:
            self._wait_for_gradients()
        if stream is not None:
            stream.weights_changed()  # the task's own step may also write frozen weights
        try:
            norm = super().optimizer_step(clip)
        finally:
            # Also gradients of parameters without an optimizer, which are part of no portion.
            self._wait_for_gradients()
        if not self._in_portions:
            for optimizer in self.optimizers:
                self._store_state(optimizer)
        if stream is not None and self._copies_early:
            stream.copy_early(stream.all_units)  # also units that no optimizer has stepped
            self._copies_are_current = True
        return norm

    def _step_in_portions(self, epoch: int, idx: int, optimizer: Any, closure: object) -> None:
        """Step each unit when its gradients are on the host. Only the current unit's state is in memory.

        During the step of a unit, the next unit's gradients and state are read from the disk, and the new weights of
        previous units are copied to the device.

        `AutomaticStep` calls it as the task's `optimizer_step`. The epoch, the index and the closure are not used.
        """
        stream = self._stream
        if not can_be_split(optimizer):
            self._wait_for_gradients()
            optimizer.step()
            if stream is not None:
                stream.weights_changed()
            self._store_state(optimizer)
            return
        # A later optimizer may have parameters of the same unit.
        is_last_optimizer = optimizer is self.optimizers[-1]

        def before(portion: Portion, next_tensors: Iterator[torch.Tensor]) -> None:
            if self._state_storage is not None:
                read_ahead(next_tensors)
            if portion.unit is not None:
                portion.unit.wait_for_gradients()

        def after(portion: Portion) -> None:
            self._store_state(optimizer, portion.parameters)
            if stream is not None and portion.unit is not None:
                portion.unit.weights_changed()
                if is_last_optimizer and self._copies_early:
                    stream.copy_early([portion.unit])

        units = [] if stream is None else stream.in_order_of_gradients()
        portions = portions_of(optimizer, units)
        step_in_portions(optimizer, portions, before=before, after=after)

    def _store_state(self, optimizer: Optimizer, parameters: list[nn.Parameter] | None = None) -> None:
        if self._state_storage is not None:
            self._state_storage.store_state(optimizer, parameters)

    # Access to gradients, which waits until they are on the host

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
        if idx == 0:  # the first batch: the training, or hooks before the evaluation, may have written weights
            self._stream.weights_changed()
        self._stream.begin()
        try:
            return super().evaluate(name, batch, idx, dataloader_idx)
        finally:
            self._stream.end()
            self._stream.wait()  # hooks may write weights


def _all_schedulers_only_read(trainer: Run, task: TaskModule) -> bool:
    """Return whether all schedulers are torch's, which change optimizers but no weights."""
    if overrides(task, "lr_scheduler_step", TaskModule):
        return False
    return all(type(config.scheduler).__module__.startswith("torch.optim.") for config in trainer.lr_scheduler_configs)


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
    parameters. False with hooks on the step, which would be called several times.
    """
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        optimizer_module._global_optimizer_pre_hooks,
        optimizer_module._global_optimizer_post_hooks,
    )
    has_torchs_step = type(optimizer).step.__module__.startswith("torch.optim.")
    return has_torchs_step and not isinstance(optimizer, LBFGS) and not any(hooks)


def portions_of(optimizer: Optimizer, units: Sequence[Unit]) -> list[Portion]:
    """Divide an optimizer's parameters with gradients: one portion for each unit and each parameter in no unit.

    Args:
        optimizer: The optimizer.
        units: Units in the order of the steps. Units without such parameters have no portion.
    """
    remaining: dict[nn.Parameter, None] = {}  # an ordered set
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                remaining[parameter] = None
    portions = []
    for unit in units:
        of_unit = [parameter for parameter in unit.parameters if parameter in remaining]
        for parameter in of_unit:
            del remaining[parameter]
        if of_unit:
            portions.append(Portion(of_unit, unit))
    for parameter in remaining:
        portions.append(Portion([parameter]))
    return portions


def step_in_portions(
    optimizer: Optimizer,
    portions: Sequence[Portion],
    *,
    before: Callable[[Portion, Iterator[torch.Tensor]], Any],
    after: Callable[[Portion], Any],
    step: Callable[[], Any] | None = None,
) -> None:
    """Step portion by portion. In each step, the gradients of all other parameters are None, which torch skips.

    All gradients are restored afterwards, also after an exception.

    Args:
        optimizer: An optimizer for which `can_be_split` is True.
        portions: All parameters with gradients.
        before: Called before each step with the portion, while its gradients are None, and the tensors that the next
            portion's step will read.
        after: Called after each step with the portion.
        step: Called for each portion. Default: None, which is `optimizer.step`.
    """
    step = optimizer.step if step is None else step
    gradients = {parameter: parameter.grad for portion in portions for parameter in portion.parameters}
    for parameter in gradients:
        parameter.grad = None
    try:
        next_portions = [*portions[1:], Portion([])]  # the last portion is followed by an empty one
        for portion, next_portion in zip(portions, next_portions, strict=True):
            before(portion, _tensors_of(optimizer, next_portion.parameters, gradients))
            for parameter in portion.parameters:
                parameter.grad = gradients[parameter]
            step()
            after(portion)
            for parameter in portion.parameters:
                parameter.grad = None
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


def _tensors_of(optimizer: Optimizer, parameters: list[nn.Parameter], gradients: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a step of the parameters reads: parameters, gradients and state."""
    for parameter in parameters:
        yield parameter.data
        yield gradients[parameter]
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, torch.Tensor):
                yield value
