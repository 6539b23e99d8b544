"""State of a run that stages of a Trainer share and that checkpoints keep."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Any

from trainwright.core.state import SkippedData, TrainState


@dataclass(slots=True)
class History:
    """The history of a run.

    Attributes:
        state: training progress.
        seed: seed of the data order; None until the processes have started.
        run_id: identifies this run's checkpoints in a shared folder. A resume keeps it.
        skipped_batches: training data that was read without changing weights, in order.
        num_rollbacks: number of rollbacks.
        abandoned: creation times of checkpoints that a rollback has discarded.
        skipped_in_a_row: number of consecutive skipped steps.
        open_metrics: aggregated metrics of an unfinished epoch, for each data rank.
    """

    state: TrainState
    seed: int | None
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    skipped_batches: list[SkippedData] = field(default_factory=list)
    num_rollbacks: int = 0
    abandoned: set[str] = field(default_factory=set)
    skipped_in_a_row: int = 0
    open_metrics: list[dict[str, Any]] = field(default_factory=list)

    def for_trial(self, state: TrainState) -> History:
        """Return a copy with the given progress, for a trial."""
        return replace(self, state=state, skipped_batches=list(self.skipped_batches), abandoned=set(self.abandoned))

    def skipped_data(self) -> dict[str, Any]:
        """Return the skipped data and rollbacks for a checkpoint, serializable as JSON."""
        return {
            "skipped": [skipped.to_dict() for skipped in self.skipped_batches],
            "num_rollbacks": self.num_rollbacks,
            "abandoned": sorted(self.abandoned),
        }

    def add_skipped_data(self, saved: dict[str, Any]) -> None:
        """Merge the result of `skipped_data`. Existing entries are kept."""
        for item in saved.get("skipped", []):
            skipped = SkippedData(**item)
            if skipped not in self.skipped_batches:
                self.skipped_batches.append(skipped)
        self.num_rollbacks = max(self.num_rollbacks, saved.get("num_rollbacks", 0))
        self.abandoned.update(saved.get("abandoned", []))
