"""What differs between engines, and the texts of refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.names.known_arguments import Refuse


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What differs between engines, as facts that callers may ask for instead of the engine's name.

    Attributes:
        gradients: whether `p.grad` holds the whole gradient (`"full"`), a piece (`"sharded"`) or nothing (`"hidden"`).
        manual_optimization: tasks may run backward and optimizers themselves.
        lockstep_evaluation: every rank must run the same number of evaluation batches.
        whole_weights: outside of a step every rank holds the parameters and the optimizers' state whole, so that
            anyone may copy or exchange them and one rank can write them alone.
        weight_averages: after every step the task's parameters on each rank are those of one training, or its pieces of
            them, so that a callback may average them element by element and exchange them for the average.
        lone_steps: a rank can run a step without the others.
        closures: optimizers may evaluate the loss several times in a step, as L-BFGS does.
        inference_mode: evaluations may run in torch's inference mode; otherwise gradients are only switched off, as a
            tensor that is made in that mode, such as a gathered weight, cannot be trained on.
        trials: steps can be tried out and taken back.
        owns_optimizer_step: clipping and zeroing happen inside the engine.
        caches_casts: in mixed precision, the narrow copies of weights may be kept until a forward is over.
        state_rests: between the steps of `torch.optim.Optimizer`s nothing changes or moves their state, so that a save
            may copy it while the next step computes.
        late_groups: optimizers may get parameter groups during training.
        converted_layers: precisions and callbacks may convert layers, as fp8 and quantization-aware training do.
    """

    gradients: str = "full"
    manual_optimization: bool = True
    lockstep_evaluation: bool = False
    whole_weights: bool = True
    weight_averages: bool = True
    lone_steps: bool = True
    closures: bool = True
    inference_mode: bool = True
    trials: bool = True
    owns_optimizer_step: bool = False
    caches_casts: bool = True
    state_rests: bool = True
    late_groups: bool = True
    converted_layers: bool = True


REFUSALS = {
    "manual_optimization": (
        "optimizes by hand (automatic_optimization is False), and {strategy} cannot run backward and optimizers inside "
        "training_step. Use strategy='ddp', or automatic optimization."
    ),
    "weight_averages": (
        "averages the weights of one training, which {strategy} does not keep in the task's parameters after each "
        "step. Use strategy='ddp' or 'fsdp', or take the callback away."
    ),
    "lone_steps": (
        "tries steps out on each rank alone, so that one that runs out of memory leaves none waiting, and a step of "
        "{strategy} takes all ranks. Search with devices=1 or strategy='ddp', and write the number that was found."
    ),
    "trials": (
        "tries steps out and takes them back, and {strategy} keeps weights and states in pieces of its own. Search "
        "with strategy='ddp'."
    ),
    "whole_weights": (
        "changes whole weights, which {strategy} divides between ranks. Use strategy='ddp', or take the callback away."
    ),
    "converted_layers": (
        "changes linear layers, which {strategy} does not support. Use strategy='ddp', or take the callback away."
    ),
    "late_groups": (
        "adds parameters to optimizers during training, and {strategy} takes all of them when it begins. Use "
        "strategy='ddp' or 'fsdp'."
    ),
    "closures": (
        "evaluates the loss several times in a step and looks at whole vectors of weights, which lie in pieces under "
        "{strategy}. Use strategy='ddp', or another optimizer."
    ),
}
"""By the name of a capability that is missing: what its absence means to a task or callback, and the way out."""

OF_LIGHTNING = {
    "accelerator": "Trainer(accelerator=…) says it",
    "parallel_devices": "Trainer(devices=…) says it",
    "cluster_environment": "launchers are found by themselves, or Trainer(launcher=…) says it",
    "checkpoint_io": "checkpoints have one layout under every strategy, which every number of ranks reads",
    "precision_plugin": "Trainer(precision=…) says it",
}
"""Those that all strategies of Lightning take."""


def refuse_removed(owner: str, reasons: Mapping[str, str], *, of: str | None = None) -> Refuse:
    """Return a function that raises a ConfigurationError for an option that a strategy does not have.

    Args:
        owner: The name of its class.
        reasons: Option of another framework → what replaces it.
        of: The name of what it is not an option of. Default: None, which is `owner`.
    """

    def refuse(name: str, value: object, known: list[str]) -> None:
        if name in reasons:
            raise ConfigurationError(f"{name}={value!r} is no option of {of or owner}: {reasons[name]}. Leave it out.")
        own = [one for one in known if one != "self"]
        raise ConfigurationError(f"{owner} has no argument {name!r}.{nearest(name, own)} It takes: {', '.join(own)}.")

    return refuse
