"""Defaults of a Trainer's arguments from the launcher's environment variables."""

from __future__ import annotations

import warnings
from dataclasses import replace

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.names.kwargs_handler import as_flag, read_variable
from trainwright.core.process import ALL_PROCESSES, detect, variable
from trainwright.processes.devices import kernel_problem
from trainwright.strategies.engine_tables import ENGINE_TABLES
from trainwright.strategies.launched import TorchDynamoPlugin, read_launched
from trainwright.strategies.precision import Precision
from trainwright.strategies.select import choose_for_loop
from trainwright.trainer.configuration.arguments import TrainerArguments

_PRECISIONS = {"fp16": "16-mixed", "bf16": "bf16-mixed", "fp8": "fp8"}

_VARIABLES = {
    "precision": "ACCELERATE_MIXED_PRECISION",
    "accumulate_grad_batches": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "accelerator": "ACCELERATE_USE_CPU",
    "compile": "ACCELERATE_DYNAMO_BACKEND",
}


def variable_of(name: str) -> str | None:
    """Return the environment variable that sets the default of an argument, or None if there is none."""
    switches = [table.switch_variable for table in ENGINE_TABLES]
    engine = next((each for each in switches if read_variable(each, as_flag)), None)
    own = _VARIABLES.get(name)
    if own is not None and variable(own):
        return own
    # The configuration of an engine may set these, too.
    return engine if name in ("strategy", "precision", "accumulate_grad_batches") else None


def with_launched(arguments: TrainerArguments) -> TrainerArguments:
    """Return the arguments, with defaults from the launcher's environment variables.

    Arguments that the user passed take precedence. Rank 0 warns about overridden and unused variables.

    Raises:
        ConfigurationError: a variable has an invalid value, or two variables select an engine.
    """
    choice = choose_for_loop(arguments.strategy, {}, {}, None)
    launched = read_launched(choice.argument)
    dynamo = TorchDynamoPlugin()
    precision, steps = arguments.precision, arguments.accumulate_grad_batches
    different = precision is not None and precision != _PRECISIONS.get(launched.mixed_precision or "")
    texts = choice.overridden + launched.unused(
        f"precision={precision!r}" if different else None,
        f"accumulate_grad_batches={steps}" if steps not in (1, launched.accumulation) else None,
    )
    if launched.cpu and arguments.accelerator not in ("auto", "cpu"):
        texts.append(f"ACCELERATE_USE_CPU=true is overridden by accelerator={arguments.accelerator!r}.")
    texts += kernel_problem()
    options = dynamo.compile_options()
    if options is not None and arguments.compile is not False:
        texts.append(f"ACCELERATE_DYNAMO_BACKEND={dynamo.backend} is overridden by compile={arguments.compile!r}.")
    for text in texts if detect(arguments.launcher).rank == 0 else ():
        warnings.warn(text, TrainwrightWarning, stacklevel=5)
    (strategy,) = choice.strategies
    said, stated = launched.mixed_precision, None
    if choice.argument is not None:  # the variables select the engine, whose configuration may set these
        said, stated = said or choice.mixed_precision, choice.accumulation
    accumulate = _with_machines_that_left(steps if steps != 1 else stated or launched.accumulation)
    return replace(
        arguments,
        strategy=strategy,
        precision=precision if precision is not None or not said else _precision_of(said),
        accumulate_grad_batches=accumulate,
        accelerator="cpu" if launched.cpu and arguments.accelerator == "auto" else arguments.accelerator,
        compile=options if options is not None and arguments.compile is False else arguments.compile,
    )


def _precision_of(said: str) -> str | Precision:
    if said != "fp8":
        return _PRECISIONS[said]
    from trainwright.strategies.steps.te_layers import recipe_of_variables  # few runs use it

    return recipe_of_variables().precision()


def _with_machines_that_left(accumulate: int) -> int:
    """Return the number of micro-batches per step that keeps the global batch size after processes have left the job.

    Raises:
        ConfigurationError: no number of micro-batches keeps the global batch size.
    """
    complete = variable(ALL_PROCESSES)
    if complete is None:
        return accumulate
    left = detect().world_size
    total = int(complete) * accumulate
    if total % left:
        fitting = ", ".join(str(n) for n in range(1, int(complete) + 1) if total % n == 0)
        raise ConfigurationError(
            f"{left} of {complete} processes are left, and {total} micro-batches of a step cannot be divided among "
            f"them. Possible numbers of processes are {fitting}. Set accumulate_grad_batches to a multiple of {left}."
        )
    return total // left
