"""Values of rank 0 at the time of a save, by which all ranks make the same decision."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveFacts:
    """State of a run at a moment when checkpoints may be requested, broadcast from rank 0 so that all ranks make the
    same decision.
    """

    epoch: int  # 0-based, for names
    step: int  # completed optimizer steps
    metrics: dict[str, float]  # the latest values of all metrics
    present: frozenset[str]  # names in the folder of the checkpoints (see `names_in`), and in the remote folder
    claimed: frozenset[str] = frozenset()  # names in `present` that another process uses
    index_is_valid: bool = True  # False if a loaded index belongs to another folder
    keep_every_progress: float | None = None  # progress in the unit of `keep_every` if one of its intervals has ended

    @property
    def values(self) -> dict[str, float]:
        """The metrics, with `epoch` and `step` as integers.

        Finite values that the user logged under these two names take precedence. They are truncated to integers.
        """
        values: dict[str, float] = {**self.metrics, "epoch": self.epoch, "step": self.step}
        for name in ("epoch", "step"):
            logged = self.metrics.get(name, math.nan)
            if math.isfinite(logged):
                values[name] = int(logged)
        return values


# Placeholder of the other ranks, which the broadcast replaces.
NO_FACTS = SaveFacts(0, 0, {}, frozenset())
