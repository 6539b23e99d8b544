"""Groups of micro-batches in a user-written loop: where a group begins and ends.

A group is the micro-batches of one optimizer step (see `StepGroup`). Only micro-batches that a loop begins are counted,
because a loop may train a batch in several parts, fetch several batches before it trains the first one, or skip
batches. A prepared loader reports in a `Pass` what it delivers.

Terms: a block is the context of one micro-batch, such as the body of `with accelerator.accumulate()`. Sums are the
accumulated gradients of the earlier micro-batches of a group.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError, TaskError, TrainwrightWarning
from trainwright.strategies.passes import FULL, MicroBatch, Pass
from trainwright.strategies.step_group import LoopGradients, StepGroup
from trainwright.strategies.steps.gradients import parameters_of


class StepGroups:
    """The groups of a user-written loop: one for each set of models that the loop trains alternately.

    Args:
        loop: See `LoopGradients`.
        num_steps: Micro-batches of a group.
        ends_with_data: The last micro-batch of a pass completes a short group. False: the next pass continues it.
        short_group: `"mean"` divides the losses of a short group by its number of micro-batches. `"steps"` divides them
            by `num_steps`. None is `"steps"`, with one warning if `warns` is True.
        warns: See `short_group`. Default: False.

    Attributes:
        num_steps: Micro-batches of a group. May be changed.
        sync_gradients: An optimizer step follows the current micro-batch. Set by `begin`, by `end` of an inner block,
            and by `set_sync_gradients`. True between passes.
        has_set_sync: `set_sync_gradients` was called.
        warns: True until the warning of a short group.
    """

    def __init__(
        self,
        loop: LoopGradients,
        num_steps: int,
        *,
        ends_with_data: bool = True,
        short_group: Literal["steps", "mean"] | None = None,
        warns: bool = False,
    ) -> None:
        self._loop = loop
        self.num_steps = num_steps
        self.ends_with_data = ends_with_data
        self.short_group = short_group
        self.sync_gradients = True
        self.warns = warns and short_group is None
        # By the ids of their models, in order: `accumulate(a, b)` and `accumulate(b, a)` count their own micro-batches.
        self._groups: dict[tuple[int, ...], StepGroup] = {}
        # The group of the newest block. After the block, it remains until the next loss, which may be computed or
        # weighed outside of the block. None before the first block, and after such a loss.
        self._current: StepGroup | None = None
        self._is_inside = False  # True within a block
        self._outer: list[StepGroup | None] = []  # groups of the blocks around the newest one, the innermost last
        # The innermost pass and its number of delivered batches when the newest block began. If the number has changed
        # since then, the loop has received a batch that belongs to no block yet.
        self._delivered_at_block: tuple[Pass | None, int] = (None, 0)
        self._alone = StepGroup((), loop)  # of backwards in a loop without blocks
        self._weighing = self._alone  # the group of the newest loss
        self._passes: list[Pass] = []  # the innermost one is the last
        # The newest training pass, if it was read to its end. A loop may train its last batches afterwards.
        self._ended: Pass | None = None
        self.has_set_sync = False
        # The next micro-batch of a loop that has called `set_sync_gradients` is the first one of a group.
        self._begins_own_group = True

    # Passes over loaders

    @property
    def reading(self) -> Pass | None:
        """The pass of the innermost prepared loader that is being read, or None."""
        return self._passes[-1] if self._passes else None

    def begin_pass(self, reading: Pass) -> None:
        """Record that a loader is being read, until `end_pass`."""
        self._synchronize_between_passes()
        self._passes.append(reading)
        if reading.trains:
            self._ended = None

    def end_pass(self, reading: Pass) -> None:
        """Record the end of a pass, which the loop may have left early."""
        self._passes = [other for other in self._passes if other is not reading]
        if reading.is_exhausted and reading.trains:
            self._ended = reading
        self._synchronize_between_passes()

    def _synchronize_between_passes(self) -> None:
        if not self._passes:  # a pass that ended within a group does not delay the steps of the next loop
            self.sync_gradients = True

    @property
    def micro_batch(self) -> MicroBatch:
        """Information about the micro-batch of the newest block, or about a batch that was received since."""
        reading = self.reading
        if reading is None:
            return FULL
        if self._current is not None and self._delivered_at_block == (reading, reading.num_delivered):
            return self._current.micro_batch
        return reading.batch()

    # Micro-batches

    def begin(self, models: Sequence[nn.Module]) -> None:
        """Begin the block of a micro-batch, which trains `models` (all models if it is empty). `end` must follow.

        If the last micro-batch of a group raised an error, the gradients of its group are freed with a warning when the
        next group begins.
        """
        if self._is_inside:
            self._outer.append(self._current)
        key = tuple(map(id, models))
        group = self._groups.get(key)
        if group is None:
            group = StepGroup(models, self._loop)
            self._groups[key] = group
        self._current = group
        self._is_inside = True
        if group.has_failed:
            self._free(group)
        reading = self._passes[-1] if self._passes else self._pass_before(group)
        group.begin(
            reading,
            self.num_steps,
            ends_with_data=self.ends_with_data,
            is_mean=self.short_group == "mean",
        )
        self.sync_gradients = group.is_complete
        if self._passes:
            innermost = self._passes[-1]
            self._delivered_at_block = (innermost, innermost.num_delivered)

    def end(self, *, has_failed: bool) -> None:
        """End the block of a micro-batch. `has_failed` is True if the block has raised an error."""
        if has_failed and self._current is not None:
            # After an error in an earlier micro-batch, the group continues.
            self._current.has_failed = self._current.is_complete
        if self._outer:
            outer = self._outer.pop()
            self._current = outer
            if outer is not None:
                self.sync_gradients = outer.is_complete
        else:
            self._is_inside = False

    def _pass_before(self, group: StepGroup) -> Pass | None:
        """Return the pass that has ended if the next micro-batch of a group belongs to it, or else None."""
        ended = self._ended
        if ended is not None and group.habit.holds_batches_of(ended, self.num_steps):
            return ended
        return None

    def _free(self, group: StepGroup) -> None:
        """Free the gradients of a failed group, with a warning if there are any."""
        num_micro_batches = group.position
        group.reset()
        if self._loop.gradients.free(self._loop.parameters(group.models)):
            warnings.warn(
                f"the last of {num_micro_batches} micro-batch(es) of a group raised an error, so that no optimizer "
                "step followed. The gradients of the group were freed, because this micro-batch starts a new group.",
                TrainwrightWarning,
                stacklevel=4,
            )

    def discard_open(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Discard the sums of open groups, whose `grad` the caller frees, and gradients that are not in `grad`.

        Called when gradients are set to zero. While a loader is read, the group of the newest micro-batch continues,
        without the losses before it. Otherwise, the next micro-batch starts a new group.

        Args:
            parameters: Returns the parameters whose gradients are set to zero. Called only if there may be sums,
                because this method is called in every step.
        """
        if self._passes:
            group = self._current
            if group is not None and group.lacks_backward and self._overlaps(group, parameters()):
                if self._loop.gradients.accumulates_elsewhere:
                    self._loop.gradients.free(parameters())
                group.drop_sums()
            return
        if self._loop.gradients.accumulates_elsewhere:
            self._loop.gradients.free(parameters())
        for group in self._groups.values():
            if group.is_open and self._overlaps(group, parameters()):
                group.reset()

    def drop_open(self) -> None:
        """Free the gradients of all groups that no optimizer step has used. The next micro-batch starts a new group."""
        for group in self._groups.values():
            if group.is_open:
                self._loop.gradients.free(self._loop.parameters(group.models))
                group.reset()

    def _overlaps(self, group: StepGroup, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether some parameters have accumulated gradients of a group's models."""
        # By id, because tensors compare by their elements.
        return not set(map(id, parameters)).isdisjoint(map(id, self._loop.parameters(group.models)))

    def refuse_unfinished(self, optimizer: Optimizer) -> None:
        """Raise an error before a step with gradients that are not averaged or not divided by the number of items.

        Raises:
            TaskError: A group of the optimizer's parameters has not run its last backward.
        """
        if self.has_set_sync:
            return
        for group in self._groups.values():
            if group.has_unfinished_sums and self._overlaps(group, parameters_of([optimizer])):
                raise TaskError(
                    "optimizer.step() was called without a backward in the last micro-batch of its group, which "
                    "averages the gradients over processes and divides them by the number of items. If a loop was left "
                    "within a group, continue the group in the next pass, or call optimizer.zero_grad() to drop its "
                    "gradients. If a block is left without a backward, leave it before optimizer.step()."
                )

    def num_held(self, reading: Pass) -> int:
        """Return the number of batches that the loop has received in a pass, but not begun to train.

        With several groups, a batch counts as begun once one of them has begun it. 0 in a loop that begins no
        micro-batches of this loader in blocks.
        """
        numbers = []
        for group in self._groups.values():
            number = group.habit.num_held(reading)
            if number is not None:
                numbers.append(number)
        return min(numbers, default=0)

    def refuse_open(self) -> None:
        """Raise an error before a save if a group is not complete, because its gradients are not saved.

        Raises:
            ConfigurationError: A group is not complete.
        """
        if self.has_set_sync or not any(group.is_open for group in self._groups.values()):
            return
        raise ConfigurationError(
            "save_state() was called within a group of micro-batches, whose gradients are not saved. Call it after "
            "optimizer.step(), where accelerator.sync_gradients is True. If a loop was left within a group, call "
            "optimizer.zero_grad() first, which drops its gradients."
        )

    # Groups that the loop determines itself

    def set_sync_gradients(self, value: bool) -> None:
        """Set whether an optimizer step follows the current micro-batch. Overrides the blocks.

        From then on, losses are not divided. A loop that determines its groups must weigh the losses, and may read
        several batches before the first backward.
        """
        self.has_set_sync = True
        self.sync_gradients = value

    @property
    def holds_back(self) -> bool:
        """True if `set_sync_gradients` was called with False: no optimizer step follows."""
        return self.has_set_sync and not self.sync_gradients

    @property
    def averages_now(self) -> bool:
        """True if the backward of the current micro-batch averages gradients over ranks."""
        return self.sync_gradients or self._loop.averages_each

    # Weights

    def weigh(self, loss: torch.Tensor, num_items: object = None) -> torch.Tensor:
        """Return a loss with its weight in the group; see `StepGroup.divide`, and with items `StepGroup.weigh`.

        Args:
            loss: The loss of the current micro-batch.
            num_items: Number of items over which the loss is the mean. Default: None, the mean over micro-batches.
        """
        group = self._current if self._is_inside else None
        if group is None:
            if num_items is None and self._is_plain:
                self._weighing = self._alone
                return loss
            group = self._group_after_block()
        self._weighing = group
        group.num_losses += 1
        group.lacks_backward = False
        if num_items is not None:
            return group.weigh(loss, num_items)
        if self.has_set_sync:
            group.refuse_plain()
            return loss  # a loop that determines its groups also weighs their losses
        if group.is_short and self.warns:
            self._warn_of_short_group(group.position)
        return group.divide(loss)

    @property
    def _is_plain(self) -> bool:
        """True if each batch is a group, and the current one is not padding: the usual loop, which must be fast."""
        if self.num_steps > 1 or self._current is not None or self.has_set_sync:
            return False
        return not self._passes or self._passes[-1].batch() is FULL

    def _group_after_block(self) -> StepGroup:
        """Return the group of the block that has just ended, or else a group of one micro-batch."""
        if self._current is not None:
            group = self._current
            self._current = None  # for one loss only
            return group
        if self._begins_own_group or not self.has_set_sync:
            self._alone.begin_alone(self.micro_batch, self.num_steps)
        else:
            self._alone.continue_alone(self.micro_batch)
        self._alone.is_complete = self.sync_gradients
        self._begins_own_group = self.sync_gradients
        return self._alone

    @property
    def starts_group(self) -> bool:
        """True if the newest loss is of the first micro-batch of its optimizer step."""
        return self._weighing.num_losses <= 1

    def complete(self) -> None:
        """Finish the gradients after the last backward of a group. Collective in engines that reduce them here."""
        self._loop.gradients.complete()
        if self._weighing.factor_after_backward is not None:
            self._weighing.correct_after_backward()

    def _warn_of_short_group(self, num_micro_batches: int) -> None:
        self.warns = False
        steps = self.num_steps
        warnings.warn(
            f"the last group of this pass has {num_micro_batches} micro-batch(es) of {steps}, but its losses are "
            f"divided by gradient_accumulation_steps={steps}, as in Accelerate, so its gradient is too small. For the "
            f"mean over the micro-batches, pass GradientAccumulationPlugin(num_steps={steps}, short_group='mean'). "
            "For the mean over all items, call accelerator.backward(loss, num_items=n). To keep the gradient and "
            "silence this warning, pass short_group='steps'.",
            TrainwrightWarning,
            stacklevel=4,
        )


class MicroBatchBlock:
    """Context of one micro-batch in a user-written loop.

    Args:
        groups: The groups of the loop.
        models: Models that are trained in the context. Empty: all models.
        no_sync: Returns a context in which the backward of models averages no gradients over ranks.
    """

    __slots__ = ("_groups", "_models", "_no_sync", "_no_sync_context")

    def __init__(
        self,
        groups: StepGroups,
        models: Sequence[nn.Module],
        no_sync: Callable[[Sequence[nn.Module]], AbstractContextManager[Any]],
    ) -> None:
        self._groups = groups
        self._models = models
        self._no_sync = no_sync
        # The context of `no_sync` within this block. None if the backward averages gradients.
        self._no_sync_context: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        self._groups.begin(self._models)
        if self._groups.averages_now:
            return
        try:
            self._no_sync_context = self._no_sync(self._models)
            self._no_sync_context.__enter__()
        except BaseException:
            self._groups.end(has_failed=True)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._no_sync_context is not None:
                self._no_sync_context.__exit__(kind, error, trace)
        finally:
            self._groups.end(has_failed=error is not None)
