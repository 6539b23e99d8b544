"""Capabilities of engines, and error messages for missing ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.core.errors import ArgumentTypeError, nearest
from trainwright.core.names.known_arguments import Refuse


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of an engine, which callers check instead of the engine's name.

    Attributes:
        gradients: `p.grad` holds the full gradient (`"full"`), a shard (`"sharded"`) or nothing (`"hidden"`).
        manual_optimization: Tasks may run backward and optimizers themselves.
        lockstep_evaluation: Every rank must run the same number of evaluation batches.
        full_weights: Outside of a step, every rank has the full parameters and optimizer states. Callbacks may copy or
            replace them, and one rank can save them without the others.
        weight_averages: After every step, the task's parameters on each rank are the trained parameters or shards of
            them. Callbacks may average these tensors element by element, and swap the parameters with the average.
        independent_steps: A rank can run a step without the others.
        closures: Optimizers may evaluate the loss several times in a step, as L-BFGS does.
        inference_mode: Evaluations may run in torch's inference mode. Otherwise they only disable gradients, because
            tensors that are created in inference mode, such as gathered weights, cannot be trained.
        trials: The engine supports trial steps, whose effects are undone.
        owns_optimizer_step: The engine's optimizer step clips and zeroes gradients.
        caches_casts: In mixed precision, autocast may cache 16-bit copies of weights until a forward ends.
        state_rests: Between optimizer steps nothing changes or moves the states of `torch.optim.Optimizer`s. A save may
            copy them while the next step computes.
        late_groups: Optimizers may receive parameter groups during training.
        converted_layers: Precisions and callbacks may convert layers, for example for fp8 or quantization-aware
            training.
    """

    gradients: str = "full"
    manual_optimization: bool = True
    lockstep_evaluation: bool = False
    full_weights: bool = True
    weight_averages: bool = True
    independent_steps: bool = True
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
        "uses manual optimization (automatic_optimization is False), and {strategy} cannot run backward and optimizers "
        "inside training_step. Use strategy='ddp', or automatic optimization."
    ),
    "weight_averages": (
        "averages the trained weights, which {strategy} does not keep in the task's parameters after each step. Use "
        "strategy='ddp' or 'fsdp', or remove the callback."
    ),
    "independent_steps": (
        "runs trial steps on each rank separately, and a step of {strategy} needs all ranks. Search with devices=1 or "
        "strategy='ddp', and pass the result to the run."
    ),
    "trials": (
        "runs trial steps and undoes them, and {strategy} cannot restore its weights and optimizer states. Search with "
        "strategy='ddp'."
    ),
    "full_weights": (
        "changes full weights, which {strategy} divides between ranks. Use strategy='ddp', or remove the callback."
    ),
    "converted_layers": (
        "changes linear layers, which {strategy} does not support. Use strategy='ddp', or remove the callback."
    ),
    "late_groups": (
        "adds parameters to optimizers during training, and {strategy} needs all of them at the start. Use "
        "strategy='ddp' or 'fsdp'."
    ),
    "closures": (
        "evaluates the loss several times in a step and needs full parameters, which {strategy} shards. Use "
        "strategy='ddp', or another optimizer."
    ),
}
"""Name of a missing capability → the end of an error message that begins with a task or callback."""

OF_LIGHTNING = {
    "accelerator": "use Trainer(accelerator=…)",
    "parallel_devices": "use Trainer(devices=…)",
    "cluster_environment": "launchers are detected automatically, or set by Trainer(launcher=…)",
    "checkpoint_io": "checkpoints have the same layout under every strategy and number of ranks",
    "precision_plugin": "use Trainer(precision=…)",
}
"""Options that all Lightning strategies accept → what replaces them."""


def refuse_removed(owner: str, reasons: Mapping[str, str], *, of: str | None = None) -> Refuse:
    """Return a function that raises an ArgumentTypeError for an option that a strategy does not have.

    Args:
        owner: Class name of the strategy.
        reasons: Name of another framework's option → the end of the message, which says what to use instead.
        of: Name of the strategy in messages about `reasons`. Default: None, which uses `owner`.
    """

    def refuse(name: str, value: object, known: list[str]) -> None:
        if name in reasons:
            raise ArgumentTypeError(f"{of or owner} does not have {name}={value!r}: {reasons[name]}. Remove it.")
        own = [one for one in known if one != "self"]
        raise ArgumentTypeError(f"{owner} has no argument {name!r}.{nearest(name, own)} It takes: {', '.join(own)}.")

    return refuse
