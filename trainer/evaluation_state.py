"""Progress of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainwright.trainer.data import EvaluationKind


@dataclass(slots=True)
class EvaluationState:
    """Progress of an evaluation.

    Attributes:
        kind: `"validate"`, `"test"` or `"predict"` while an evaluation runs, else None.
        sanity_checking: the validation before training is running.
        batches_done: evaluation batches completed by this rank.
        num_batches: batches of each loader of the current evaluation, on this rank.
        own_objects: metric objects of the task that had no update when the running validation of a fit began. What they
            hold belongs to this validation, which a resume repeats from its start.
    """

    kind: EvaluationKind | None = None
    sanity_checking: bool = False
    batches_done: int = 0
    own_objects: list[Any] = field(default_factory=list)
    num_batches: list[int | float] = field(default_factory=list)
