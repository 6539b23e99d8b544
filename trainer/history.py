"""What a Trainer remembers from one stage to the next, and a checkpoint from one process to the next."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Any

from trainwright.core.state import SkippedData, TrainState


@dataclass(slots=True)
class History:
    """The run so far.

    Attributes:
        state: where training stands.
        seed: of the order of the data; None until the processes have joined.
        run_id: tells this run's checkpoints from those of others in the same folder; kept across a resume.
        skipped_batches: training data that was consumed and changed no weight, in the order of its coming.
        num_rollbacks: the run has gone back to a checkpoint so many times.
        abandoned: when the checkpoints of branches that were left had been written.
        skipped_in_a_row: so many groups have been skipped since the last one that was not.
        open_metrics: for each data rank, the aggregates of an epoch that a bound has left open.
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
        """Return a copy, with a clock of its own, that a trial may change."""
        return replace(self, state=state, skipped_batches=list(self.skipped_batches), abandoned=set(self.abandoned))

    def left_out(self) -> dict[str, Any]:
        """Return what a resumed run must know of what was left out, JSON-able; for a checkpoint."""
        return {
            "skipped": [skipped.to_dict() for skipped in self.skipped_batches],
            "num_rollbacks": self.num_rollbacks,
            "abandoned": sorted(self.abandoned),
        }

    def add_left_out(self, saved: dict[str, Any]) -> None:
        """Add what `left_out` returned to what is known: going back forgets nothing."""
        for item in saved.get("skipped", []):
            skipped = SkippedData(**item)
            if skipped not in self.skipped_batches:
                self.skipped_batches.append(skipped)
        self.num_rollbacks = max(self.num_rollbacks, saved.get("num_rollbacks", 0))
        self.abandoned.update(saved.get("abandoned", []))
