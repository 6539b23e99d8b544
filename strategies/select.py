"""Selection of a strategy and its settings from arguments and environment variables. Uses no device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.foreign_names import check_class, check_owner
from trainwright.core.names.kwargs_handler import as_flag, read_variable
from trainwright.core.names.stand_in import is_active
from trainwright.core.process import Topology, detect, is_ray
from trainwright.core.registry import Registry
from trainwright.processes.devices import device_indices, device_type
from trainwright.strategies.engine import Engine
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.engine_tables import ENGINE_TABLES
from trainwright.strategies.precision import Precision
from trainwright.strategies.registry import STRATEGIES, make_strategy
from trainwright.strategies.steps.gradients import GradientClip
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


@dataclass(frozen=True, slots=True)
class Selection:
    """A selected strategy with its settings and processes.

    Attributes:
        strategy: The strategy.
        settings: The checked settings of the engine.
        topology: Ranks and number of processes. Only the number is known before the Trainer starts processes.
        starts_processes: The Trainer must start the other processes.
    """

    strategy: Strategy
    settings: EngineSettings
    topology: Topology
    starts_processes: bool

    @property
    def runs_alone(self) -> bool:
        """True if the run has one process."""
        return self.settings.num_processes == 1

    def engine(self) -> Engine:
        """Return an engine that has not been started."""
        return self.strategy.engine(self.settings)


def select(
    *,
    strategy: str | Strategy,
    accelerator: str,
    devices: int | str | list[int],
    num_nodes: int,
    precision: Precision,
    compile: bool | str | dict[str, Any],
    launcher: str,
    sync_batchnorm: bool,
    accumulate_grad_batches: int = 1,
    clip: GradientClip | None = None,
) -> Selection:
    """Choose the strategy and check it. For the arguments, see `Trainer` and `EngineSettings`.

    `devices="auto"` uses the processes that the launcher has started. Without a launcher, it uses one process on the
    CPU, or all accelerators.

    Raises:
        ConfigurationError: A name is unknown, a device does not exist, or arguments contradict each other or the
            launcher.
    """
    if not isinstance(num_nodes, int) or num_nodes < 1:
        raise ConfigurationError(f"num_nodes={num_nodes!r}: write a whole number of at least 1.")
    topology = detect(launcher)
    strategy = _resolved(strategy, accelerator)
    kind = device_type(accelerator)
    if isinstance(strategy, Strategy) and accelerator == "auto" and strategy.runs_on is not None:
        kind = strategy.runs_on
    launched = topology.launcher != "none"
    indices = _indices(devices, kind, topology if launched else None, strategy)
    if num_nodes > 1 and launched and topology.num_nodes != num_nodes:
        raise ConfigurationError(
            f"num_nodes={num_nodes}, but the launcher started {topology.num_nodes} node(s): {topology}. "
            f"Remove num_nodes, or start {num_nodes} nodes."
        )
    if num_nodes > 1 and not launched and not is_ray(launcher):
        raise ConfigurationError(
            f"num_nodes={num_nodes} needs a launcher on every node, but none was found ({topology}). Start the script "
            f"with `torchrun --nnodes {num_nodes} --nproc-per-node {len(indices)} …` or with srun."
        )
    nodes = topology.num_nodes if launched else num_nodes
    world = topology.world_size if launched else len(indices) * num_nodes
    chosen = _chosen(strategy, world, sync_batchnorm=sync_batchnorm)
    options, blocks = compile_options(compile)
    settings = EngineSettings(kind, indices, nodes, precision, options, accumulate_grad_batches, clip, blocks)
    chosen.check(settings)
    if launched and topology.world_size > 1 and not chosen.is_distributed:
        raise ConfigurationError(
            f"{type(chosen).__name__} runs one process, but the launcher started {topology.world_size} ({topology}). "
            "Use strategy='auto', or start one process."
        )
    starts_processes = not launched and (len(indices) > 1 or is_ray(launcher))
    if not launched and not starts_processes:
        topology = replace(topology, world_size=1)
    return Selection(chosen, settings, topology, starts_processes)


def _resolved(strategy: str | Strategy, accelerator: str) -> str | Strategy:
    """Return a strategy with options, or one that needs other devices than the default ones, as an object.

    Names of other strategies, and `"auto"`, are returned unchanged: the number of processes is not known yet.
    """
    if isinstance(strategy, Engine):  # the `trainer.strategy` of another Trainer
        return cast("Strategy", strategy.strategy)  # an engine declares only what it reads
    if not isinstance(strategy, str):
        return strategy
    made: Strategy
    if ":" in strategy:
        made = make_strategy(strategy)
        return made
    if strategy not in ("auto", *STRATEGIES):
        STRATEGIES.get(strategy)  # raises an error with the most similar name
    if strategy == "auto" and device_type(accelerator) == "xla":
        strategy = "xla"
    if strategy.startswith("xla"):
        made = STRATEGIES.get(strategy)()
        return made
    return strategy


def _chosen(strategy: str | Strategy, world: int, *, sync_batchnorm: bool) -> Strategy:
    """Return the strategy for the Trainer's arguments."""
    chosen: Strategy
    if isinstance(strategy, str):
        if strategy == "auto":
            strategy = "ddp" if world > 1 else "single"
        chosen = STRATEGIES.get(strategy)()
    else:
        check_owner(strategy)
        if not isinstance(strategy, Strategy):
            raise ConfigurationError(
                f"strategy={strategy!r}: write a name such as 'ddp', or a Strategy such as DDPStrategy()."
            )
        chosen = strategy
    if sync_batchnorm and hasattr(chosen, "sync_batchnorm"):
        chosen = chosen.with_options(sync_batchnorm=True)
    elif sync_batchnorm and chosen.is_distributed:  # one process needs no synchronization
        raise ConfigurationError(
            f"sync_batchnorm=True is not supported by {type(chosen).__name__}. Use strategy='ddp', or remove it."
        )
    return chosen


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
        shared: DeepSpeed plugins of other Accelerators in the script, used if no argument selects an engine.
        ddp: Options of DistributedDataParallel, or None. Unused if an environment variable selects an engine.

    Raises:
        ConfigurationError: A plugin has a wrong class, or two arguments or two variables select an engine.
    """
    num_processes = detect().world_size
    given = {name: _checked_plugins(name, value) for name, value in plugins.items() if value is not None}
    # Beside the plugin of an engine, a ParallelismConfig only sets its mesh.
    arrangement: Any = None
    if "fsdp_plugin" in given or "torch_tp_plugin" in given:
        arrangement = given.pop("parallelism_config", None)
    arguments = list(given)
    if strategy != "auto":
        arguments.append(f"strategy={strategy!r}")
    options = [] if ddp is None else ["kwargs_handlers=[DistributedDataParallelKwargs(…)]"]
    strategy_with_options = bool(options) and strategy != "auto"
    if len(arguments) > 1 or strategy_with_options:
        raise ConfigurationError(f"{' and '.join(arguments + options)} both select the engine. Pass one of them.")
    variables = _selecting_variables()
    overridden: list[str] = []
    for argument in arguments:
        for name in variables.keys() - given:
            overridden.append(f"{variables[name]}=true is overridden by {argument}.")
    if given and options and not is_active():  # transformers always passes DDP options
        for name in given:
            overridden.append(f"{options[0]} is not used: {name} selects the engine.")
    if not arguments and not options and shared:
        given = {"deepspeed_plugin": dict(shared)}
    elif not arguments and variables:
        given, arrangement = _plugins_of_variables(variables)
        if options:
            overridden += [f"{options[0]} is not used: {variables[name]}=true." for name in given]

    selecting: str | None = None
    selected: dict[str, EnginePlugin] = {}
    for selecting, selected in given.items():  # at most one
        for plugin in selected.values():
            overridden += plugin.overridden(selecting)
    if ddp is not None and not given and strategy == "auto" and num_processes > 1:
        strategy = STRATEGIES.get("ddp").from_kwargs(ddp)
    strategies: list[str | Strategy] = [plugin.strategy(num_processes) for plugin in selected.values()]
    config = None if arrangement is None else arrangement[_ONLY]
    if config is not None:
        strategies = [config.arranged(one, num_processes) for one in strategies]
    return EngineChoice(strategies or [strategy], selecting, selected, overridden, config)


def _selecting_variables() -> dict[str, str]:
    """Return the arguments for which environment variables stand that are set, each with its variable."""
    found = {}
    for table in ENGINE_TABLES:
        if read_variable(table.switch_variable, as_flag):
            found[table.argument] = table.switch_variable
    return found


def _plugins_of_variables(variables: Mapping[str, str]) -> tuple[dict[str, Any], Any]:
    """Return the plugin for environment variables, and the plugin of the mesh or None.

    Args:
        variables: The result of `_selecting_variables`.
    """
    names = list(variables)
    arrangement = None
    if variables.keys() == {"fsdp_plugin", "parallelism_config"}:
        names = ["fsdp_plugin"]
        arrangement = {_ONLY: PLUGINS.get("parallelism_config")()}
    if len(names) > 1:
        raise ConfigurationError(f"{' and '.join(variables.values())} both select the engine. Unset one of them.")
    return {name: {_ONLY: PLUGINS.get(name)()} for name in names}, arrangement  # plugins read further variables


def _checked_plugins(argument: str, value: object) -> dict[str, EnginePlugin]:
    """Return the plugins that an argument contains, by name."""
    kind = PLUGINS.get(argument)
    named: dict[str, Any] = {_ONLY: value}
    if isinstance(value, dict) and value:
        named = dict(value)
    if len(named) > 1 and argument != "deepspeed_plugin":
        raise ConfigurationError(f"{argument} has {len(named)} plugins. Pass one: only DeepSpeed supports several.")
    for one in named.values():
        check_class(argument, one, kind)
    return named


def select_for_loop(
    strategy: str | Strategy,
    *,
    cpu: bool,
    precision: Precision,
    compile: dict[str, Any] | None,
    accumulate: int,
) -> Selection:
    """Select the strategy of a user-written loop, whose processes are started by a launcher.

    Args:
        strategy: A strategy or its name. `"auto"` selects one process if there is no launcher.
        cpu: Use the CPU even if there is an accelerator.
        precision: Precision of the forward.
        compile: Arguments of `torch.compile`, and `regional`. None disables compilation.
        accumulate: Micro-batches of one optimizer step.

    Raises:
        ConfigurationError: See `select`.
    """
    topology = detect()
    launched = topology.launcher != "none"
    return select(
        strategy=strategy,
        accelerator="cpu" if cpu else "auto",
        devices="auto" if launched else 1,
        num_nodes=topology.num_nodes if launched else 1,
        precision=precision,
        compile=False if compile is None else compile,
        launcher="auto",
        sync_batchnorm=False,
        accumulate_grad_batches=accumulate,
    )


def _indices(
    devices: int | str | list[int], kind: str, topology: Topology | None, strategy: str | Strategy
) -> list[int]:
    if topology is None:
        if devices == "auto" and strategy in ("single", "single_device"):
            return device_indices(1, kind)
        return device_indices(devices, kind)
    local = topology.local_world_size
    if devices == "auto" or devices == -1:
        found = device_indices("auto", kind)
        if kind == "cpu" or len(found) < local:  # a launcher may show each process only its own device
            return list(range(local))
        return found[:local]
    indices = device_indices(devices, kind)
    if len(indices) != local:
        raise ConfigurationError(
            f"devices={devices!r} asks for {len(indices)} process(es) on this node, but the launcher started {local} "
            f"({topology}). Use devices='auto', or start {len(indices)}."
        )
    return indices


def compile_options(spec: bool | str | dict[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """Parse a `compile=` argument: False, True, `"regional"`, a mode, or a dict.

    Returns:
        The arguments of `torch.compile` (None disables compilation), and whether only repeated blocks are compiled.

    Raises:
        ConfigurationError: The value is none of these.
    """
    if spec is False or spec is None:
        return None, False
    if spec is True:
        return {}, False
    if spec == "regional":
        return {}, True
    if isinstance(spec, str):
        modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
        if spec not in modes:
            raise ConfigurationError(
                f"compile={spec!r} is not a mode of torch.compile. Known: {', '.join(modes)}, and 'regional'."
            )
        return {"mode": spec}, False
    if isinstance(spec, dict):
        options = dict(spec)
        regional = options.pop("regional", False)
        if not isinstance(regional, bool):
            raise ConfigurationError(f"compile: 'regional' is {regional!r}. Write True or False.")
        return options, regional
    raise ConfigurationError(f"compile={spec!r}: write True, False, a mode, or a dict of torch.compile's arguments.")
