"""Tensor parallelism: ranks that process the same batch split the layers of one model."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Literal

from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError
from trainwright.core.names.known_arguments import known_arguments
from trainwright.strategies.capabilities import OF_LIGHTNING, refuse_removed
from trainwright.strategies.engine import Engine
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.fsdp.layers.plan import Plan, check_tp_size
from trainwright.strategies.fsdp.strategy import FSDPEngine, FSDPStrategy
from trainwright.strategies.mesh import MeshShape


@dataclass(frozen=True, kw_only=True, repr=False)
class TensorParallelStrategy(FSDPStrategy):
    """Strategy that splits the layers of one model over all processes. All processes see the same batches.

    To combine tensor parallelism with data parallelism, use `FSDPStrategy(tp=…)`.

    Args:
        tp: Number of ranks that split the layers. Default: all ranks.
        tensor_parallel_plan: The layers to split, and their styles. Default: the result of the task's
            `tensor_parallel_plan`.
        auto_wrap_policy: Modules that are compiled or recomputed separately. Default: the result of the task's
            `shard_units`.
        activation_checkpointing, meta_init, cpu_ram_efficient_loading, weights_after_stage, state_dict_type: See
            `FSDPStrategy`.
        timeout, hang_timeout, process_group_backend: See `DataParallel`.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    distributed_type = None

    tp: int | None = None  # type: ignore[assignment]  # None is the number of all ranks
    tensor_parallel_plan: Plan | None = None

    # The other options of FSDPStrategy keep their defaults.
    sharding_strategy: str = field(default="FULL_SHARD", init=False)
    device_mesh: None = field(default=None, init=False)
    min_num_params: None = field(default=None, init=False)
    reshard_after_forward: None = field(default=None, init=False)
    mixed_precision: None = field(default=None, init=False)
    cpu_offload: bool = field(default=False, init=False)
    activation_checkpointing_policy: None = field(default=None, init=False)
    activation_checkpointing_save: None = field(default=None, init=False)
    forward_prefetch: int = field(default=0, init=False)
    sync_each_batch: bool = field(default=False, init=False)
    cp: int = field(default=1, init=False)
    sp: int = field(default=1, init=False)
    ep: int = field(default=1, init=False)

    def _check_sizes(self) -> None:
        if self.tp is not None:
            check_tp_size(self.tp)

    def mesh_shape(self, settings: EngineSettings) -> MeshShape:
        world = settings.num_processes
        if self.tp is not None and self.tp != world:
            alternative = ""
            if world % self.tp == 0:
                alternative = f", or FSDPStrategy(tp={self.tp}) to split data over the others"
            raise ConfigurationError(
                f"tp={self.tp} with {world} process(es): {type(self).__name__} splits layers over all of them. Use "
                f"tp={world}{alternative}."
            )
        return self._shape(settings, world)

    def engine(self, settings: EngineSettings) -> Engine:
        return TensorParallelEngine(self, settings)


class TensorParallelEngine(FSDPEngine):
    """Engine that splits the layers of a model over all ranks. All ranks see the same data."""

    def _sharding(self) -> None:
        """Return None, because there is only one data-parallel rank."""


@dataclass(frozen=True, init=False, repr=False)
class ModelParallelStrategy(FSDPStrategy):
    """`FSDPStrategy(tp=…)` with Lightning's arguments. `TaskModule.tensor_parallel_plan` returns the layers to split.

    Args:
        data_parallel_size: Number of groups that read different data and shard the parameters. `"auto"` divides the
            number of processes by `tensor_parallel_size`, or uses one group per node if both are `"auto"`.
        tensor_parallel_size: Number of ranks that split the layers. `"auto"` divides the number of processes by
            `data_parallel_size`.
        save_distributed_checkpoint: Each rank writes its shards. False: rank 0 gathers full tensors and writes them.
            Default: True.
        process_group_backend, timeout: See `DataParallel`.

    Raises:
        ConfigurationError: A size is invalid. At the start of a run: the sizes do not match the number of processes.
    """

    data_parallel_size: int | Literal["auto"] = "auto"
    tensor_parallel_size: int | Literal["auto"] = "auto"
    save_distributed_checkpoint: bool = True
    state_dict_type: str = field(default="sharded", init=False)

    # Lightning's arguments in its order, and no further options of FSDPStrategy.
    @known_arguments(refuse_removed("ModelParallelStrategy", OF_LIGHTNING))
    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: float | datetime.timedelta | Duration | str | None = None,
    ) -> None:
        self._set(data_parallel_size=data_parallel_size, tensor_parallel_size=tensor_parallel_size)
        self._set(save_distributed_checkpoint=save_distributed_checkpoint)
        self._set(process_group_backend=process_group_backend, timeout=timeout)
        self.__post_init__()

    def __post_init__(self) -> None:
        self._set(state_dict_type="sharded" if self.save_distributed_checkpoint else "full")
        super().__post_init__()
        for name in ("data_parallel_size", "tensor_parallel_size"):
            size = getattr(self, name)
            if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ConfigurationError(f"{name}={size!r}: use a number of ranks, such as 2, or 'auto'.")

    def mesh_shape(self, settings: EngineSettings) -> MeshShape:
        world = settings.num_processes
        data = self.data_parallel_size
        split = self.tensor_parallel_size
        if data == "auto":
            data = settings.num_nodes if split == "auto" else world // split
        # More groups than processes give tp=1, and the check below then raises an error.
        tp = max(1, world // data) if split == "auto" else split
        if data * tp != world:
            fitting = " or ".join(f"{n} × {world // n}" for n in range(1, world + 1) if world % n == 0)
            raise ConfigurationError(
                f"data_parallel_size={self.data_parallel_size!r} × tensor_parallel_size={self.tensor_parallel_size!r} "
                f"does not equal the run's {world} process(es). Use {fitting}."
            )
        return self._shape(settings, tp)
