"""Weights of micro-batches by items: a step's gradient is the mean over the items of all micro-batches and ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from trainwright.accelerator.accumulation import Accumulation
from trainwright.core.errors import TaskError, TrainwrightWarning
from trainwright.core.host.device_types import properties
from trainwright.strategies.engine import Engine
from trainwright.strategies.steps.gradients import stack_counts


class ItemCounts:
    """Item counts of optimizer steps, separately for each set of models that a loop trains alternately.

    A group is the micro-batches of one step. Before its last micro-batch, accumulated gradients are sums over items. In
    the last one, the counts are summed over micro-batches and ranks. The accumulated sums are divided by this total in
    place, and the last loss is weighted by its fraction of the total, before gradients are averaged over ranks.

    Args:
        accumulation: State of the loop's gradient accumulation.
        engine: The engine, which sums counts over ranks.
        scaled: Losses are scaled for fp16. To avoid overflow, sums are then divided by an estimate of the count.
    """

    def __init__(self, accumulation: Accumulation, engine: Engine, *, scaled: bool) -> None:
        self._accumulation = accumulation
        self._engine = engine
        # Models → items that their current step has consumed on this rank, and the number of its last micro-batch.
        self._steps: dict[tuple[int, ...], tuple[Any, int]] = {}
        self._unit: float | None = None if scaled else 1.0
        self._warns = True  # of a step without items
        self._due: Any = None  # a factor for the gradients after the last backward

    def weigh(
        self, loss: torch.Tensor, num_items: object, parameters: Callable[[], Iterable[torch.Tensor]]
    ) -> torch.Tensor:
        """Return the weighted loss. Collective in the last micro-batch of a group.

        Args:
            loss: Mean over the items of the micro-batch.
            num_items: A number, or a tensor of one element. Does not wait for the tensor's device.
            parameters: Function that returns the parameters with accumulated gradients of this step.
        """
        accumulation = self._accumulation
        count = _checked(num_items)
        place = accumulation.place
        if place is not None and place.weight == 0:  # padding
            count = 0
        key = tuple(map(id, accumulation.models))
        step = self._steps.get(key)
        if step is not None and step[1] == accumulation.num_micro_batches:
            raise TaskError(
                "backward(num_items=…) was called twice for one micro-batch: its items would count twice. Add the "
                "losses, each of them a mean over the items, and call backward once."
            )
        if accumulation.starts_group:  # a group that was left is over
            step = None
        total = count if step is None else step[0] + count
        if self._unit is None:
            self._unit = self._agreed_unit(count)
        if not accumulation.sync_gradients:
            self._steps[key] = (total, accumulation.num_micro_batches)
            weight = self._as_factor(count, self._unit, loss)
        else:
            self._steps.pop(key, None)
            weight, share = self._shares(count, total, loss)
            if step is not None and not self._engine.gradients.scales_sums:
                self._due, weight = share, self._as_factor(count, self._unit, loss)
            elif step is not None:
                self._engine.gradients.scale(parameters(), share)
        weighed: torch.Tensor = loss * weight
        return weighed

    def complete(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Divide a step's gradients after its last backward, if the engine cannot divide them before it."""
        share, self._due = self._due, None
        if share is not None:
            self._engine.gradients.scale(parameters(), share)

    @property
    def has_open_steps(self) -> bool:
        """True if a step that counts items is not complete."""
        return bool(self._steps)

    def refuse_plain(self) -> None:
        """Raise a TaskError if the current step has counted items before."""
        if self._steps.get(tuple(map(id, self._accumulation.models))) and not self._accumulation.starts_group:
            raise TaskError(
                "backward() was called without num_items= in a step whose earlier micro-batches had it: the mean over "
                "all items is not known then. Pass num_items= for every micro-batch of the step, or for none."
            )

    def _shares(self, count: float | torch.Tensor, total: float | torch.Tensor, loss: torch.Tensor) -> tuple[Any, Any]:
        """Return the weight of the last micro-batch, and the factor for the sums of the earlier ones."""
        engine, unit = self._engine, self._unit or 1.0
        alone = engine.data_ranks.size == 1 or not engine.gradients.averaged
        if alone and not isinstance(total, torch.Tensor):
            if total == 0 and self._warns:
                self._warns = False
                warnings.warn(
                    "backward() was given num_items=0 in every micro-batch of an optimizer step: its gradient is zero, "
                    "and nothing is learned from it. Pass the number of items that the loss is the mean over.",
                    TrainwrightWarning,
                    stacklevel=4,
                )
            return count / max(total, 1), unit / max(total, 1)  # a step without any item has a gradient of zero
        own, of_group = stack_counts([count, total], engine.device).unbind()
        everyone = (of_group if alone else engine.data_ranks.sum(of_group.clone())).clamp(min=1)
        dtype = torch.float64 if loss.dtype is torch.float64 else torch.float32
        world = 1 if alone else engine.data_ranks.size  # ranks average their gradients
        return (own * world / everyone).to(dtype), (world * unit / everyone).to(dtype)

    def _as_factor(self, count: float | torch.Tensor, unit: float, loss: torch.Tensor) -> Any:
        if not isinstance(count, torch.Tensor):
            return count / unit
        dtype = torch.float64 if loss.dtype is torch.float64 else torch.float32
        beside = properties(loss.device.type).copies_beside
        return count.to(device=loss.device, dtype=dtype, non_blocking=beside).reshape(()) / unit

    def _agreed_unit(self, count: float | torch.Tensor) -> float:
        """Return a power of two near the first count, equal on every rank. A division by it is exact."""
        counts = self._engine.data_ranks.gather_integers([int(count)])
        return 2.0 ** round(math.log2(max(1, *(row[0] for row in counts))))


def _checked(num_items: object) -> Any:
    if isinstance(num_items, torch.Tensor) and num_items.numel() == 1 and num_items.dtype is not torch.bool:
        return num_items.detach()
    if isinstance(num_items, (int, float)) and not isinstance(num_items, bool) and 0 <= num_items < math.inf:
        return num_items
    got = f"a tensor of shape {tuple(num_items.shape)}" if isinstance(num_items, torch.Tensor) else repr(num_items)
    raise TaskError(
        f"num_items={got}: expected the number of items that the loss is the mean over (tokens, samples), of at least "
        "0, as a number or a tensor of one element."
    )
