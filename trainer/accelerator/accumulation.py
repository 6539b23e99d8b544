"""Where a hand-written loop stands: what the present micro-batch weighs, and whether an optimizer steps after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Place:
    """The place of a prepared loader in its data.

    Attributes:
        weight: of the present micro-batch in its optimizer step, times the number of ranks; 0 for padding, which a
            rank gets that has run out of data before others.
        starts_group: the first one of its optimizer step.
        ends_group: the optimizer step follows.
        ends_data: no micro-batch follows in this pass.
        num_batches: micro-batches of this pass that the loop has been given, skipped ones too.
    """

    weight: float = 1.0
    starts_group: bool = True
    ends_group: bool = True
    ends_data: bool = False
    num_batches: int = 0


class Accumulation:
    """What a loop's parts (loaders, models, optimizers, schedulers) have to know of each other.

    A prepared loader knows how many micro-batches an optimizer step has, also its last and short one. A loop over
    anything else is counted here.

    Args:
        num_steps: micro-batches of one optimizer step.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.sync_gradients = True
        self._passes: list[tuple[Any, Place]] = []
        self._num_counted = 0

    @property
    def place(self) -> Place | None:
        """Of the loader that is being read, the innermost one; None outside of prepared loaders."""
        return self._passes[-1][1] if self._passes else None

    @property
    def weight(self) -> float:
        """What the present micro-batch weighs in its optimizer step."""
        place = self.place
        return 1 / self.num_steps if place is None else place.weight

    @property
    def starts_group(self) -> bool:
        """Whether the present micro-batch is the first one of its optimizer step."""
        place = self.place
        return self._num_counted % self.num_steps <= 1 if place is None else place.starts_group

    def begin_pass(self, loader: Any) -> Place:
        """Note that a loader is being read, until `end_pass`."""
        place = Place()
        self._rest()
        self._passes.append((loader, place))
        return place

    def _rest(self) -> None:
        if not self._passes:  # a pass that was left within a group does not hold the next loop back
            self.sync_gradients = True

    def end_pass(self, place: Place) -> None:
        """Note that a pass is over, or was left."""
        self._passes = [one for one in self._passes if one[1] is not place]
        self._rest()

    def begin_micro_batch(self) -> None:
        """Find out whether an optimizer steps after the micro-batch that begins."""
        place = self.place
        if place is not None:
            self.sync_gradients = place.ends_group
            return
        self._num_counted += 1
        self.sync_gradients = self._num_counted % self.num_steps == 0
