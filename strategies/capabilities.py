"""What differs between engines, as facts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What differs between engines, as facts that callers may ask for instead of the engine's name.

    Attributes:
        gradients: whether `p.grad` holds the whole gradient (`"full"`), a piece (`"sharded"`) or nothing (`"hidden"`).
        manual_optimization: tasks may run backward and optimizers themselves.
        lockstep_evaluation: every rank must run the same number of evaluation batches.
        whole_weights: outside of a step every rank holds the parameters and the optimizers' state whole, so that
            anyone may copy or exchange them and one rank can write them alone.
        equal_replicas: after every step the parameters are those of one training, not each rank's own.
        lone_steps: a rank can run a step without the others.
        closures: optimizers may evaluate the loss several times in a step and look at whole vectors.
        owns_optimizer_step: clipping and zeroing happen inside the engine.
    """

    gradients: str = "full"
    manual_optimization: bool = True
    lockstep_evaluation: bool = False
    whole_weights: bool = True
    equal_replicas: bool = True
    lone_steps: bool = True
    closures: bool = True
    owns_optimizer_step: bool = False
