"""Choice of the engine of a Trainer or of a user-written loop, from its arguments or from environment variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.foreign_names import check_class
from trainwright.core.names.kwargs_handler import as_flag, read_variable
from trainwright.core.names.stand_in import is_active
from trainwright.core.process import detect
from trainwright.core.registry import Registry
from trainwright.strategies.engine_tables import ENGINE_TABLES
from trainwright.strategies.registry import STRATEGIES
from trainwright.strategies.strategy import Strategy

if TYPE_CHECKING:
    from trainwright.strategies.ddp.comm_hooks import DistributedDataParallelKwargs

PLUGINS: Registry[Any] = Registry(
    "plugin",
    {
        "fsdp_plugin": "trainwright.strategies.fsdp.plugin:FullyShardedDataParallelPlugin",
        "deepspeed_plugin": "trainwright.strategies.deepspeed.plugin:DeepSpeedPlugin",
        "torch_tp_plugin": "trainwright.strategies.fsdp.plugin:TorchTensorParallelPlugin",
        "parallelism_config": "trainwright.strategies.megatron.parallelism_config:ParallelismConfig",
        "megatron_lm_plugin": "trainwright.strategies.megatron.plugin:MegatronLMPlugin",
    },
)
"""Arguments of an Accelerator that configure an engine → their classes."""

_ONLY = "default"  # Accelerate's name of a single plugin
_DDP_OPTIONS = "kwargs_handlers=[DistributedDataParallelKwargs(…)]"  # for messages


class EnginePlugin(Protocol):
    """The configuration of an engine with the names of Hugging Face Accelerate."""

    def strategy(self, num_processes: int) -> Strategy:
        """Return the strategy with the same options."""

    def overridden(self, origin: str) -> Iterator[str]:
        """Yield a message for each environment variable that has another value than the plugin."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by their names."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The strategy of a Trainer or of a user-written loop, before it is checked against the hardware.

    Attributes:
        strategies: One strategy for each plugin. Without plugins, one strategy or its name. The engine starts with the
            first strategy.
        argument: Name of the argument that received the plugins, such as `"fsdp_plugin"`. None without plugins.
        plugins: The plugins by name.
        overridden: A message for each environment variable or argument that has no effect.
        arrangement: The `ParallelismConfig` that has set the mesh of the strategies. None if there is none.
    """

    strategies: list[str | Strategy]
    argument: str | None
    plugins: dict[str, EnginePlugin]
    overridden: list[str]
    arrangement: Any

    @property
    def accumulation(self) -> int | None:
        """Micro-batches per optimizer step in the first strategy whose own configuration sets them, or None."""
        for one in self.strategies:
            if isinstance(one, Strategy) and one.stated_accumulation:
                return one.stated_accumulation
        return None

    @property
    def mixed_precision(self) -> str | None:
        """Mixed precision in the first strategy whose own configuration enables it, or None."""
        for one in self.strategies:
            if isinstance(one, Strategy) and one.stated_precision:
                return one.stated_precision
        return None


class _SelectedPlugins(NamedTuple):
    """The plugins that configure the engine.

    Attributes:
        argument: The argument of an Accelerator that selects the engine, such as `"fsdp_plugin"`, or for which an
            environment variable stands. None if nothing selects an engine.
        plugins: The plugins by name. Only DeepSpeed supports several.
        mesh: The `ParallelismConfig` beside the plugin of another engine. It only sets the mesh. None without it.
    """

    argument: str | None
    plugins: dict[str, EnginePlugin]
    mesh: Any = None


def choose_engine(
    strategy: str | Strategy,
    plugins: Mapping[str, object],
    shared: Mapping[str, EnginePlugin],
    ddp: DistributedDataParallelKwargs | None,
) -> EngineChoice:
    """Choose the strategy of a Trainer or a user-written loop from its arguments, or else from environment variables.

    Args:
        strategy: A strategy, or `"auto"`.
        plugins: Name of an argument in `PLUGINS` → its value, or None.
        shared: DeepSpeed plugins of other Accelerators in the script. They take precedence over variables, and are not
            used if an argument selects an engine or `ddp` is passed.
        ddp: Options of DistributedDataParallel, or None. Not used if a plugin or a variable selects the engine, and
            with one process.

    Raises:
        ConfigurationError: A plugin has a wrong class, or two arguments or two variables select an engine.
    """
    num_processes = detect().world_size
    passed = _passed_plugins(plugins, strategy, has_ddp_options=ddp is not None)
    variables = _selecting_variables()
    overridden = _overridden_variables(strategy, passed, variables)
    selected = passed
    nothing_is_passed = passed.argument is None and strategy == "auto"
    if passed.argument is not None and ddp is not None and not is_active():  # transformers always passes DDP options
        overridden.append(f"{_DDP_OPTIONS} is not used: {passed.argument} selects the engine.")
    elif nothing_is_passed and ddp is None and shared:
        selected = _SelectedPlugins("deepspeed_plugin", dict(shared))
    elif nothing_is_passed and variables:
        selected = _plugins_of_variables(variables)
        if ddp is not None:
            overridden.append(f"{_DDP_OPTIONS} is not used: {variables[str(selected.argument)]}=true.")

    for plugin in selected.plugins.values():
        overridden += plugin.overridden(str(selected.argument))
    strategies: list[str | Strategy] = [plugin.strategy(num_processes) for plugin in selected.plugins.values()]
    if not strategies:
        if ddp is not None and strategy == "auto" and num_processes > 1:
            strategy = STRATEGIES.get("ddp").from_kwargs(ddp)
        strategies = [strategy]
    if selected.mesh is not None:
        strategies = [selected.mesh.arranged(one, num_processes) for one in strategies]
    return EngineChoice(strategies, selected.argument, selected.plugins, overridden, selected.mesh)


def _passed_plugins(
    plugins: Mapping[str, object], strategy: str | Strategy, *, has_ddp_options: bool
) -> _SelectedPlugins:
    """Return the plugins that arguments contain.

    Raises:
        ConfigurationError: A plugin has a wrong class, or two arguments select an engine.
    """
    by_argument = {name: _checked_plugins(name, value) for name, value in plugins.items() if value is not None}
    mesh: Any = None
    if "fsdp_plugin" in by_argument or "torch_tp_plugin" in by_argument:
        config = by_argument.pop("parallelism_config", None)
        mesh = None if config is None else config[_ONLY]
    arguments = list(by_argument)
    if strategy != "auto":
        arguments.append(f"strategy={strategy!r}")
    # Options of DDP configure `"auto"`. A plugin overrides them, but a strategy has options of its own.
    strategy_has_ddp_options = has_ddp_options and strategy != "auto"
    if len(arguments) > 1 or strategy_has_ddp_options:
        if has_ddp_options:
            arguments.append(_DDP_OPTIONS)
        word = "both" if len(arguments) == 2 else "all"
        raise ConfigurationError(f"{' and '.join(arguments)} {word} select the engine. Pass one of them.")
    for argument, named in by_argument.items():  # one, as checked above
        return _SelectedPlugins(argument, named, mesh)
    return _SelectedPlugins(None, {})


def _overridden_variables(
    strategy: str | Strategy, passed: _SelectedPlugins, variables: Mapping[str, str]
) -> list[str]:
    """Return a message for each variable that selects another engine than an argument.

    Args:
        variables: The result of `_selecting_variables`.
    """
    argument = passed.argument
    if argument is None:
        if strategy == "auto":
            return []
        argument = f"strategy={strategy!r}"
    overridden = []
    for name, variable in variables.items():
        if name != passed.argument:
            overridden.append(f"{variable}=true is overridden by {argument}.")
    return overridden


def _selecting_variables() -> dict[str, str]:
    """Return the argument of each engine that an environment variable selects, with the variable's name."""
    variables = {}
    for table in ENGINE_TABLES:
        if read_variable(table.switch_variable, as_flag):
            variables[table.argument] = table.switch_variable
    return variables


def _plugins_of_variables(variables: Mapping[str, str]) -> _SelectedPlugins:
    """Return the plugin of an engine that an environment variable selects. Plugins read further variables.

    Args:
        variables: The result of `_selecting_variables`, not empty.

    Raises:
        ConfigurationError: Two variables select an engine.
    """
    names = list(variables)
    mesh = None
    if variables.keys() == {"fsdp_plugin", "parallelism_config"}:
        names = ["fsdp_plugin"]
        mesh = PLUGINS.get("parallelism_config")()
    if len(names) > 1:
        word = "both" if len(names) == 2 else "all"
        raise ConfigurationError(f"{' and '.join(variables.values())} {word} select the engine. Unset one of them.")
    (name,) = names
    return _SelectedPlugins(name, {_ONLY: PLUGINS.get(name)()}, mesh)


def _checked_plugins(argument: str, value: object) -> dict[str, EnginePlugin]:
    """Return the plugins that an argument contains, by name.

    Raises:
        ConfigurationError: A plugin has a wrong class, or there are several for another engine than DeepSpeed.
    """
    kind = PLUGINS.get(argument)
    named: dict[str, Any] = {_ONLY: value}
    if isinstance(value, dict) and value:
        named = dict(value)
    if len(named) > 1 and argument != "deepspeed_plugin":
        raise ConfigurationError(f"{argument} has {len(named)} plugins. Pass one: only DeepSpeed supports several.")
    for plugin in named.values():
        check_class(argument, plugin, kind)
    return named
