"""Progress of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainwright.trainer.data import EvaluationKind


@dataclass(slots=True)
class EvaluationState:
    """Progress of an evaluation.

    Attributes:
        kind: `"validate"`, `"test"` or `"predict"` while an evaluation runs, else None. Also set within a fit.
        sanity_checking: the validation before training is running.
        batches_done: evaluation batches that this rank has completed in this stage, over all evaluations.
        own_objects: metric objects of the task that had no update when the running validation of a fit began. Their
            values belong to this validation. A resume repeats it from its start, so checkpoints omit these values.
            Empty outside of such validations. After an error within one, they stay for the save that follows.
        num_batches: batches of each loader of the current evaluation, on this rank; infinite if unknown.
    """

    kind: EvaluationKind | None = None
    sanity_checking: bool = False
    batches_done: int = 0
    own_objects: list[Any] = field(default_factory=list)
    num_batches: list[int | float] = field(default_factory=list)
