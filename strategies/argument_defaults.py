"""Defaults of a Trainer's and an Accelerator's arguments from a launcher's variables and an engine's configuration."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainwright.core.errors import TrainwrightWarning
from trainwright.core.process import detect
from trainwright.processes.devices import kernel_problem
from trainwright.strategies.engine_choice import EngineChoice, EnginePlugin, choose_engine
from trainwright.strategies.launcher_variables import Launched, read_launched
from trainwright.strategies.precision import Precision
from trainwright.strategies.precision_names import parse_precision
from trainwright.strategies.strategy import Strategy

if TYPE_CHECKING:
    from trainwright.strategies.ddp.comm_hooks import DistributedDataParallelKwargs


@dataclass(frozen=True, slots=True)
class Passed:
    """An argument that takes precedence over a variable.

    Attributes:
        text: The argument as the user wrote it.
        value: Its value in the variable's terms. None if the argument was not passed.
    """

    text: str
    value: object

    def overriding(self, launched: object) -> str | None:
        """Return the text if the argument was passed and differs from the variable's value."""
        return self.text if self.value is not None and self.value != launched else None


@dataclass(frozen=True, slots=True)
class LaunchDefaults:
    """Values that apply where the arguments say nothing.

    Attributes:
        choice: The strategy, from the arguments or the variables.
        launched: The variables.
        warnings: Texts to warn about: variables that are overridden or not used, and problems of the machine.
    """

    choice: EngineChoice
    launched: Launched
    warnings: list[str]

    @property
    def mixed_precision(self) -> str | None:
        """`"fp16"`, `"bf16"` or `"fp8"` of the variable, or else of the engine's configuration, or None."""
        return self.launched.mixed_precision or self.choice.mixed_precision


def read_defaults(
    strategy: str | Strategy,
    *,
    precision: Passed,
    steps: Passed,
    plugins: Mapping[str, object] | None = None,
    shared: Mapping[str, EnginePlugin] | None = None,
    ddp: DistributedDataParallelKwargs | None = None,
) -> LaunchDefaults:
    """Read a launcher's variables, and choose the strategy.

    Args:
        strategy, plugins, shared, ddp: See `choose_engine`.
        precision: The argument for the precision.
        steps: The argument for the number of micro-batches of one optimizer step.

    Raises:
        ConfigurationError: A variable has an invalid value, or two arguments or two variables select an engine.
    """
    choice = choose_engine(strategy, plugins or {}, shared or {}, ddp)
    launched = read_launched(choice.argument)
    unused = launched.unused(
        precision.overriding(launched.mixed_precision),
        steps.overriding(launched.accumulation),
    )
    return LaunchDefaults(choice, launched, [*choice.overridden, *unused, *kernel_problem()])


def precision_of(mixed_precision: str) -> Precision:
    """Return the precision for `"no"`, `"fp16"`, `"bf16"` or `"fp8"`. Variables set the options of fp8."""
    if mixed_precision != "fp8":
        return parse_precision(mixed_precision)
    from trainwright.strategies.steps.te_layers import recipe_of_variables  # few runs use it

    return recipe_of_variables().precision()


def warn_on_main(texts: Iterable[str], *, stacklevel: int) -> None:
    """Emit the warnings on rank 0. `stacklevel` counts from the caller, as in `warnings.warn`."""
    if detect().rank != 0:
        return
    for text in texts:
        warnings.warn(text, TrainwrightWarning, stacklevel=stacklevel + 1)
