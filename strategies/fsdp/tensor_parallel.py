"""Tensor parallelism: the layers of one model are split over ranks that work on the same batch."""

from __future__ import annotations

import datetime
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
from trainwright.strategies.units import WrapPolicy


class TensorParallelStrategy(FSDPStrategy):
    """Trains one model whose layers are split over all processes, which see the same batches.

    To split layers over some ranks and data over the others, use `FSDPStrategy(tp=…)`.

    Args:
        tp: over how many ranks; all that there are unless told.
        tensor_parallel_plan: which layers and how; what the task's `tensor_parallel_plan` returns unless told.
        auto_wrap_policy: which modules are compiled, or computed anew in backward; what the task's `shard_units`
            returns unless told.
        activation_checkpointing, meta_init, cpu_ram_efficient_loading, weights_after_stage, state_dict_type: see
            `FSDPStrategy`.
        timeout, hang_timeout, process_group_backend: see `DDPStrategy`.

    Raises:
        ConfigurationError: a value that means nothing.
    """

    distributed_type = None

    def __init__(
        self,
        *,
        tp: int | None = None,
        tensor_parallel_plan: Plan | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        activation_checkpointing: bool | int | WrapPolicy | None = False,
        meta_init: bool = False,
        cpu_ram_efficient_loading: bool = False,
        weights_after_stage: str = "main",
        state_dict_type: str = "sharded",
        timeout: float | datetime.timedelta | Duration | str | None = None,
        hang_timeout: float | datetime.timedelta | Duration | str | None = "auto",
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(
            tensor_parallel_plan=tensor_parallel_plan,
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing=activation_checkpointing,
            meta_init=meta_init,
            cpu_ram_efficient_loading=cpu_ram_efficient_loading,
            weights_after_stage=weights_after_stage,
            state_dict_type=state_dict_type,
            timeout=timeout,
            hang_timeout=hang_timeout,
            process_group_backend=process_group_backend,
        )
        self.wanted_tp = None if tp is None else check_tp_size(tp)

    def mesh_shape(self, settings: EngineSettings) -> MeshShape:
        world, wanted = settings.num_processes, self.wanted_tp
        if wanted not in (None, world):
            raise ConfigurationError(
                f"tp={wanted} with {world} process(es), over all of which {type(self).__name__} splits layers. Use "
                f"tp={world}"
                + (
                    f", or FSDPStrategy(tp={wanted}) to split data over the others"
                    if world % (wanted or 1) == 0
                    else ""
                )
                + "."
            )
        return self._shape(settings, world)

    def engine(self, settings: EngineSettings) -> Engine:
        return TensorParallelEngine(self, settings)


class TensorParallelEngine(FSDPEngine):
    """Splits the layers of a model over all ranks, which see the same data."""

    def _sharding(self) -> None:
        """Shard nothing over data-parallel ranks: there is one."""


class ModelParallelStrategy(FSDPStrategy):
    """`FSDPStrategy(tp=…)` by Lightning's arguments; layers are split by `TaskModule.tensor_parallel_plan`.

    Args:
        data_parallel_size: Groups of ranks between which data and parameters are sharded; `"auto"`: what
            `tensor_parallel_size` leaves, or else one for each node.
        tensor_parallel_size: Ranks over which layers are split; `"auto"`: what `data_parallel_size` leaves.
        save_distributed_checkpoint: Each rank writes its shards; False: rank 0 gathers full tensors and writes them.
            Default: True.
        process_group_backend, timeout: See `DDPStrategy`.

    Raises:
        ConfigurationError: A size is no number; when the run is configured, sizes do not match the number of processes.
    """

    @known_arguments(refuse_removed("ModelParallelStrategy", OF_LIGHTNING))
    def __init__(
        self,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int | Literal["auto"] = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: float | datetime.timedelta | Duration | str | None = None,
    ) -> None:
        super().__init__(
            state_dict_type="sharded" if save_distributed_checkpoint else "full",
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        for name, size in (("data_parallel_size", data_parallel_size), ("tensor_parallel_size", tensor_parallel_size)):
            if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ConfigurationError(f"{name}={size!r}: write a number of ranks, such as 2, or 'auto'.")
        self.data_parallel_size = data_parallel_size
        self.tensor_parallel_size = tensor_parallel_size

    def mesh_shape(self, settings: EngineSettings) -> MeshShape:
        world, data, split = settings.num_processes, self.data_parallel_size, self.tensor_parallel_size
        if data == "auto":
            data = settings.num_nodes if split == "auto" else world // split
        tp = max(1, world // data) if split == "auto" else split
        if data * tp != world:
            fitting = " or ".join(f"{n} × {world // n}" for n in range(1, world + 1) if world % n == 0)
            raise ConfigurationError(
                f"data_parallel_size={self.data_parallel_size!r} × tensor_parallel_size={self.tensor_parallel_size!r} "
                f"do not make up the run's {world} process(es). Use {fitting}."
            )
        return self._shape(settings, tp)
