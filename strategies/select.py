"""Selection of a strategy and its settings from arguments and environment variables. Uses no device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.foreign_names import check_owner
from trainwright.core.process import Topology, detect, is_ray
from trainwright.processes.devices import device_indices, device_type
from trainwright.strategies.engine import Engine
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.precision import Precision
from trainwright.strategies.registry import STRATEGIES, make_strategy
from trainwright.strategies.steps.gradients import GradientClip
from trainwright.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Selection:
    """A selected strategy with its settings and processes.

    Attributes:
        strategy: The strategy.
        settings: The checked settings of the engine.
        topology: The topology of this process. Before the Trainer starts processes, it is that of a single process;
            see `settings.num_processes`.
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
    CPU or for `"single"`, and otherwise all accelerators.

    Raises:
        ConfigurationError: A name is unknown, a device does not exist, or arguments contradict each other or the
            launcher.
    """
    if not isinstance(num_nodes, int) or num_nodes < 1:
        raise ConfigurationError(f"num_nodes={num_nodes!r}: write a whole number of at least 1.")
    topology = detect(launcher)
    strategy = _create_early(strategy, accelerator)
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
    chosen = _create(strategy, world, sync_batchnorm=sync_batchnorm)
    options, blocks = compile_options(compile)
    settings = EngineSettings(kind, indices, nodes, precision, options, accumulate_grad_batches, clip, blocks)
    chosen.check(settings)
    if launched and topology.world_size > 1 and not chosen.is_distributed:
        raise ConfigurationError(
            f"{type(chosen).__name__} runs one process, but the launcher started {topology.world_size} ({topology}). "
            "Use strategy='auto', or start one process."
        )
    starts_processes = not launched and (len(indices) > 1 or is_ray(launcher))
    return Selection(chosen, settings, topology, starts_processes)


def _create_early(strategy: str | Strategy, accelerator: str) -> str | Strategy:
    """Create the strategy if its name has options, or if the strategy determines the devices (XLA).

    Return other names, and `"auto"`, unchanged, because the number of processes is not known yet.
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


def _create(strategy: str | Strategy, world: int, *, sync_batchnorm: bool) -> Strategy:
    """Create a strategy for `world` processes from its name, and apply the Trainer's `sync_batchnorm`."""
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
        strategy: A strategy or its name. `"auto"` selects one process without a launcher.
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
    """Return the indices of the devices of this node, one for each process.

    Args:
        devices: The Trainer's argument.
        kind: Type of the devices, such as `"cuda"`.
        topology: The topology that the launcher has set. None without a launcher.
        strategy: The strategy, or its name.

    Raises:
        ConfigurationError: A device does not exist, or the launcher has started another number of processes.
    """
    if topology is None:
        if devices == "auto" and strategy in ("single", "single_device"):
            return device_indices(1, kind)
        return device_indices(devices, kind)
    local = topology.local_world_size
    if devices == "auto" or devices == -1:
        available = device_indices("auto", kind)
        if kind == "cpu" or len(available) < local:  # a launcher may show each process only its own device
            return list(range(local))
        return available[:local]
    indices = device_indices(devices, kind)
    if len(indices) != local:
        raise ConfigurationError(
            f"devices={devices!r} asks for {len(indices)} process(es) on this node, but the launcher started {local} "
            f"({topology}). Use devices='auto', or start {len(indices)}."
        )
    return indices


def compile_options(spec: bool | str | dict[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """Parse a `compile=` argument: False or None, True, `"regional"`, a mode, or a dict.

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
