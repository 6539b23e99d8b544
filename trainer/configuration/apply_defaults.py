"""Defaults of a Trainer's arguments from the launcher's environment variables."""

from __future__ import annotations

from dataclasses import replace

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.kwargs_handler import as_flag, read_variable
from trainwright.core.process import ALL_PROCESSES, detect, variable
from trainwright.strategies.argument_defaults import Passed, precision_of, read_defaults, warn_on_main
from trainwright.strategies.engine_tables import ENGINE_TABLES
from trainwright.strategies.launcher_variables import TorchDynamoPlugin
from trainwright.strategies.precision_names import parse_precision
from trainwright.trainer.configuration.arguments import TrainerArguments

_NAMES_OF_LAUNCHER = {"16-mixed": "fp16", "bf16-mixed": "bf16"}  # precision → its name in the variable

# Argument → the variable that sets its default.
_VARIABLES = {
    "precision": "ACCELERATE_MIXED_PRECISION",
    "accumulate_grad_batches": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "accelerator": "ACCELERATE_USE_CPU",
    "compile": "ACCELERATE_DYNAMO_BACKEND",
}


def variable_of(name: str) -> str | None:
    """Return the environment variable that may have set an argument, or None if no such variable is set."""
    own_variable = _VARIABLES.get(name)
    if own_variable is not None and variable(own_variable):
        return own_variable
    if name == "accumulate_grad_batches" and variable(ALL_PROCESSES):
        return ALL_PROCESSES  # see `_keep_batch_size`
    # An engine such as FSDP has a variable that selects it. Its configuration may also set these arguments.
    if name not in ("strategy", "precision", "accumulate_grad_batches"):
        return None
    for table in ENGINE_TABLES:
        if read_variable(table.switch_variable, as_flag):
            return table.switch_variable
    return None


def with_launched(arguments: TrainerArguments) -> TrainerArguments:
    """Return the arguments, with defaults from the launcher's environment variables.

    Arguments that differ from their defaults take precedence. Rank 0 warns about overridden and unused variables.

    Raises:
        ConfigurationError: a variable has an invalid value, two variables select an engine, or no number of
            micro-batches keeps the batch size after processes have left.
    """
    defaults = read_defaults(
        arguments.strategy,
        precision=_passed_precision(arguments),
        steps=_passed_steps(arguments),
    )
    choice = defaults.choice
    launched = defaults.launched
    warnings = list(defaults.warnings)
    (strategy,) = choice.strategies  # a Trainer has one; an Accelerator may have several

    # Variables that select an engine also configure it, for example by a DeepSpeed file. That configuration sets the
    # arguments. The configuration of a strategy that the user has passed sets none: it is compared with them later.
    is_from_variables = choice.argument is not None
    default_precision = launched.mixed_precision
    default_accumulate = launched.accumulation
    if is_from_variables:
        default_precision = defaults.mixed_precision
        default_accumulate = choice.accumulation or launched.accumulation
    precision = arguments.precision
    if precision is None and default_precision is not None:
        precision = precision_of(default_precision)
    accumulate = arguments.accumulate_grad_batches
    if accumulate == 1:
        accumulate = default_accumulate

    accelerator = arguments.accelerator
    if launched.cpu and accelerator == "auto":
        accelerator = "cpu"
    elif launched.cpu and accelerator != "cpu":
        warnings.append(f"ACCELERATE_USE_CPU=true is overridden by accelerator={accelerator!r}.")

    compile = arguments.compile
    dynamo = TorchDynamoPlugin()  # reads its variables
    launched_compile = dynamo.compile_options()
    if launched_compile is not None and compile is False:
        compile = launched_compile
    elif launched_compile is not None:
        warnings.append(f"ACCELERATE_DYNAMO_BACKEND={dynamo.backend} is overridden by compile={compile!r}.")

    warn_on_main(warnings, stacklevel=5)  # the line of the user that creates the Trainer
    return replace(
        arguments,
        strategy=strategy,
        precision=precision,
        accumulate_grad_batches=_keep_batch_size(accumulate),
        accelerator=accelerator,
        compile=compile,
    )


def _passed_precision(arguments: TrainerArguments) -> Passed:
    if arguments.precision is None:
        return Passed("", None)
    name = parse_precision(arguments.precision).name
    return Passed(f"precision={arguments.precision!r}", _NAMES_OF_LAUNCHER.get(name, name))


def _passed_steps(arguments: TrainerArguments) -> Passed:
    steps = arguments.accumulate_grad_batches
    return Passed(f"accumulate_grad_batches={steps}", None if steps == 1 else steps)


def _keep_batch_size(accumulate: int) -> int:
    """Return the number of micro-batches per step that keeps the global batch size after processes have left the job.

    Example: if 4 of 8 processes are left, each of them runs 2 × `accumulate` micro-batches.

    Raises:
        ConfigurationError: no number of micro-batches keeps the global batch size.
    """
    text = variable(ALL_PROCESSES)  # set by `trainwright launch --min_nodes`: the number at the start of the job
    if text is None:
        return accumulate
    num_complete = int(text)
    num_left = detect().world_size
    total = num_complete * accumulate
    if total % num_left:
        fitting = ", ".join(str(n) for n in range(1, num_complete + 1) if total % n == 0)
        raise ConfigurationError(
            f"{num_left} of {num_complete} processes are left, and {total} micro-batches of a step cannot be divided "
            f"among them. Possible numbers of processes are {fitting}. Set accumulate_grad_batches to a multiple of "
            f"{num_left}."
        )
    return total // num_left
