"""One optimizer step over a group of micro-batches. Calls all hooks of micro-batches.

`AutomaticStep` weighs losses, runs backward and steps the optimizers. `ManualStep` (in `manual_step`) is for tasks with
manual optimization. Engines that run parts of the step have a subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.callbacks.hook_table import HookTable
from trainwright.core.run import Run
from trainwright.core.signatures import overrides, own_hook
from trainwright.core.state import Group, SkipRestOfEpoch
from trainwright.core.task import TaskModule
from trainwright.core.tree import local_part
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.loggers.metric_slot import is_metric_object
from trainwright.loggers.metric_values import same_metric_objects
from trainwright.strategies.data_ranks import DataRanks, metrics_over
from trainwright.strategies.precision import Precision
from trainwright.strategies.steps.binding import ScaledOptimizer, bind_step, need_closure, outputs_of
from trainwright.strategies.steps.gradients import (
    GradientClip,
    Gradients,
    growth_without,
    item_weights,
    loss_of,
    parameters_of,
    scale_gradients,
    stack_counts,
    without_loss,
    zero_gradients,
)
from trainwright.strategies.steps.loss_scale import LossScale
from trainwright.strategies.steps.phase import Phase
from trainwright.strategies.steps.transfer import make_transfer


def _ignore(phase: Phase) -> None:
    """Ignore the phase of a step."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """Everything that a step uses: what the engine has prepared, the run and its hooks.

    Attributes:
        task: The prepared task.
        optimizers: Optimizers in the task's order.
        device, precision: Device and precision of the computation.
        ranks: Data-parallel ranks.
        rank: Rank of this process, for messages.
        context: Context of each forward, such as autocast. It is entered again for each forward. May be None.
        scaler: Loss scaler, or None.
        training_call, eval_call: `call(name, *args)` runs a step in the engine. None calls the task's method.
        inputs: Precision to which batches are cast.
        gradients: Gradients of the task.
        run: The run that is passed to hooks.
        hooks: Registered hooks.
        sink: Buffer of logged metrics. It also receives the current micro-batch.
        counts_items: Weigh micro-batches by `TaskModule.num_items` if the task defines it.
        synchronize: Called before each of several micro-batches with True if its backward must average gradients over
            ranks. Also called with True after a step was discarded. May be None.
        placed: Function that is called with each batch on the device, and returns the batch. May be None.
        split: Called with each batch before its transfer to the device. Returns this rank's part of the batch's
            sequences, and the part's weight in the mean over the ranks of the batch (1 on average). None if sequences
            are not split.
        finish: Called with the index of the last batch, and True after an optimizer step, False after an evaluation
            step. May be None.
        enter: Called with the new `Phase` of a step with manual optimization.
    """

    task: TaskModule
    optimizers: list[Optimizer]
    device: torch.device
    precision: Precision
    ranks: DataRanks
    rank: int
    context: AbstractContextManager[Any] | None
    scaler: torch.amp.GradScaler | None
    training_call: Callable[..., Any] | None
    eval_call: Callable[..., Any] | None
    inputs: Precision
    gradients: Gradients
    run: Run
    hooks: HookTable
    sink: MetricBuffer
    counts_items: bool = True
    synchronize: Callable[[bool], None] | None = None
    placed: Callable[[Any], Any] | None = None
    split: Callable[[Any], tuple[Any, float]] | None = None
    finish: Callable[[int, bool], None] | None = None
    enter: Callable[[Phase], None] = _ignore


class Step(ABC):
    """Runner of the training and evaluation steps of a task.

    Args:
        parts: See `StepParts`.

    Attributes:
        parts: The argument.
        scaler: Loss scaler, or None.
        stepped: True if the last group counts as a step although `forward_backward` returned no loss. With manual
            optimization: an optimizer has stepped, or the task has none. With torchft: other replicas have completed
            the step. Otherwise False.
    """

    def __init__(self, parts: StepParts) -> None:
        task = parts.task
        self.parts = parts
        self.task = task
        self.run = parts.run
        self.hooks = parts.hooks
        self.sink = parts.sink
        self.optimizers = parts.optimizers
        self.scaler = parts.scaler
        self.stepped = False
        self._scale = None if parts.scaler is None else LossScale(parts.scaler)
        self._context = parts.context
        self._synchronize = parts.synchronize
        self._transfer = make_transfer(
            task, getattr(parts.run, "datamodule", None), parts.device, parts.inputs, parts.placed
        )
        self._finish = parts.finish
        # The task's `num_items`. None if the task does not define it, and with manual optimization.
        self._items: Callable[[Any], Any] | None = None
        # A manual step runs backward inside, which must not run in the engine's call.
        training_call = parts.training_call if task.automatic_optimization else None
        self._training_step = bind_step(task, "training_step", training_call)
        # By name, created at the first use.
        self._eval_steps: dict[str, Callable[..., Any]] = {}
        # Handles of hooks that `close` removes.
        self._handles: list[Any] = []
        # The last group and its loss, for a closure of `Optimizer.step`. Set by `forward_backward`, which stores the
        # group only if a closure is needed. None after the step.
        self._group: Group | None = None
        self._loss: torch.Tensor | None = None
        # Index of the last micro-batch. Set by `forward_backward`.
        self._last_idx = 0
        # True if `grad` has no gradients of an earlier step, so that a backward may accumulate. Set to False at the end
        # of `forward_backward`, and to True when the gradients are freed.
        self._zeroed = True
        self._needs_closure = False
        self._changed_metrics = ExitStack()
        # Torchmetrics synchronizes over all processes, which is right if all of them are data-parallel ranks.
        if parts.ranks.size < parts.ranks.processes.world_size:
            self._changed_metrics.enter_context(metrics_over(self._metric_objects(), parts.ranks))
        gradients = parts.gradients
        # None if there is nothing to complete, which saves a call in each step.
        self._complete = gradients.complete if overrides(gradients, "complete", Gradients) else None

    # Training

    def forward_backward(self, group: Group) -> torch.Tensor | None:  # noqa: C901 -- each function costs a call a step
        """Run every micro-batch of one optimizer step forward and backward.

        Afterwards, the gradients are unscaled. They are the mean over all micro-batches of all ranks (see
        `TaskModule.num_items`). Collective with several processes.

        Returns:
            The weighted loss on the device (0-dim, detached, not reduced). Its mean over ranks is the mean over all
            micro-batches of all ranks. None with manual optimization, or if all micro-batches were skipped.

        Raises:
            TaskError: The loss cannot be trained on.
            SkipRestOfEpoch: A hook ended the epoch.
        """
        hooks = self.hooks
        sink = self.sink
        num = len(group.batches)
        # Weights of this rank's parts of sequences in the means of their batches. None if sequences are not split.
        shares: list[float] | None = None
        # Weights of the micro-batches' losses in the group's loss. None weighs each by 1 / num.
        weights: Sequence[Any] | None
        if self.parts.split is not None:
            shares = self._split(group, self.parts.split)
            weights = group.weights  # of the parts, with the weights of their items
        elif self._items is not None:
            weights = self._weigh_items(group)
        else:
            weights = group.weights
        output: Any = None
        total: torch.Tensor | None = None
        skipped: list[int] = []
        for i, batch in enumerate(group.batches):
            idx = group.first_idx + i
            group.index = i  # read by `end_batch`
            # Free the last output and batch before the next forward, which needs the memory.
            output = None
            group.last_batch = None
            if self._transfer is not None:
                batch = self._transfer(batch)
            sink.batch = batch
            is_padding = group.weights is not None and not group.weights[i]
            if is_padding:
                sink.share = 0.0
            else:
                sink.share = None if shares is None else shares[i]
            for hook in hooks.on_train_batch_start:
                if hook(self.run, self.task, batch, idx) == -1:
                    raise SkipRestOfEpoch
            if num > 1 and self._synchronize is not None:
                # All-reduce only in the last micro-batch: earlier ones would send gradients that are not complete yet.
                self._synchronize(i == num - 1)
            weight = None if weights is None else weights[i]
            # Forward and backward also run for padding, because the other ranks wait in collectives.
            if is_padding:
                output, loss = self._run_padding(batch, idx, weight, num)
            else:
                output, loss = self._run_batch(batch, idx, weight, num)
            if loss is None:
                skipped.append(i)
            else:
                total = loss if total is None else total + loss
            if hooks.on_train_batch_end:
                group.last_output = outputs_of(output)
                group.last_batch = sink.batch
                if i < num - 1:  # the loop calls it for the last one, after the optimizer step
                    self.end_batch(group)
        if skipped:
            total = self._skip_batches(skipped, group, weights, total)
        sink.batch = None
        # First complete the gradients, then unscale them: an overflow on one rank is then seen on all ranks.
        if self._complete is not None and total is not None:
            self._complete()
        if self._scale is not None and total is not None:
            for optimizer in self.optimizers:
                self._scale.unscale(optimizer)
        if self._needs_closure:
            self._group = group
        self._loss = total
        self._last_idx = idx
        self._zeroed = False
        return total

    def _split(self, group: Group, split: Callable[[Any], tuple[Any, float]]) -> list[float]:
        """Replace a group's micro-batches by this rank's parts. Return the weight of each part."""
        num = len(group.batches)
        weights: Sequence[Any]
        if self._items is not None:
            weights = self._weigh_items(group)  # counts the items of complete batches
        elif group.weights is not None:
            weights = group.weights
        else:
            weights = [1 / num] * num
        parts = []
        shares = []
        for batch in group.batches:
            part, share = split(batch)
            parts.append(part)
            shares.append(share)
        group.batches = parts
        group.weights = [weight * share for weight, share in zip(weights, shares, strict=True)]
        return shares

    @abstractmethod
    def _run_batch(self, batch: Any, idx: int, weight: Any, num: int) -> tuple[Any, torch.Tensor | None]:
        """Run one of `num` micro-batches. Return the step's output and its weighted loss, detached."""

    def _run_padding(self, batch: Any, idx: int, weight: Any, num: int) -> tuple[Any, torch.Tensor | None]:
        """Run a micro-batch of padding. Metric objects do not count it."""
        with self._without_counting():
            return self._run_batch(batch, idx, weight, num)

    def _without_counting(self) -> AbstractContextManager[None]:
        """Return a context that restores the metric objects of the task and of callbacks."""
        return same_metric_objects(self._metric_objects())

    def _metric_objects(self) -> list[nn.Module]:
        """Return the metric objects of the task and of callbacks, including metrics within them."""
        modules = list(self.task.modules())
        for callback in self.run.callbacks:
            for value in vars(callback).values():
                if is_metric_object(value):
                    modules.extend(value.modules())
        return [module for module in modules if is_metric_object(module)]

    def end_batch(self, group: Group) -> None:
        """Call the hooks at the end of micro-batch `group.index`.

        `forward_backward` calls this for all micro-batches but the last. The loop calls it for the last one, after the
        optimizer step.
        """
        self.sink.batch = group.last_batch  # it determines the weight of logged values
        is_padding = group.weights is not None and not group.weights[group.index]
        idx = group.first_idx + group.index
        counting = self._without_counting() if is_padding else nullcontext()
        with counting:
            for hook in self.hooks.on_train_batch_end:
                hook(self.run, self.task, group.last_output, group.last_batch, idx)
        self.sink.batch = None

    def _weigh_items(self, group: Group) -> Sequence[Any]:
        """Return the weights of the micro-batches of a task with `num_items`. Collective.

        Example: rank 0 has micro-batches of 3 and 5 items, and rank 1 of 8 and 0 items. The total is 16. The weights on
        rank 0 are 2 × 3/16 and 2 × 5/16, because backward averages the gradients over 2 ranks.
        """
        parts = self.parts
        assert self._items is not None  # checked by the caller
        counts = stack_counts([self._items(batch) for batch in group.batches], parts.device)
        if group.weights is not None:  # padding has no weight
            is_real = torch.tensor([float(weight > 0) for weight in group.weights], dtype=counts.dtype)
            counts = counts * is_real.to(parts.device)
        total = parts.ranks.sum(counts.sum())
        dtype = torch.float32
        if parts.precision.param_dtype is torch.float64:
            dtype = torch.float64
        return item_weights(counts, total, parts.ranks.size, dtype).unbind()

    @abstractmethod
    def _skip_batches(self, skipped: list[int], group: Group, weights: Any, total: Any) -> Any:
        """Correct loss and gradients of a group for its skipped micro-batches.

        Args:
            skipped: Their indices in the group.
            group: The group.
            weights: Weights of all micro-batches. None for equal weights.
            total: Sum of the weighted losses. None if all micro-batches were skipped.

        Returns:
            The corrected loss, or None.
        """

    @abstractmethod
    def optimizer_step(self, clip: GradientClip | None) -> torch.Tensor | None:
        """Clip, step every optimizer and free the gradients.

        Returns:
            The total gradient norm before clipping (0-dim, on the device), or None if it was not computed.
        """

    # Access to gradients before the optimizer step

    def held_gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parameters with this rank's shards of their gradients. Not collective."""
        for parameter in parameters_of(self.optimizers):
            if parameter.grad is None:
                continue
            shard = local_part(parameter.grad)
            if shard.is_sparse:
                shard = shard.coalesce().values()
            yield parameter, shard

    def discard_gradients(self) -> None:
        """Free the gradients of a discarded step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self._group = None
        self._loss = None
        self._zeroed = True
        if self._synchronize is not None:
            self._synchronize(True)
        self.parts.gradients.free(parameters_of(self.optimizers))

    def discard_step(self) -> None:
        """Discard a step after `forward_backward`, without changing the loss scale."""
        self.discard_gradients()
        if self._scale is not None:
            self._scale.discard()

    # Evaluation

    def to_device(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Return a batch on this process's device. Calls the transfer hooks of the task or data module."""
        self.sink.share = None
        if self.parts.split is not None:
            batch, self.sink.share = self.parts.split(batch)
        if self._transfer is None:
            return batch
        return self._transfer(batch, dataloader_idx)

    def evaluate(self, name: str | Callable[..., Any], batch: Any, idx: int, dataloader_idx: int | None = None) -> Any:
        """Run an evaluation step on one batch, which is on the device.

        Args:
            name: `"validation_step"`, `"test_step"`, `"predict_step"`, or a function to call instead of a step.
            batch: The batch.
            idx: Index of the batch.
            dataloader_idx: Passed to steps that accept it. Default: None, for a single loader.

        Returns:
            The result of the step.
        """
        call = self.parts.eval_call
        step: Callable[..., Any] | None
        if not isinstance(name, str):
            step = name if call is None else partial(call, name)
        else:
            step = self._eval_steps.get(name)
            if step is None:  # the first call
                step = bind_step(self.task, name, call)
                self._eval_steps[name] = step
        with self._context or nullcontext():
            if dataloader_idx is None:
                output = step(batch, idx)
            else:
                output = step(batch, idx, dataloader_idx)
        if self._finish is not None:
            self._finish(idx, False)
        return output

    def close(self) -> None:
        """Remove the hooks from the optimizers, and restore the communication of metric objects."""
        self._changed_metrics.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []


class AutomaticStep(Step):
    """A step with automatic optimization."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts)
        task = parts.task
        optimizers = parts.optimizers
        if parts.counts_items:
            self._items = own_hook(task, "num_items", TaskModule)
        self._backward: Callable[[torch.Tensor], Any] | None = None
        if overrides(task, "backward", TaskModule):
            self._backward = task.backward
        self._own_step = own_hook(task, "optimizer_step", TaskModule)
        self._own_zero = own_hook(task, "optimizer_zero_grad", TaskModule)
        self._own_clip = own_hook(task, "configure_gradient_clipping", TaskModule)
        self._needs_closure = need_closure(optimizers, parts.precision)
        # True if `optimizer.step()` is called without arguments.
        self._plain_step = self._own_step is None and self._scale is None and not self._needs_closure
        # Gradients are freed right after the step, which saves their memory during the next forward. If a hook or the
        # task may read them, they are freed where Lightning does it: between the first training_step and its backward.
        if parts.hooks.on_before_zero_grad or self._own_zero is not None:
            self._zero_late = True
        else:
            self._zero_late = any(overrides(optimizer, "zero_grad", Optimizer) for optimizer in optimizers)
        self._zeroed = not self._zero_late and all(p.grad is None for p in parameters_of(optimizers))

    def _run_batch(self, batch: Any, idx: int, weight: Any, num: int) -> tuple[Any, torch.Tensor | None]:
        if self._context is None:
            output = self._training_step(batch, idx)
        else:
            with self._context:
                output = self._training_step(batch, idx)
        if not self._zeroed:
            self._zero_gradients(idx)
        is_valid_loss = type(output) is torch.Tensor and output.requires_grad and not output.dim()
        if is_valid_loss:  # the usual case, without a call of `loss_of`
            loss = output
        else:
            loss = loss_of(output, type(self.task).__name__)
        if loss is None:
            return output, None
        if weight is not None:
            loss = loss * weight
        elif num > 1:
            loss = loss / num
        # With automatic optimization, the scale changes in `optimizer_step`, not at the first loss of a group.
        scaled: torch.Tensor = loss
        if self._scale is not None:
            scaled = self._scale.scale(loss, starts_group=False)
        for hook in self.hooks.on_before_backward:
            hook(self.run, self.task, scaled)
        if self._backward is None:
            scaled.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        else:
            self._backward(scaled)
        for hook in self.hooks.on_after_backward:
            hook(self.run, self.task)
        return output, loss.detach()

    def _skip_batches(self, skipped: list[int], group: Group, weights: Any, total: Any) -> Any:
        # The other ranks average gradients in a backward that this rank has not run.
        if self.parts.ranks.size > 1:
            raise without_loss(type(self.task).__name__, self.parts.rank)
        if total is None:
            return None
        # 1 of 4 micro-batches was skipped: the sums of the other 3, divided by 4, grow by 4/3 to their mean.
        factor = growth_without(skipped, len(group.batches), weights)
        scale_gradients(parameters_of(self.optimizers), factor)
        return total * factor

    def optimizer_step(self, clip: GradientClip | None) -> torch.Tensor | None:
        norm = None
        if clip is not None or self._own_clip is not None:
            norm = self._clip(clip)
        for optimizer in self.optimizers:
            if self._plain_step:
                optimizer.step()
            elif self._own_step is not None:
                optimizer_of_task: Any = optimizer
                if self._scale is not None:
                    optimizer_of_task = ScaledOptimizer(optimizer, self._scale)
                self._own_step(self.run.state.epoch, self._last_idx, optimizer_of_task, self._closure())
            elif self._scale is not None:
                self._scale.step(optimizer)
            else:
                optimizer.step(closure=self._closure())
        if self._scale is not None:
            self._scale.end_step()
        # Free the micro-batches and the loss.
        self._group = None
        self._loss = None
        if not self._zero_late:
            for optimizer in self.optimizers:
                zero_gradients(optimizer)
            self._zeroed = True
        if self._finish is not None:
            self._finish(self._last_idx, True)
        return norm

    def _clip(self, clip: GradientClip | None) -> torch.Tensor | None:
        """Clip by the task's `configure_gradient_clipping` if it is defined, also if clipping is disabled.

        Return None if the norm is not known: with the task's own clipping, and for clipping by value.
        """
        if self._own_clip is not None:
            value = None if clip is None else clip.value
            algorithm = None if clip is None else clip.algorithm
            for optimizer in self.optimizers:
                self._own_clip(optimizer, value, algorithm)
            return None
        if clip is None:
            return None
        return self.parts.gradients.clip(parameters_of(self.optimizers), clip)

    def _closure(self) -> Callable[[], Any]:
        """Return a closure for `Optimizer.step`. The first call returns the current loss. Later calls recompute it."""
        group = self._group  # None if no optimizer requires a closure
        loss = self._loss
        is_called_again = False

        def closure() -> Any:
            nonlocal is_called_again
            if not is_called_again or group is None:
                is_called_again = True
                return loss
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self._zeroed = True
            with torch.enable_grad():
                return self.forward_backward(group)

        return closure

    def _zero_gradients(self, idx: int) -> None:
        """Free the gradients of the last step, between the first `training_step` of a group and its backward."""
        epoch = self.run.state.epoch
        for optimizer in self.optimizers:
            for hook in self.hooks.on_before_zero_grad:
                hook(self.run, self.task, optimizer)
            if self._own_zero is not None:
                self._own_zero(epoch, idx, optimizer)
            else:
                optimizer.zero_grad()
        self._zeroed = True
