"""Reading and checks of the Accelerator's arguments, before a device or process group is used."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trainwright.accelerator.gradient_state import GradientAccumulationPlugin, check_steps
from trainwright.accelerator.handlers import (
    DataLoaderConfiguration,
    Handlers,
    sort_handlers,
)
from trainwright.accelerator.project import ProjectConfiguration
from trainwright.core.errors import ArgumentTypeError, ConfigurationError, TrainwrightWarning, nearest
from trainwright.core.names.foreign_names import check_class
from trainwright.core.names.stand_in import is_active
from trainwright.strategies.argument_defaults import Passed, precision_of, read_defaults, warn_on_main
from trainwright.strategies.engine_choice import EnginePlugin
from trainwright.strategies.launcher_variables import DynamoBackend, TorchDynamoPlugin, read_dynamo
from trainwright.strategies.precision import Precision
from trainwright.strategies.precision_names import parse_precision
from trainwright.strategies.select import Selection, select_for_loop
from trainwright.strategies.steps.fp8 import AORecipeKwargs
from trainwright.strategies.steps.gradients import Gradients
from trainwright.strategies.steps.te_layers import TERecipeKwargs
from trainwright.strategies.strategy import Strategy

if TYPE_CHECKING:
    from trainwright.strategies.megatron.plugin import MegatronLMPlugin

# Mixed precision of each Accelerator of this process that has not called `end_training`.
_precision_of_accelerators: WeakKeyDictionary[object, str] = WeakKeyDictionary()
_PRECISIONS = ("no", "fp16", "bf16", "fp8")
# Options of FSDPStrategy that a plugin may change until a model is prepared, as transformers does for peft.
_SET_LATE = (
    "auto_wrap_policy",
    "min_num_params",
    "mixed_precision",
    "reshard_after_forward",
    "forward_prefetch",
    "activation_checkpointing",
    "state_dict_type",
)
# Arguments of Hugging Face's Accelerator that ours does not have, and their replacements.
ELSEWHERE = {
    "even_batches": "dataloader_config=DataLoaderConfiguration(even_batches=…)",
    "dispatch_batches": "dataloader_config=DataLoaderConfiguration(dispatch_batches=…)",
    "use_seedable_sampler": "seed=: shuffled data always has the order of a seed",
    "downcast_bf16": "strategy=XLAStrategy(downcast_bf16=True), or `trainwright launch --tpu --downcast_bf16`",
    "use_distributed_sampler": "nothing: an iterable data set declares how it is divided (see ShardedIterable)",
}


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Settings from an Accelerator's arguments. Missing arguments are read from the launcher's variables.

    Attributes:
        selection: The strategy and its settings.
        precision: Precision of the models' forwards.
        accumulation: Options of gradient accumulation.
        cpu: Use the CPU even if there is an accelerator.
        handlers: The objects in `kwargs_handlers`.
        argument: Name of the Accelerator's argument with plugins, such as `"fsdp_plugin"`. None without plugins.
        plugins: The plugins by name. `selection` belongs to the first plugin.
        arrangement: The `ParallelismConfig` that was passed in addition to a plugin, or None.
        dynamo: Options of compilation.
    """

    selection: Selection
    precision: Precision
    accumulation: GradientAccumulationPlugin
    cpu: bool
    handlers: Handlers
    argument: str | None
    plugins: Mapping[str, EnginePlugin]
    arrangement: Any
    dynamo: TorchDynamoPlugin

    def strategy_of(self, name: str | None, num_processes: int) -> Strategy:
        """Return the strategy for the current options of a plugin, which may change until `prepare`."""
        if name is None or name not in self.plugins:
            return self.selection.strategy
        return _with_group_options(self.plugins[name].strategy(num_processes), self.handlers)

    def sharding_as_set(self, num_processes: int) -> Strategy:
        """Return the strategy with the current values of the options in `_SET_LATE`, from the FSDP plugin."""
        (plugin,) = self.plugins.values()
        current = plugin.strategy(num_processes)
        return self.selection.strategy.with_options(**{name: getattr(current, name) for name in _SET_LATE})

    def megatron_as_set(self, num_processes: int, models: Sequence[nn.Module]) -> Strategy:
        """Return the strategy for the current options of a Megatron-LM plugin, and for the first model's layers."""
        assert self.megatron is not None
        first_model = next(iter(models), None)
        return _with_group_options(self.megatron.strategy(num_processes, first_model), self.handlers)

    @property
    def megatron(self) -> MegatronLMPlugin | None:
        """The Megatron-LM plugin, or None."""
        if self.argument != "megatron_lm_plugin":
            return None
        (plugin,) = self.plugins.values()
        return cast("MegatronLMPlugin", plugin)

    @property
    def group_options(self) -> dict[str, Any]:
        """Arguments of `PartialState` for the process group."""
        return {} if self.handlers.processes is None else self.handlers.processes.to_kwargs()

    def make_scaler(self, gradients: Gradients) -> torch.amp.GradScaler | None:
        """Return the loss scaler, or None if the loss is not scaled."""
        options = {} if self.handlers.scaler is None else self.handlers.scaler.to_kwargs()
        if not self.precision.scaled or not options.get("enabled", True):
            return None
        return gradients.make_scaler(**options)

    def context_maker(self, device_type: str, *, cache: bool) -> Callable[..., AbstractContextManager[Any]] | None:
        """Return a function that creates the context of a forward, or None if no context is needed.

        Args:
            device_type: Device type of torch.
            cache: False never caches 16-bit copies of weights until a forward ends. True leaves it to the handlers,
                whose default is torch's: cache.

        Each call creates a new context, because an object of torch's autocast must not be nested in itself.
        """
        if self.precision.autocast_dtype is None:
            return None
        options = {} if self.handlers.autocast is None else self.handlers.autocast.to_dict()
        if not cache:
            options["cache_enabled"] = False
        return partial(self.precision.autocast, device_type, **options)


def read_settings(
    *,
    mixed_precision: str | None,
    steps: int,
    accumulation: GradientAccumulationPlugin | None,
    cpu: bool,
    kwargs_handlers: Sequence[Any] | None,
    strategy: str | Strategy,
    plugins: Mapping[str, object],
    shared: Mapping[str, EnginePlugin],
    dynamo_backend: DynamoBackend | str | None,
    dynamo_plugin: TorchDynamoPlugin | None,
) -> LoopSettings:
    """Read and check the arguments of an `Accelerator`. Rank 0 warns of variables that the arguments override.

    Raises:
        ConfigurationError: An argument is not valid. The first error is raised.
    """
    handlers = sort_handlers(kwargs_handlers or ())
    # `texts` collects warnings, which are raised only if no argument is wrong.
    defaults = read_defaults(
        strategy,
        precision=Passed(f"mixed_precision={mixed_precision!r}", mixed_precision),
        steps=_passed_steps(steps, accumulation),
        plugins=plugins,
        shared=shared,
        ddp=handlers.ddp,
    )
    choice = defaults.choice  # the strategy that the arguments select
    texts = list(defaults.warnings)
    if steps == 1 and accumulation is None:
        steps = defaults.launched.accumulation
    accumulation = accumulation_of(steps, accumulation)
    # `choice.accumulation` is the number in DeepSpeed's configuration, or None.
    if choice.accumulation not in (None, accumulation.num_steps):
        texts += _overridden_steps(accumulation, choice.accumulation)
        accumulation = replace(accumulation, num_steps=choice.accumulation)
    cpu = cpu or defaults.launched.cpu
    dynamo = read_dynamo(dynamo_backend, dynamo_plugin)
    texts += dynamo.overridden("dynamo_backend" if dynamo_plugin is None else "dynamo_plugin")
    precision = _precision(mixed_precision or defaults.mixed_precision, handlers.float8, handlers.engine)
    engine_precision = precision
    if handlers.autocast is not None and not handlers.autocast.enabled:
        # A sharded model casts its parameters itself, without autocast, which AutocastKwargs(enabled=False) disables.
        engine_precision = parse_precision("32-true")
    select = partial(
        select_for_loop,
        cpu=cpu,
        precision=engine_precision,
        compile=dynamo.compile_options(),
        accumulate=accumulation.num_steps or 1,
    )
    selections = [select(one) for one in choice.strategies]  # checks all plugins, although the first one is selected
    selection = replace(selections[0], strategy=_with_group_options(selections[0].strategy, handlers))
    warn_on_main(texts, stacklevel=4)
    return LoopSettings(
        selection=selection,
        precision=precision,
        accumulation=accumulation,
        cpu=cpu,
        handlers=handlers,
        argument=choice.argument,
        plugins=choice.plugins,
        arrangement=choice.arrangement,
        dynamo=dynamo,
    )


def _passed_steps(steps: int, plugin: object) -> Passed:
    """Return the number of micro-batches that the user has passed, which overrides the launcher's variable."""
    if plugin is None:
        return Passed(f"gradient_accumulation_steps={steps}", None if steps == 1 else steps)
    steps = getattr(plugin, "num_steps", None) or 1
    return Passed(f"gradient_accumulation_plugin: {steps} steps", steps)


def _overridden_steps(accumulation: GradientAccumulationPlugin, num_in_configuration: int | None) -> list[str]:
    """Return a warning if the engine's configuration overrides a number of micro-batches that was set."""
    if accumulation.num_steps in (None, 1):
        return []
    return [
        f"gradient_accumulation_steps={accumulation.num_steps} is overridden by the configuration of "
        f'DeepSpeed, which has {num_in_configuration}. Write "auto" there to use the Accelerator\'s.'
    ]


def _with_group_options(strategy: Strategy, handlers: Handlers) -> Strategy:
    """Return the strategy with the options of `InitProcessGroupKwargs`. Raise an error if its own options differ."""
    changed_options = {} if handlers.processes is None else handlers.processes.to_kwargs()  # without defaults
    for name, attribute in (("timeout", "timeout"), ("backend", "process_group_backend")):
        if name not in changed_options or not hasattr(strategy, attribute):
            continue
        value = changed_options[name]
        value_of_strategy = getattr(strategy, attribute)
        if value_of_strategy not in (None, value):
            raise ConfigurationError(
                f"InitProcessGroupKwargs({name}={value!r}) and "
                f"{type(strategy).__name__}({attribute}={value_of_strategy!r}) differ. Pass one of them."
            )
        strategy = strategy.with_options(**{attribute: value})
    return strategy


def accumulation_of(steps: int, plugin: object) -> GradientAccumulationPlugin:
    """Return the gradient accumulation that `gradient_accumulation_steps` or `gradient_accumulation_plugin` sets.

    Raises:
        ConfigurationError: Both are set, `steps` is not a positive integer, or `plugin` is of another class.
    """
    check_steps("gradient_accumulation_steps", steps)
    if plugin is None:
        return GradientAccumulationPlugin(steps)
    plugin = check_class("gradient_accumulation_plugin", plugin, GradientAccumulationPlugin)
    if steps != 1:
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin both say the number of "
            "micro-batches. Pass one of them."
        )
    return plugin


def schedule_steps_of(value: Literal["once", "per_process"] | None) -> Literal["once", "per_process"] | None:
    """Return the value of `schedule_steps`, whose default depends on `trainwright.as_accelerate()`.

    Raises:
        ConfigurationError: The value is unknown.
    """
    if value not in (None, "once", "per_process"):
        raise ConfigurationError(f"schedule_steps={value!r}: expected 'once', 'per_process' or None.")
    return "per_process" if value is None and is_active() else value


def project_of(
    project_dir: str | os.PathLike[str] | None, configuration: ProjectConfiguration | None
) -> ProjectConfiguration:
    """Return the configuration of the project, from the two arguments that name its folder.

    The folders of a passed `configuration` are set in place.

    Raises:
        ConfigurationError: The arguments name different folders, or neither names the folder that automatic naming
            needs.
    """
    if configuration is None:
        return ProjectConfiguration(project_dir=None if project_dir is None else os.fspath(project_dir))
    if project_dir is not None and configuration.project_dir not in (None, os.fspath(project_dir)):
        raise ConfigurationError(
            f"project_dir={os.fspath(project_dir)!r} and ProjectConfiguration(project_dir="
            f"{configuration.project_dir!r}) name two folders. Pass one of them."
        )
    if configuration.project_dir is None:
        configuration.set_directories(project_dir)
    if configuration.automatic_checkpoint_naming and configuration.project_dir is None:
        raise ConfigurationError(
            "automatic_checkpoint_naming=True needs a folder. Pass Accelerator(project_dir='…'), the folder of the "
            "project."
        )
    return configuration


def loader_settings(split_batches: bool, seed: int | None, configuration: object) -> DataLoaderConfiguration:
    """Return the options for preparing loaders, from the arguments of an Accelerator that may set them.

    Raises:
        ConfigurationError: The arguments have different seeds, or the configuration has another class.
    """
    config = DataLoaderConfiguration()
    if configuration is not None:
        config = check_class("dataloader_config", configuration, DataLoaderConfiguration)
    if seed is not None and config.data_seed not in (None, seed):
        raise ConfigurationError(
            f"seed={seed} and DataLoaderConfiguration(data_seed={config.data_seed}) differ. Pass one of them."
        )
    continues = config.use_stateful_dataloader
    if continues is None and is_active():
        continues = False  # scripts written for Accelerate, whose default is False, skip batches by themselves
    # A copy, so that the Accelerator does not change the user's object.
    return replace(
        config,
        split_batches=split_batches or config.split_batches,
        data_seed=config.data_seed if seed is None else seed,
        use_stateful_dataloader=continues,
    )


def refuse_option(method: str, name: str, *_: object) -> None:
    """Raise a ConfigurationError for an argument that `save_state` or `load_state` does not support."""
    raise ConfigurationError(
        f"{method} does not take {name}=: a state is always a folder of safetensors and JSON, and the options of "
        "other formats have no effect. Remove it."
    )


def refuse_unknown(name: str, value: object, known: Iterable[str]) -> None:
    """Raise an error for an argument that the Accelerator does not have. The message suggests a replacement.

    An argument of `ELSEWHERE` with the value None is accepted.

    Raises:
        ArgumentTypeError: The argument is unknown.
        ConfigurationError: The argument is in `ELSEWHERE`, with a value other than None.
    """
    if name not in ELSEWHERE:
        raise ArgumentTypeError(f"Accelerator has no argument {name!r}.{nearest(name, (*known, *ELSEWHERE))}")
    if value is not None:
        raise ConfigurationError(f"Accelerator does not take {name}= . Instead: {ELSEWHERE[name]}.")


def _precision(name: str | None, torchao: AORecipeKwargs | None, te: TERecipeKwargs | None) -> Precision:
    """Return the precision with a name of `_PRECISIONS`. The other arguments are the options of `"fp8"`, or None."""
    if torchao is not None and te is not None:
        raise ConfigurationError("kwargs_handlers holds AORecipeKwargs and TERecipeKwargs, two backends. Pass one.")
    recipe = torchao or te
    if name == "fp8" and recipe is not None:
        return recipe.precision()
    if recipe is not None:
        raise ConfigurationError(
            f"kwargs_handlers holds {type(recipe).__name__}, but mixed_precision={name!r}. Use 'fp8', or remove the "
            "handler."
        )
    if name is None:
        name = "no"
    if name not in _PRECISIONS:
        raise ConfigurationError(
            f"mixed_precision={name!r} is unknown.{nearest(str(name), _PRECISIONS)} Write 'no', 'fp16', 'bf16' or "
            "'fp8'."
        )
    return precision_of(name)


def refuse_attribute(name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for an attribute that an Accelerator does not have. The message suggests a similar name."""
    advice = {"load_checkpoint": " Call load_state(folder).", "save_checkpoint": " Call save_state(folder)."}
    return AttributeError(f"Accelerator has no attribute {name!r}.{advice.get(name) or nearest(name, known)}")


def forget_precision(accelerator: object) -> None:
    """Let `compare_precision` ignore an Accelerator that has ended."""
    _precision_of_accelerators.pop(accelerator, None)


def compare_precision(accelerator: object, precision: str, *, warns: bool) -> None:
    """Record an Accelerator's precision. With `warns`, warn if another one of this process has another precision."""
    other_precisions = set(_precision_of_accelerators.values()) - {precision}
    _precision_of_accelerators[accelerator] = precision
    if other_precisions and warns:
        warnings.warn(
            f"this process has an Accelerator with mixed_precision={other_precisions.pop()!r} already, and this one "
            f"has {precision!r}: a model computes in the precision of the Accelerator that prepared it. Pass the same "
            "mixed_precision to both, or use one Accelerator.",
            TrainwrightWarning,
            stacklevel=4,
        )
