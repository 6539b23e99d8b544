"""From the Trainer's arguments to a strategy and its settings; nothing is touched yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.foreign_names import check_owner
from trainwright.core.process import Topology, detect
from trainwright.processes.devices import device_indices, device_type
from trainwright.strategies.engine import Engine
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.precision import Precision
from trainwright.strategies.registry import STRATEGIES
from trainwright.strategies.steps.gradients import GradientClip
from trainwright.strategies.strategy import Strategy

ENGINE_ARGUMENTS = {
    "deepspeed_plugin": "Trainer(strategy='deepspeed')",
    "deepspeed_plugins": "Trainer(strategy='deepspeed')",
    "fsdp_plugin": "Trainer(strategy='fsdp')",
    "megatron_lm_plugin": "Trainer(strategy='tp')",
    "parallelism_config": "Trainer(strategy='tp')",
    "torch_tp_plugin": "Trainer(strategy='tp')",
}
"""Arguments of Hugging Face's Accelerator for engines that run steps of their own, and what serves in their place."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A strategy and where its processes come from.

    Attributes:
        strategy: the description of the engine.
        settings: of the engine, checked.
        topology: this process's place; for processes that the Trainer is still to start, their number.
        starts_processes: the Trainer must start the others.
    """

    strategy: Strategy
    settings: EngineSettings
    topology: Topology
    starts_processes: bool

    @property
    def runs_alone(self) -> bool:
        """Whether the run has one process."""
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
    """Choose the strategy and check it.

    `devices="auto"` is what the launcher started, or one process without a launcher on the CPU, or all accelerators.

    Raises:
        ConfigurationError: unknown names, devices that are not there, or arguments that contradict each other or the
            launcher.
    """
    if not isinstance(num_nodes, int) or num_nodes < 1:
        raise ConfigurationError(f"num_nodes={num_nodes!r}: write a whole number of at least 1.")
    topology = detect(launcher)
    kind = device_type(accelerator)
    if isinstance(strategy, str) and strategy not in ("auto", *STRATEGIES):
        STRATEGIES.get(strategy)  # raises, naming the nearest
    launched = topology.launcher != "none"
    indices = _indices(devices, kind, topology if launched else None, strategy)
    world = topology.world_size if launched else len(indices) * num_nodes
    if launched and num_nodes > 1 and topology.num_nodes != num_nodes:
        raise ConfigurationError(
            f"num_nodes={num_nodes}, but the launcher started {topology.num_nodes} node(s): {topology}. "
            "Leave num_nodes out, or start as many."
        )
    if not launched and num_nodes > 1:
        raise ConfigurationError(
            f"num_nodes={num_nodes} needs a launcher on every node, and none was found ({topology}). Start the script "
            f"with `torchrun --nnodes {num_nodes} --nproc-per-node {len(indices)} …` or with srun."
        )
    chosen = _chosen(strategy, world, sync_batchnorm=sync_batchnorm)
    nodes = topology.num_nodes if launched else num_nodes
    settings = EngineSettings(kind, indices, nodes, precision, compile_options(compile), accumulate_grad_batches, clip)
    chosen.check(settings)
    if launched and topology.world_size > 1 and not chosen.is_distributed:
        raise ConfigurationError(
            f"{type(chosen).__name__} runs one process, but the launcher started {topology.world_size} ({topology}). "
            "Use strategy='auto', or start one process."
        )
    starts = not launched and len(indices) > 1
    if not launched and not starts:
        topology = replace(topology, world_size=1)
    return Selection(chosen, settings, topology, starts)


def _chosen(strategy: str | Strategy, world: int, *, sync_batchnorm: bool) -> Strategy:
    """Return the strategy that the Trainer's arguments name."""
    chosen: Strategy
    if isinstance(strategy, str):
        chosen = STRATEGIES.get(strategy if strategy != "auto" else "ddp" if world > 1 else "single")()
    else:
        check_owner(strategy)
        if not isinstance(strategy, Strategy):
            raise ConfigurationError(
                f"strategy={strategy!r}: write a name such as 'ddp', or a Strategy such as DDPStrategy()."
            )
        chosen = strategy
    if sync_batchnorm and hasattr(chosen, "sync_batchnorm"):
        chosen = chosen.with_options(sync_batchnorm=True)
    elif sync_batchnorm and chosen.is_distributed:  # in one process its statistics are those of all
        raise ConfigurationError(
            f"sync_batchnorm=True means nothing with {type(chosen).__name__}, which leaves BatchNorm layers as they "
            "are. Use strategy='ddp', or leave it out."
        )
    return chosen


def select_for_loop(strategy: str | Strategy, handlers: Sequence[Any], *, cpu: bool, precision: Precision) -> Selection:
    """Choose and check the strategy of a loop that the user owns: the launcher alone starts processes.

    Args:
        strategy: `"auto"` is one process without a launcher.
        handlers: Hugging Face Accelerate's; `DistributedDataParallelKwargs` is served.
        cpu: use the CPU although there is an accelerator.
        precision: of models' forwards.

    Raises:
        ConfigurationError: see `select`; or handlers that are not served, or that contradict `strategy`.
    """
    topology = detect()
    for handler in handlers:
        from trainwright.strategies.ddp.comm_hooks import DistributedDataParallelKwargs

        if not isinstance(handler, DistributedDataParallelKwargs):
            check_owner(handler)
            raise ConfigurationError(
                f"kwargs_handlers holds a {type(handler).__name__}. Served: DistributedDataParallelKwargs."
            )
    if handlers and (strategy != "auto" or len(handlers) > 1):
        raise ConfigurationError("kwargs_handlers says what strategy= says too, or says it twice. Give one of them.")
    if handlers and topology.world_size > 1:
        strategy = STRATEGIES.get("ddp").from_kwargs(handlers[0])
    launched = topology.launcher != "none"
    return select(
        strategy=strategy,
        accelerator="cpu" if cpu else "auto",
        devices="auto" if launched else 1,
        num_nodes=topology.num_nodes if launched else 1,
        precision=precision,
        compile=False,
        launcher="auto",
        sync_batchnorm=False,
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
        return list(range(local)) if kind == "cpu" or len(found) < local else found[:local]
    indices = device_indices(devices, kind)
    if len(indices) != local:
        raise ConfigurationError(
            f"devices={devices!r} asks for {len(indices)} process(es) on this node, but the launcher started {local} "
            f"({topology}). Leave devices='auto', or make the two agree."
        )
    return indices


def compile_options(spec: bool | str | dict[str, Any]) -> dict[str, Any] | None:
    """Read a `compile=` argument: False, True, a mode, or `torch.compile`'s keyword arguments."""
    if spec is False or spec is None:
        return None
    if spec is True:
        return {}
    if isinstance(spec, str):
        modes = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
        if spec not in modes:
            raise ConfigurationError(f"compile={spec!r} is not a mode of torch.compile: {', '.join(modes)}.")
        return {"mode": spec}
    if isinstance(spec, dict):
        return dict(spec)
    raise ConfigurationError(f"compile={spec!r}: write True, False, a mode, or a dict of torch.compile's arguments.")
