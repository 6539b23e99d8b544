"""Gradient accumulation in user-written loops: weights of losses, and the micro-batches that optimizers follow."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.tree import iterate_tensors
from trainwright.strategies.steps.gradients import Gradients


@dataclass(slots=True)
class GradientAccumulationPlugin:
    """Options of gradient accumulation in an `Accelerator`. `short_group` is not in Hugging Face's Accelerate.

    Args:
        num_steps: Micro-batches of one optimizer step. Default: None, which is 1.
        adjust_scheduler: Accepted without effect, because schedules advance with optimizer steps. Default: True.
        sync_with_dataloader: End each pass over the data with an optimizer step, even if the last group is short.
            False: the next pass continues the group, so that no group is short. Default: True.
        sync_each_batch: Average gradients over processes after every micro-batch instead of after the last one of a
            step. Default: False.
        short_group: Divisor of the loss in `backward(loss)` if the last group of a pass has fewer than `num_steps`
            micro-batches. `"steps"`: `num_steps`, as in Accelerate. `"mean"`: the number of micro-batches in the group.
            Default: None, which is `"steps"`, with a warning at the first short group.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    short_group: Literal["steps", "mean"] | None = None

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            check_steps("num_steps", self.num_steps)
        if self.short_group not in (None, "steps", "mean"):
            raise ConfigurationError(
                f"short_group={self.short_group!r}: expected 'steps' (divide by num_steps), 'mean' (divide by the "
                "number of micro-batches in the group) or None ('steps', with a warning)."
            )
        if self.short_group is not None and not self.sync_with_dataloader:
            raise ConfigurationError(
                f"short_group={self.short_group!r} with sync_with_dataloader=False has no effect: the next pass over "
                "the loader completes a short group. Remove short_group."
            )


def check_steps(name: str, value: object) -> int:
    """Return `value`. Raise a ConfigurationError with the argument's `name` if it is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name}={value!r}: write a whole number of at least 1.")
    return value


@dataclass(slots=True)
class _Position:
    """The position of a micro-batch in its group: the micro-batches of one optimizer step.

    Attributes:
        weight: Factor of the micro-batch's loss. None: the loss is divided by `divisor`. 0 for padding, which a rank
            receives if it runs out of data before other ranks.
        divisor: Divisor of the losses in the group.
        num_missing: Number of micro-batches by which a short last group is shorter than `num_steps`.
        starts_group: The micro-batch is the first of its optimizer step.
        ends_group: An optimizer step follows the micro-batch.
        group: Index of the group, counted over all passes.
        carried: Number of the group's micro-batches that belong to an earlier pass, which ended within the group.
        position: Number of the micro-batch in its group (1-based), including carried micro-batches.
        num_rows: Number of samples of a micro-batch that may not be full. None for a full micro-batch.
    """

    weight: float | None = None
    divisor: int = 1
    num_missing: int = 0
    starts_group: bool = True
    ends_group: bool = True
    group: int = 0
    carried: int = 0
    position: int = 1
    num_rows: int | None = None


_POSITION_FIELDS = [each.name for each in fields(_Position)]
_MOST_RECEIVED = 256


@dataclass(slots=True)
class Place(_Position):
    """The position of a prepared loader in its data, and of the current micro-batch in its group.

    Attributes:
        ends_data: No micro-batch follows in this pass.
        fresh: Sets of models that were not trained on the carried micro-batches. Divisors of their losses do not
            include the carried micro-batches.
        num_batches: Number of micro-batches of this pass that the loop has received, including skipped micro-batches.
        received: Micro-batches that the loop has received but not begun, each with its position. Used if steps have
            several micro-batches.
        fetched_ahead: True if the loop had received further micro-batches when the newest micro-batch began.
    """

    ends_data: bool = False
    fresh: set[tuple[int, ...]] = field(default_factory=set)
    num_batches: int = 0
    received: list[tuple[weakref.ref[torch.Tensor] | None, list[Any]]] = field(default_factory=list)
    fetched_ahead: bool = False

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Return the position without references to micro-batches."""
        return None, {each.name: getattr(self, each.name) for each in fields(self)} | {"received": []}

    def receive(self, batch: object) -> None:
        """Record that the loop receives a micro-batch at the current position."""
        tensor = next(map(weakref.ref, iterate_tensors(batch)), None)
        if self.fetched_ahead or len(self.received) == _MOST_RECEIVED:
            self.received.clear()  # the loop skips some, or begins none
            self.fetched_ahead = False
        self.received.append((tensor, [getattr(self, name) for name in _POSITION_FIELDS]))

    def begin(self) -> None:
        """Set the position to that of the received micro-batch that begins now.

        A loop may fetch all micro-batches of a group before it begins the first one. A received micro-batch whose
        tensors the loop has freed counts as skipped.
        """
        received = self.received
        while len(received) > 1 and (received[0][0] is None or received[0][0]() is None):
            del received[0]
        _, values = received.pop(0)
        self.fetched_ahead = bool(received)
        for name, value in zip(_POSITION_FIELDS, values, strict=True):
            setattr(self, name, value)


class Accumulation:
    """State of gradient accumulation, shared by the loaders, optimizers and schedulers of a loop.

    A prepared loader reports the length of each group, including a short last one. In loops over other iterables, this
    object counts micro-batches itself.

    Args:
        num_steps: Micro-batches of one optimizer step.
        plugin: Options of accumulation.
        warns: Warn about the first short group if the plugin's `short_group` is None.
        gradients: The engine's gradient operations.
    """

    # From oldest to newest, by number. Weak, so that an Accelerator that the script has dropped is freed.
    _living: ClassVar[weakref.WeakValueDictionary[int, Accumulation]] = weakref.WeakValueDictionary()
    _numbers: ClassVar[itertools.count[int]] = itertools.count()

    @staticmethod
    def newest() -> Accumulation:
        """Return the accumulation of the newest Accelerator that exists, or a new one without an Accelerator."""
        living = list(Accumulation._living.values())
        if living:
            return living[-1]
        return Accumulation(1, GradientAccumulationPlugin(), warns=False, gradients=Gradients(torch.device("cpu")))

    def __init__(
        self, num_steps: int, plugin: GradientAccumulationPlugin, *, warns: bool, gradients: Gradients
    ) -> None:
        Accumulation._living[next(Accumulation._numbers)] = self
        self.num_steps = num_steps
        self.plugin = plugin
        self.sync_with_dataloader, self.short_group = plugin.sync_with_dataloader, plugin.short_group
        self.sync_gradients = True
        self.in_micro_batch = False  # within a block of `accumulate`
        self.models: Sequence[nn.Module] = ()  # that the present micro-batch trains; none: all
        self.num_micro_batches = 0  # that have begun, over all loops
        self.num_groups = 0  # that loaders have begun, over all passes
        self._passes: list[tuple[Any, Place]] = []
        self._open: dict[tuple[int, ...], tuple[int, int, int]] = {}  # models → group, position, divisor: no step yet
        self._num_counted = 0
        self._set_before: bool | None = None  # the value before the newest `set_sync_gradients`; None: never called
        self.warns = warns and plugin.short_group is None
        self.gradients = gradients

    @property
    def place(self) -> Place | None:
        """Position of the innermost prepared loader that is being read, or None."""
        return self._passes[-1][1] if self._passes else None

    @property
    def loader(self) -> Any:
        """The innermost prepared loader that is being read, or None."""
        return self._passes[-1][0] if self._passes else None

    def divide(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the weight of the current micro-batch in its group, by default 1 / `num_steps`."""
        if self._set_before is not None:
            return loss  # who determines the groups also weighs their losses
        if not self._passes:
            return loss if self.num_steps == 1 else loss / self.num_steps
        place = self._passes[-1][1]
        if place.received and not self.in_micro_batch:
            place.begin()
        if place.num_missing and self.warns:
            self._warn(place.num_missing)
        if place.fresh and tuple(map(id, self.models)) in place.fresh:
            loss = loss * (place.divisor / (place.divisor - place.carried))
        if place.weight is not None:
            return loss * place.weight
        return loss if place.divisor == 1 else loss / place.divisor

    def _warn(self, num_missing: int) -> None:
        self.warns = False
        steps = self.num_steps
        warnings.warn(
            f"the last group of this pass has {steps - num_missing} micro-batch(es) of {steps}, but its losses are "
            f"divided by gradient_accumulation_steps={steps}, as in Accelerate, so its gradient is too small. For the "
            f"mean over the micro-batches, pass GradientAccumulationPlugin(num_steps={steps}, short_group='mean'). "
            "For the mean over all items, call accelerator.backward(loss, num_items=n). To keep the gradient and "
            "silence this warning, pass short_group='steps'.",
            TrainwrightWarning,
            stacklevel=4,
        )

    @property
    def starts_group(self) -> bool:
        """True if the current micro-batch is the first of its optimizer step."""
        if self._set_before is not None:
            return self._set_before
        place = self.place
        if place is not None:
            if place.fresh and place.position == place.carried + 1:
                return place.starts_group or tuple(map(id, self.models)) in place.fresh
            return place.starts_group
        return self.num_steps == 1 or self._num_counted == 0 or self._num_counted % self.num_steps == 1

    def set_sync_gradients(self, value: bool) -> None:
        """Set whether an optimizer step follows the current micro-batch. Overrides `begin_micro_batch`.

        From then on, losses are not divided. A loop that determines its groups must weigh the losses, and may read
        several micro-batches before the first backward.
        """
        self._set_before, self.sync_gradients = self.sync_gradients, value

    @property
    def holds_back(self) -> bool:
        """True if `set_sync_gradients` was called with False: no optimizer step follows."""
        return self._set_before is not None and not self.sync_gradients

    def begin_pass(self, loader: object) -> Place:
        """Record that a loader is being read, until `end_pass`. Return its position.

        The first group continues an incomplete group of an earlier pass, unless another loader is being read.
        """
        place = Place()
        if self._open and not self._passes:
            carried = max(position for _, position, _ in self._open.values())
            place.carried = carried if carried < self.num_steps else 0
        self._rest()
        self._passes.append((loader, place))
        return place

    def _rest(self) -> None:
        if not self._passes:  # a pass that ended within a group does not delay the steps of the next loop
            self.sync_gradients = True

    def end_pass(self, place: Place) -> None:
        """Record the end of a pass, complete or not."""
        self._passes = [one for one in self._passes if one[1] is not place]
        self._rest()

    def discard_open_groups(self, parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Free gradients, and let the next pass start a new group. No effect while a prepared loader is read."""
        if not self._passes:
            self.gradients.free(parameters())
            self._open.clear()

    def refuse_open_group(self) -> None:
        """Raise an error before a save if a pass ended within a group, because the group's gradients are not saved."""
        if self._open and not self._passes:
            raise ConfigurationError(
                "save_state() was called after a loop ended within a group of micro-batches. The gradients of the "
                "group would be lost. Call optimizer.step() and optimizer.zero_grad() first, or "
                "optimizer.zero_grad() alone to drop them."
            )

    def begin_micro_batch(
        self, models: Sequence[nn.Module] = (), parameters: Callable[[], Iterable[torch.Tensor]] = tuple
    ) -> None:
        """Start a micro-batch and determine whether an optimizer step follows.

        If an earlier group is incomplete and this micro-batch does not continue it, the gradients of `parameters()`
        are freed with a warning. `models` are the models that the micro-batch trains. Empty: all models.
        """
        self.num_micro_batches += 1
        place = self.place
        if place is None:
            self._num_counted += 1
            self.sync_gradients = self._num_counted % self.num_steps == 0
        else:
            if place.received:
                place.begin()
            self.sync_gradients = place.ends_group
            if place.ends_group and not self._open and not place.carried:
                return
        key = tuple(map(id, models))
        left = self._open.pop(key, None)
        if place is None or left is None or left[0] != place.group:
            continues = left is not None and place is not None and left[1:] == (place.carried, place.divisor)
            if left is not None and not continues:
                self._free(parameters(), left[1])
            if place is not None and place.carried and not continues:
                place.fresh.add(key)
        if place is not None:
            self._open[key] = (place.group, place.position, place.divisor)

    def end_micro_batch(self, models: Sequence[nn.Module]) -> None:
        """Record that a micro-batch ended without an error. The last micro-batch of a group completes the group."""
        if self.sync_gradients and self._open:
            self._open.pop(tuple(map(id, models)), None)

    def _free(self, parameters: Iterable[torch.Tensor], num_micro_batches: int) -> None:
        if self.gradients.free(parameters):
            warnings.warn(
                f"a loop was left after {num_micro_batches} micro-batch(es) of a group, without an optimizer step. "
                "Their gradients were freed, because this micro-batch starts a new group. Leave a loop only where "
                "accelerator.sync_gradients is True.",
                TrainwrightWarning,
                stacklevel=6,
            )


class GradientState:
    """State of gradient accumulation in a loop, with Accelerate's names. Each read returns the current value.

    `GradientState()` shows the state of the newest Accelerator. Without an Accelerator, every micro-batch is followed
    by an optimizer step.

    Args:
        gradient_accumulation_plugin: The expected options. Default: None, which accepts all options.
        accumulation: The state to show. Default: None, which is that of the newest Accelerator.

    Raises:
        ConfigurationError: The options differ from those of `gradient_accumulation_plugin`.
    """

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        *,
        accumulation: Accumulation | None = None,
    ) -> None:
        self._accumulation = accumulation or Accumulation.newest()
        if gradient_accumulation_plugin not in (None, self._accumulation.plugin):
            raise ConfigurationError(
                "GradientState does not change gradient accumulation. Pass the plugin in "
                "Accelerator(gradient_accumulation_plugin=…)."
            )

    @staticmethod
    def _reset_state() -> None:
        """Let the next `GradientState()` start a new state."""
        Accumulation._living.clear()

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The fields of the `GradientAccumulationPlugin`."""
        return asdict(self._accumulation.plugin)

    @property
    def adjust_scheduler(self) -> bool:
        """`adjust_scheduler` of the `GradientAccumulationPlugin`."""
        return self._accumulation.plugin.adjust_scheduler

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether an optimizer step follows; see `Accumulation.set_sync_gradients`."""
        self._accumulation.set_sync_gradients(sync_gradients)

    @property
    def num_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self._accumulation.num_steps

    @property
    def sync_with_dataloader(self) -> bool:
        """True if a pass over the data ends with an optimizer step."""
        return self._accumulation.sync_with_dataloader

    @property
    def sync_gradients(self) -> bool:
        """True if an optimizer step follows the current micro-batch."""
        return self._accumulation.sync_gradients

    @property
    def active_dataloader(self) -> Any:
        """The innermost prepared loader that is being read, or None."""
        return self._accumulation.loader

    @property
    def in_dataloader(self) -> bool:
        """True while a prepared loader is being read."""
        return self._accumulation.loader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """True at the last micro-batch of the prepared loader that is being read. False outside of prepared loaders."""
        place = self._accumulation.place
        return place is not None and place.ends_data

    @property
    def remainder(self) -> int:
        """Samples of a pass's last micro-batch on all ranks. 0 if it is full. -1 if unknown or no loader is read."""
        return -1 if self._accumulation.loader is None else self._accumulation.loader.remainder
