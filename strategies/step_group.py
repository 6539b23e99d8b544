"""The micro-batches of one optimizer step in a user-written loop, and the weights of their losses.

Terms: a block is the context of one micro-batch, such as the body of `with accelerator.accumulate()`. Sums are the
accumulated gradients of the earlier micro-batches of a group. A round is one batch on each data-parallel rank.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trainwright.core.errors import TaskError, TrainwrightWarning
from trainwright.core.host.device_types import properties
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.passes import FULL, Habit, MicroBatch, Pass
from trainwright.strategies.steps.gradients import Gradients, item_weights, stack_counts


class LoopGradients:
    """The accumulated gradients of a loop's models, as groups use them.

    Args:
        gradients: The engine's gradient operations.
        ranks: Data-parallel ranks.
        device: Device of the computation.
        parameters: Function that returns the parameters with accumulated gradients of models. `()`: of all models.
        scales_loss: Losses are scaled for fp16. Default: False.
        averages_each: Every backward averages gradients over ranks, not only the last one of a group. Default: False.

    Attributes:
        unit: Divisor of sums over items, a power of two. Without loss scaling, it is 1. With it, None before the first
            call of `agree_on_unit`.
    """

    def __init__(
        self,
        gradients: Gradients,
        ranks: DataRanks,
        device: torch.device,
        parameters: Callable[[Sequence[nn.Module]], list[torch.Tensor]],
        *,
        scales_loss: bool = False,
        averages_each: bool = False,
    ) -> None:
        self.averages_each = averages_each
        self.gradients = gradients
        self.ranks = ranks
        self.device = device
        self.parameters = parameters
        # Sums over items may overflow fp16, so that they are divided by an estimate of the count.
        self.unit: float | None = None if scales_loss else 1.0
        self._warns_of_no_items = True

    @property
    def num_averaged(self) -> int:
        """Number of ranks over which the last backward of a group averages gradients."""
        return self.ranks.size if self.gradients.averaged else 1

    @property
    def num_readers(self) -> int:
        """Number of different batches that are averaged in a round."""
        return self.ranks.num_readers if self.gradients.averaged else 1

    def agree_on_unit(self, count: float | torch.Tensor) -> float:
        """Return the divisor of sums over items, equal on every rank.

        Under fp16, the first call is collective and waits for the device of the count. Otherwise, the divisor is 1.
        """
        if self.unit is None:
            counts = self.ranks.gather_integers([int(count)])
            largest = max(1, *(row[0] for row in counts))
            # A power of two near the first count. A division by it is exact.
            self.unit = 2.0 ** round(math.log2(largest))
        return self.unit

    def warn_of_no_items(self) -> None:
        """Warn once of a group without any item."""
        if self._warns_of_no_items:
            self._warns_of_no_items = False
            warnings.warn(
                "backward() was given num_items=0 in every micro-batch of an optimizer step: its gradient is zero, and "
                "nothing is learned from it. Pass the number of items that the loss is the mean over.",
                TrainwrightWarning,
                stacklevel=7,
            )


class StepGroup:
    """The micro-batches of one optimizer step of some models.

    Losses before the last micro-batch are divided by the expected divisor of the group. The right divisor is known in
    the last micro-batch. If it differs, because the group is short or a rank had padding, or because losses are weighed
    by items, the accumulated gradients are multiplied by the ratio. For example, the data end after 3 of 4
    micro-batches, and the loss is the mean over micro-batches: the first two losses were divided by 4, so that their
    gradients are multiplied by 4/3.

    Args:
        models: The models. `()`: all models.
        loop: See `LoopGradients`.

    Attributes:
        models: The models. Referenced, so that no other model gets the same id; see `StepGroups`.
        habit: Predicts which micro-batch is the last one of a pass.
        position: Number of the current micro-batch in the group (1-based). 0 before the first one.
        is_complete: An optimizer step follows the current micro-batch. Also True before the first micro-batch.
        has_failed: The last micro-batch of the group raised an error, so that no optimizer step followed.
        is_short: The group is complete, because its loader has ended, with fewer micro-batches than usual.
        num_losses: Number of losses that were weighed since the last optimizer step.
        lacks_backward: The current micro-batch is the last one, and only earlier ones have run a backward so far.
        micro_batch: The loader's information about the current micro-batch.
        factor_after_backward: Factor for the gradients after the last backward. None if they need no correction.
    """

    def __init__(self, models: Sequence[nn.Module], loop: LoopGradients) -> None:
        self.models = models
        self._loop = loop
        self.habit = Habit()
        self.position = 0
        self.is_complete = True
        self.has_failed = False
        self.is_short = False
        self.micro_batch = FULL
        self.num_losses = 0
        self.lacks_backward = False
        self.factor_after_backward: Any = None
        # Arguments of the last `begin`.
        self._num_steps = 1
        self._is_mean = False
        # Divisor of the losses before the last micro-batch, set in the first one.
        self._divisor: float = 1
        # Micro-batches of padding in the group so far: of all ranks, or of this rank if gradients are not averaged.
        self._num_missing = 0
        # True if the current micro-batch is not the first one of the group with a loss. Set when it begins.
        self._has_sums = False
        # True once the sums of this group were multiplied, which must happen only once.
        self._is_corrected = False
        # Number of items in this rank's micro-batches before the last one. None if no loss had a count so far, and
        # after the last one.
        self._num_items: Any = None
        # Position of the newest micro-batch with a count. 0 if there is none.
        self._counted_at = 0

    @property
    def is_open(self) -> bool:
        """True if micro-batches have begun that no optimizer step has used."""
        return self.has_failed or not self.is_complete or self.lacks_backward

    @property
    def has_unfinished_sums(self) -> bool:
        """True if there are gradients that were neither averaged over ranks nor divided by the number of items."""
        if not self.num_losses:
            return False
        has_run_last_backward = self.is_complete and not self.lacks_backward
        if has_run_last_backward:
            return False
        is_local = self._loop.num_averaged > 1 and not self._loop.averages_each
        return is_local or self._num_items is not None

    def begin(self, reading: Pass | None, num_steps: int, *, ends_with_data: bool, is_mean: bool) -> None:
        """Begin the next micro-batch of the group, or the first one of the next group.

        Args:
            reading: The pass to which the micro-batch belongs. None if it does not come from a prepared loader.
            num_steps: Micro-batches of a group.
            ends_with_data: The last micro-batch of a pass completes a short group.
            is_mean: Divide losses by the number of micro-batches in a short group instead of by `num_steps`.
        """
        if self.lacks_backward:
            # A loop that leaves the last micro-batch before its backward did not step: the next step uses all losses.
            num_losses = self.num_losses
            num_items = self._num_items
            self.reset()
            self.num_losses = num_losses
            self._num_items = num_items
        elif self.is_complete:
            self.reset()
        self.is_complete = False
        self._num_steps = num_steps
        self._is_mean = is_mean
        self.position += 1
        self._has_sums = self.num_losses > 0
        is_last = False
        self.micro_batch = FULL
        if reading is not None:
            is_expected = self.habit.begin(reading)
            if not is_expected:
                _warn_of_late_micro_batch()
            is_last = ends_with_data and self.habit.is_last(reading, num_steps)
            self.micro_batch = reading.batch(self.habit.batch_number())
            # Padding is delivered last, so that the newest batch of the pass shows whether there is any.
            has_padding = self.micro_batch.is_padding or reading.batch().is_padding
            if has_padding and self.habit.is_ambiguous:
                _warn_of_ambiguous_padding()
            if self.micro_batch is not FULL:
                self._count_missing(self.micro_batch)
        if self.position == 1:
            self._divisor = num_steps
            if is_mean and ends_with_data and reading is not None:
                self._divisor = self._expected_divisor(reading)
        is_full = self.position >= num_steps
        self.is_complete = is_last or is_full
        self.is_short = is_last and not is_full
        self.lacks_backward = self.is_complete and self._has_sums

    def begin_alone(self, micro_batch: MicroBatch, num_steps: int) -> None:
        """Begin a group in a loop without blocks. Its losses are divided by `num_steps`, as in Accelerate.

        The caller sets `is_complete`.
        """
        self.reset()
        self.position = 1
        self._num_steps = num_steps
        self._divisor = num_steps
        self._is_mean = False
        self.micro_batch = micro_batch
        self._count_missing(micro_batch)

    def continue_alone(self, micro_batch: MicroBatch) -> None:
        """Begin the next micro-batch of a group that the loop determines by `set_sync_gradients`."""
        self.position += 1
        self._has_sums = self.num_losses > 0
        self.micro_batch = micro_batch
        self._count_missing(micro_batch)

    def reset(self) -> None:
        """Discard the micro-batches of the group. The next one is the first of a group."""
        self.position = 0
        self.is_complete = True
        self.has_failed = False
        self.is_short = False
        self._num_missing = 0
        self._counted_at = 0  # `drop_sums` keeps it: the current micro-batch continues there
        self._is_corrected = False
        self.drop_sums()
        self.factor_after_backward = None

    def drop_sums(self) -> None:
        """Discard the losses of earlier micro-batches, because their gradients were freed."""
        self.num_losses = 0
        self.lacks_backward = False
        self._has_sums = False
        self._num_items = None

    def _count_missing(self, micro_batch: MicroBatch) -> None:
        """Count the padding of a round: of this rank alone, or of all ranks if gradients are averaged."""
        if not self._loop.gradients.averaged:
            self._num_missing += micro_batch.is_padding
        elif micro_batch.num_real is not None:
            self._num_missing += self._loop.num_readers - micro_batch.num_real

    def _expected_divisor(self, reading: Pass) -> float:
        """Return the expected number of micro-batches of the group. Called in its first micro-batch."""
        num_left = self.habit.num_left(reading, self._num_steps)
        if num_left is None:  # the length of the data is unknown
            return self._num_steps
        return min(self._num_steps, 1 + num_left)

    @property
    def _final_divisor(self) -> float:
        """Divisor of the losses of a complete group: the gradient is the mean over the real micro-batches."""
        divisor = self.position if self._is_mean else self._num_steps
        if not self._num_missing:
            return divisor
        # 4 ranks with 2 micro-batches each, of which 2 are padding: the mean over 6 losses, not over 8.
        num_all = self._loop.num_readers * self.position
        return divisor * max(num_all - self._num_missing, 1) / num_all

    # Weights

    def divide(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss divided by the number of micro-batches in the group. 0 for padding.

        The last micro-batch also corrects the sums if their divisor was not the right one.

        Raises:
            TaskError: Earlier micro-batches of the group have counts of items.
        """
        if self._num_items is not None:
            self.refuse_plain()
        divisor = self._divisor
        if self.is_complete:
            final = self._final_divisor
            # If the sums can be corrected only after the backward, this loss gets the same divisor as the sums, because
            # the correction multiplies all gradients.
            if final != divisor and self._correct_sums(divisor / final):
                divisor = final
        if self.micro_batch.is_padding:
            return loss * 0.0
        if divisor == 1:
            return loss
        return loss / divisor

    def refuse_plain(self) -> None:
        """Raise a TaskError if an earlier micro-batch of the group has counted items."""
        if self._num_items is not None:
            raise TaskError(
                "backward() was called without num_items= in a step whose earlier micro-batches had it: the mean over "
                "all items is not known then. Pass num_items= for every micro-batch of the step, or for none."
            )

    def weigh(self, loss: torch.Tensor, num_items: object) -> torch.Tensor:
        """Return the loss, a mean over `num_items` items, with its weight in the mean over all items of the group.

        Before the last micro-batch, accumulated gradients are sums over items. The last one sums the counts over ranks,
        which is collective.

        Raises:
            TaskError: `num_items` is not a count, is passed twice for one micro-batch, or was not passed before.
        """
        count = _checked_count(num_items)
        if self.micro_batch.is_padding:
            count = 0
        if self._num_items is None and self.num_losses > 1:
            raise TaskError(
                "backward() was called with num_items= in a step whose earlier losses had none: the mean over all "
                "items is not known then. Pass num_items= for every micro-batch of the step, or for none."
            )
        if self._counted_at == self.position:
            raise TaskError(
                "backward(num_items=…) was called twice for one micro-batch: its items would count twice. Add the "
                "losses, each of them a mean over the items, and call backward once."
            )
        total = count if self._num_items is None else self._num_items + count
        unit = self._loop.agree_on_unit(count)
        self._counted_at = self.position
        if not self.is_complete:
            self._num_items = total
            # The mean over items times their number is the sum over items.
            weight = _as_factor(count, unit, loss)
        else:
            has_earlier_items = self._num_items is not None
            self._num_items = None
            weight, factor_of_sums = self._weight_and_factor(count, total, unit, loss)
            if has_earlier_items and not self._correct_sums(factor_of_sums):
                # All losses then get their weights after the last backward, so this one is a sum like the others.
                weight = _as_factor(count, unit, loss)
        weighed: torch.Tensor = loss * weight
        return weighed

    def _correct_sums(self, factor: float | torch.Tensor) -> bool:
        """Multiply the accumulated gradients, once per group. The last micro-batch calls this before its backward.

        Return True if they are correct now. Return False if the engine can multiply them only after the last backward;
        `factor_after_backward` is then set.
        """
        if self._is_corrected or not self._has_sums:
            return True
        if not self._loop.gradients.scales_sums:
            self.factor_after_backward = factor
            return False
        self._is_corrected = True
        self._loop.gradients.scale(self._loop.parameters(self.models), factor)
        return True

    def correct_after_backward(self) -> None:
        """Multiply the gradients by `factor_after_backward`, which must not be None."""
        factor = self.factor_after_backward
        self.factor_after_backward = None
        self._is_corrected = True
        self._loop.gradients.scale(self._loop.parameters(self.models), factor)

    def _weight_and_factor(self, count: Any, total: Any, unit: float, loss: torch.Tensor) -> tuple[Any, Any]:
        """Return the weight of the last micro-batch's loss, and the factor for the sums of the earlier ones.

        For example, one rank has micro-batches of 2 and 6 items, and the unit is 1. The weight of the last loss, a mean
        over 6 items, is 6/8. The sum over the first 2 items is multiplied by 1/8. Collective if gradients are averaged.

        Args:
            count: Items of the last micro-batch on this rank.
            total: Items of all micro-batches of the group on this rank.
            unit: Number by which the sums were divided.
            loss: The last loss.
        """
        loop = self._loop
        num_ranks = loop.num_averaged
        if num_ranks == 1 and not isinstance(total, torch.Tensor):
            if total == 0:
                loop.warn_of_no_items()
            divisor = max(total, 1)  # a step without any item has a gradient of zero
            return count / divisor, unit / divisor
        # On the device, so that the host does not wait for counts.
        items_of_loss, items_of_group = stack_counts([count, total], loop.device).unbind()
        items_of_ranks = items_of_group
        if num_ranks > 1:
            items_of_ranks = loop.ranks.sum(items_of_group.clone())
        dtype = _dtype_of_weights(loss)
        # Times the number of ranks, because backward averages gradients over them.
        weight = item_weights(items_of_loss, items_of_ranks, num_ranks, dtype)
        factor_of_sums = item_weights(unit, items_of_ranks, num_ranks, dtype)
        return weight, factor_of_sums


def _checked_count(num_items: object) -> Any:
    """Return a count of items, which may be a tensor with one element."""
    if isinstance(num_items, torch.Tensor):
        if num_items.numel() == 1 and num_items.dtype is not torch.bool:
            return num_items.detach()
        got = f"a tensor of shape {tuple(num_items.shape)}"
    elif isinstance(num_items, (int, float)) and not isinstance(num_items, bool) and 0 <= num_items < math.inf:
        return num_items
    else:
        got = repr(num_items)
    raise TaskError(
        f"num_items={got}: expected the number of items that the loss is the mean over (tokens, samples), of at least "
        "0, as a number or a tensor of one element."
    )


def _dtype_of_weights(loss: torch.Tensor) -> torch.dtype:
    return torch.float64 if loss.dtype is torch.float64 else torch.float32


def _as_factor(count: float | torch.Tensor, unit: float, loss: torch.Tensor) -> Any:
    """Return `count / unit`, without waiting for the device of a count."""
    if not isinstance(count, torch.Tensor):
        return count / unit
    is_asynchronous = properties(loss.device.type).copies_beside
    moved = count.to(device=loss.device, dtype=_dtype_of_weights(loss), non_blocking=is_asynchronous)
    return moved.reshape(()) / unit


def _warn_of_late_micro_batch() -> None:
    warnings.warn(
        "a micro-batch began after the last batch of its loader had been trained, as it seemed: the loop holds batches "
        "back. The last group of this pass was divided into two optimizer steps. In the next passes, the group ends "
        "with the last batch that is held back.",
        TrainwrightWarning,
        stacklevel=5,
    )


def _warn_of_ambiguous_padding() -> None:
    warnings.warn(
        "this rank has run out of data, and the loop has begun fewer micro-batches than it has received batches. The "
        "other batches are taken as skipped. If the loop holds them back instead, the last of them get the weight 0 in "
        "place of the repeated ones. Begin each micro-batch before the next batch is requested, or pass "
        "DataLoaderConfiguration(even_batches=True).",
        TrainwrightWarning,
        stacklevel=5,
    )
