"""The Strategy contract: the choice of an engine and its options."""

from __future__ import annotations

import copy
import datetime
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.process import Topology
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule
from trainwright.processes.devices import DistributedType, check_backend
from trainwright.processes.process_group import DEFAULT_TIMEOUT, Processes, ProcessGroup, length_of_time
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.engine import Engine
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.mesh import MeshShape
from trainwright.strategies.units import check_blocks, repeated_blocks


@dataclass(frozen=True, slots=True)
class StrategyOutline:
    """Prediction of how a run distributes a model over its ranks.

    Attributes:
        mesh: Number of ranks along each axis.
        units: Modules that are sharded or offloaded separately.
        shards: Number of ranks over which each parameter is divided along its first dimension. 1 means that every rank
            holds full parameters. None means that parameters are divided in another way.
        param_dtype: Data type of gathered parameters. None means the data type of the stored parameters.
        reduce_dtype: Data type in which gradients are averaged. None means the data type of the gradients.
        reduces: True if `reduce_dtype` is known. False means that gradients may be averaged in any data type, and
            `reduce_dtype` is None.
        peak: Name of the strategy in the estimate of memory per rank, such as `"offload"`. None disables the estimate.
    """

    mesh: MeshShape
    units: tuple[nn.Module, ...] = ()
    shards: int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reduces: bool = False
    peak: str | None = None


class _StrategyType(type):
    """Metaclass of strategies, which counts an engine as an instance of its strategy's class."""

    def __instancecheck__(cls, instance: object) -> bool:
        # `trainer.strategy` is an engine. Programs for Lightning check `isinstance(trainer.strategy, DDPStrategy)`.
        if isinstance(instance, Engine):
            instance = instance.strategy
        return super().__instancecheck__(instance)


@dataclass(frozen=True, kw_only=True, repr=False)
class Strategy(metaclass=_StrategyType):
    """The configuration of an engine. It can be compared, printed and pickled, and uses no device or process.

    `engine` creates the engine of one stage of a Trainer, or of one user-written loop. A strategy is a frozen dataclass
    whose fields are the options: `with_options` returns a changed copy. An engine counts as an instance of its
    strategy's class: `isinstance(trainer.strategy, DDPStrategy)`.

    Attributes:
        capabilities: Features that the engine supports; see `Capabilities`.
        runs_on: Device type that the engine needs. None means any.
        distributed_type: Value of `Accelerator.distributed_type`. None uses `PartialState.distributed_type`.
    """

    capabilities = Capabilities()  # not a ClassVar: it depends on the options of some strategies
    runs_on: ClassVar[str | None] = None
    distributed_type: ClassVar[DistributedType | None] = None

    @property
    def is_distributed(self) -> bool:
        """True if the engine supports several processes."""
        return False

    @property
    def sync_each_batch(self) -> bool:
        """True if gradients are averaged over ranks after every micro-batch of a step."""
        return False

    @property
    def stated_accumulation(self) -> int | None:
        """Micro-batches of one optimizer step in the engine's own configuration, or None."""
        return None

    @property
    def stated_precision(self) -> str | None:
        """`"bf16"` or `"fp16"` if the engine's own configuration enables mixed precision, or None."""
        return None

    def __post_init__(self) -> None:
        """Check and normalize the options. Uses no device or process. Also called by `with_options`."""

    def _set(self, **values: object) -> None:
        """Set normalized options and attributes that depend on options. Called only while the strategy is created."""
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    def check(self, settings: EngineSettings) -> None:
        """Check that the engine supports the settings. Uses no device or process.

        Raises:
            ConfigurationError: The engine does not support the settings.
        """
        if self.runs_on is not None and settings.device_type != self.runs_on:
            raise ConfigurationError(
                f"{self!r} needs {self.runs_on!r} devices, not accelerator={settings.device_type!r}. Use "
                "accelerator='auto', or another strategy."
            )
        settings.precision.check_device(settings.device_type)
        self.check_converts(settings, self.capabilities.converted_layers)
        if settings.num_processes > 1 and not self.is_distributed:
            raise ConfigurationError(
                f"devices={len(settings.device_indices)}, num_nodes={settings.num_nodes} with {type(self).__name__}, "
                "which runs one process. Use strategy='ddp', or devices=1."
            )

    def check_converts(self, settings: EngineSettings, able: bool) -> None:
        """Check that the engine supports converted layers if the precision converts layers.

        Args:
            settings: The settings.
            able: True if the engine supports converted layers. Strategies may pass a value that depends on options.

        Raises:
            ConfigurationError: The engine does not support converted layers.
        """
        if settings.precision.converts_layers and not able:
            raise ConfigurationError(
                f"precision={settings.precision.name!r} is not supported by {self!r}. Use strategy='ddp' or 'fsdp', or "
                "precision='bf16-mixed'."
            )

    def check_task(self, task: TaskModule, settings: EngineSettings) -> None:
        """Check a task before processes start. Layers that `configure_model` creates do not exist yet.

        Raises:
            ConfigurationError: The engine cannot train the task.
        """
        if settings.compile_blocks and not overrides(task, "configure_model", TaskModule):
            check_blocks(task, repeated_blocks(task))

    def outline(self, task: TaskModule | None, settings: EngineSettings) -> StrategyOutline:
        """Return how a run distributes a task. Without a task, the outline has no units.

        The task's model must be built. Its parameters may be on any device, such as meta.

        Raises:
            ConfigurationError: The engine cannot train the task.
        """
        return StrategyOutline(MeshShape(dp_replicate=settings.num_processes))

    @property
    def changed_options(self) -> dict[str, Any]:
        """The options whose values differ from their defaults."""
        changed = {}
        for option in fields(self):
            value = getattr(self, option.name)
            if option.init and value != option.default:
                # The name that users pass, if the field has another one.
                changed[option.metadata.get("argument", option.name)] = value
        return changed

    def engine(self, settings: EngineSettings) -> Engine:
        """Create an engine with these settings. It uses devices and processes only after `Engine.start`."""
        return Engine(self, settings)

    def with_options(self, **options: Any) -> Self:
        """Return a copy with changed options, which are checked.

        Raises:
            ConfigurationError: An option is unknown, or has an invalid value.
        """
        known = {field.name for field in fields(self)}
        for name in options:
            if name not in known:
                raise ConfigurationError(f"{type(self).__name__} has no option {name!r}.{nearest(name, known)}")
        changed = copy.copy(self)
        changed._set(**options)
        changed.__post_init__()
        return changed

    def __repr__(self) -> str:
        """Show the class with the options that differ from their defaults."""
        shown = ", ".join(f"{name}={value!r}" for name, value in self.changed_options.items())
        return f"{type(self).__name__}({shown})"


@dataclass(frozen=True, kw_only=True, repr=False)
class SingleDeviceStrategy(Strategy):
    """Strategy that trains in this process on one device."""

    def outline(self, task: TaskModule | None, settings: EngineSettings) -> StrategyOutline:
        return replace(super().outline(task, settings), shards=1, peak="single")


@dataclass(frozen=True, kw_only=True, repr=False)
class DataParallel(Strategy):
    """Base class of strategies with several processes.

    Args:
        timeout: Maximum duration of a collective: seconds, a timedelta, a Duration or text such as `"30 min"`. Default:
            None, 30 minutes.
        hang_timeout: Time without progress on a rank after which the stack of each rank is printed. `"auto"` is half of
            `timeout`, at most ten minutes. None disables it. Default: `"auto"`.
        process_group_backend: Backend of torch.distributed; `"ccl"` for oneCCL. Default: None, which is gloo on the CPU
            and the vendor's library on accelerators (NCCL on CUDA).
    """

    timeout: float | datetime.timedelta | Duration | str | None = None
    hang_timeout: float | datetime.timedelta | Duration | str | None = "auto"
    process_group_backend: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        timeout = None
        if self.timeout is not None:
            timeout = length_of_time("timeout", self.timeout)
        self._set(timeout=timeout, hang_timeout=_hang_timeout(self.hang_timeout, timeout))

    @property
    def is_distributed(self) -> bool:
        return True

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        check_backend(self.process_group_backend, settings.device_type)

    def engine(self, settings: EngineSettings) -> Engine:
        return ParallelEngine(self, settings)


class ParallelEngine(Engine):
    """Base class of engines with several processes. Subclasses replicate or shard the model."""

    strategy: DataParallel

    def _make_processes(self, topology: Topology) -> Processes:
        strategy: Any = self.strategy  # the timeouts are normalized, which the types of the fields do not say
        return ProcessGroup(
            topology,
            timeout=strategy.timeout,
            backend=strategy.process_group_backend,
            hang_timeout=strategy.hang_timeout,
        )


def _hang_timeout(value: Any, timeout: datetime.timedelta | None) -> datetime.timedelta | Literal["auto"] | None:
    """Return the normalized `hang_timeout`.

    Args:
        value: The option of the user.
        timeout: The timeout of collectives. None is `DEFAULT_TIMEOUT`.

    Raises:
        ConfigurationError: `value` is not a length of time, or is not shorter than the timeout of collectives.
    """
    if value is None:
        return None
    if value == "auto":
        return "auto"  # the process group computes it from its timeout
    length = length_of_time("hang_timeout", value)
    limit = timeout or DEFAULT_TIMEOUT
    if length >= limit:
        raise ConfigurationError(
            f"hang_timeout={value!r} is not shorter than timeout={limit}, after which collectives fail. Increase "
            "timeout, reduce hang_timeout, or pass hang_timeout=None."
        )
    return length
