"""Where a training is in its optimizer step."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Part of an optimizer step, which determines what can be saved and restored.

    Attributes:
        BETWEEN_STEPS: The last step is complete and counted, and no step has begun.
        GRADIENTS: A step has begun. Weights, optimizers and progress are those of the last step.
        WEIGHTS: Optimizers step, or their step is being counted.
    """

    BETWEEN_STEPS = "between steps"
    GRADIENTS = "gradients"
    WEIGHTS = "weights"
