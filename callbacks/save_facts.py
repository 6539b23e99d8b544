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
    present: frozenset[str]  # names of what lies in the folder (see `names_in`)
    claimed: frozenset[str] = frozenset()  # of those, names that another process is using
    index_holds: bool = True  # names of an index that was loaded mean what lies in the folder
    stretch_end: float | None = None  # how far the run is, in the unit of `keep_every`, when a stretch has passed

    @property
    def values(self) -> dict[str, float]:
        """The metrics, with `epoch` and `step`. Values that the user logged under these names take precedence, as
        integers.
        """
        counters = {"epoch": self.epoch, "step": self.step}
        logged = {name: int(self.metrics[name]) for name in counters if math.isfinite(self.metrics.get(name, math.nan))}
        return {**self.metrics, **counters, **logged}


NO_FACTS = SaveFacts(0, 0, {}, frozenset())
