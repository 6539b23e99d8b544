"""ParallelismConfig: the axes of the mesh in the names of Hugging Face Accelerate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.kwargs_handler import KwargsHandler, from_variable
from trainwright.strategies.ddp.strategy import DDPStrategy
from trainwright.strategies.experts.layers import check_ep_size
from trainwright.strategies.fsdp.strategy import FSDPStrategy
from trainwright.strategies.fsdp.tensor_parallel import TensorParallelStrategy
from trainwright.strategies.megatron.strategy import MegatronStrategy
from trainwright.strategies.mesh import MeshShape
from trainwright.strategies.strategy import Strategy

_VARIABLE = "PARALLELISM_CONFIG_"
_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")  # outermost first
_LATER = ("cp", "sp")


@dataclass(frozen=True)
class ParallelismConfig(KwargsHandler):
    """Numbers of ranks along each axis, whose product is the number of processes.

    A field that is None takes the value of its environment variable (`PARALLELISM_CONFIG_TP_SIZE`, …), and otherwise 1.

    Attributes:
        dp_replicate_size: Replicas of the model, which see different data.
        dp_shard_size: Ranks that shard a replica and see different data.
        tp_size: Ranks that split the layers of a model.
        pp_size: Stages of a pipeline (see `MegatronStrategy`), which divides the batches of a step into as many
            micro-batches; Accelerate has no such field.
        ep_size: Ranks over which the experts of a mixture are divided (see `FSDPStrategy`). It divides `dp_shard_size`
            and is not a factor of the number of processes. Accelerate has no such field.
        cp_size, sp_size: Ranks that split sequences. Not supported; only 1.
        cp_backend, sp_backend: Accepted: `"torch"` and `"deepspeed"`.
        tp_handler, cp_handler, sp_handler: Not supported; only None.
    """

    dp_replicate_size: int | None = from_variable(f"{_VARIABLE}DP_REPLICATE_SIZE", int)
    dp_shard_size: int | None = from_variable(f"{_VARIABLE}DP_SHARD_SIZE", int)
    tp_size: int | None = from_variable(f"{_VARIABLE}TP_SIZE", int)
    cp_size: int | None = from_variable(f"{_VARIABLE}CP_SIZE", int)
    cp_backend: str | None = "torch"
    sp_size: int | None = from_variable(f"{_VARIABLE}SP_SIZE", int)
    sp_backend: str | None = "deepspeed"
    tp_handler: object = None
    cp_handler: object = None
    sp_handler: object = None
    pp_size: int | None = from_variable(f"{_VARIABLE}PP_SIZE", int)
    ep_size: int | None = from_variable(f"{_VARIABLE}EP_SIZE", int)

    def __post_init__(self) -> None:
        super().__post_init__()
        for axis in (*_AXES, "ep"):
            name = f"{axis}_size"
            size = getattr(self, name)
            if size is None:
                object.__setattr__(self, name, 1)
            elif isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigurationError(f"{name}={size!r}: write a whole number of at least 1.")
            elif size > 1 and axis in _LATER:
                raise ConfigurationError(
                    f"{name}={size}: sequences cannot be split yet. Use tp_size to split layers, or dp_shard_size to "
                    "shard parameters."
                )
        for name in ("tp_handler", "cp_handler", "sp_handler"):
            if getattr(self, name) is not None:
                raise ConfigurationError(f"{name} is not supported. Remove it.")
        ep, shards = self._size("ep"), self._size("dp_shard")
        if ep > 1 and self.pp_enabled:
            raise ConfigurationError(
                f"ep_size={ep} and pp_size={self.pp_size}: experts cannot be divided within the stages of a pipeline. "
                "Use pp_size=1."
            )
        check_ep_size(ep, self._size("tp"))
        if shards % ep:
            raise ConfigurationError(
                f"ep_size={ep} divides the ranks that shard a replica, and dp_shard_size={shards} is not divisible by "
                f"it. Use a divisor of {shards}, or dp_shard_size={-(-shards // ep) * ep}."
            )

    def _size(self, axis: str) -> int:
        size: int = getattr(self, f"{axis}_size")
        return size

    @property
    def total_size(self) -> int:
        """The number of processes."""
        return math.prod(map(self._size, _AXES))

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that see different data."""
        return self._size("dp_replicate") * self._size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """The number of ranks that work on one batch together."""
        return self.total_size // self.data_parallel_size

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes that are longer than 1, outermost first."""
        return [axis for axis in _AXES if self._size(axis) > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """The active axes along which ranks see different data."""
        return [axis for axis in self.active_mesh_dims if axis.startswith("dp_")]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The active axes along which ranks work on one batch."""
        return [axis for axis in self.active_mesh_dims if not axis.startswith("dp_")]

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The active axes of a sharded model's replicas and shards."""
        return self.dp_dim_names

    @property
    def dp_replicate_enabled(self) -> bool:
        """True if there are several replicas."""
        return self._size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """True if replicas are sharded."""
        return self._size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """True if layers are split."""
        return self._size("tp") > 1

    @property
    def pp_enabled(self) -> bool:
        """True if the model is divided into stages."""
        return self._size("pp") > 1

    @property
    def cp_enabled(self) -> bool:
        """False: sequences are not split."""
        return False

    @property
    def sp_enabled(self) -> bool:
        """False: sequences are not split."""
        return False

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Return torch's mesh with the active axes. Collective."""
        return self._shape.device_mesh(device_type)

    @property
    def _shape(self) -> MeshShape:
        sizes = {axis: self._size(axis) for axis in _AXES if axis not in _LATER}
        return MeshShape(**sizes)

    def strategy(self, num_processes: int) -> Strategy:
        """Return the strategy of a model that no other plugin describes.

        Raises:
            ConfigurationError: The product of the sizes is not the number of processes, or sharding has no plugin.
        """
        if self.pp_enabled:
            sizes: dict[str, Any] = {axis: self._size(axis) for axis in ("pp", "tp", "dp_shard", "dp_replicate")}
            return self.arranged(MegatronStrategy(**sizes, num_micro_batches=sizes["pp"]), num_processes)
        if self.dp_shard_enabled:
            raise ConfigurationError(
                f"dp_shard_size={self.dp_shard_size} shards a model. Pass Accelerator(fsdp_plugin=…) too."
            )
        if self.tp_enabled and not self.dp_replicate_enabled:
            return self.arranged(TensorParallelStrategy(tp=self._size("tp")), num_processes)
        return self.arranged(FSDPStrategy() if self.tp_enabled else DDPStrategy(), num_processes)

    def arranged(self, strategy: Strategy, num_processes: int) -> Strategy:
        """Return a plugin's strategy with the axes of this object.

        Raises:
            ConfigurationError: The product of the sizes is not the number of processes.
        """
        if self.total_size != num_processes:
            sizes = " × ".join(f"{axis}_size={self._size(axis)}" for axis in _AXES if axis not in _LATER)
            raise ConfigurationError(
                f"ParallelismConfig has {sizes} = {self.total_size} ranks, and there are {num_processes} processes. "
                f"Start {self.total_size} processes, or change the sizes."
            )
        if isinstance(strategy, MegatronStrategy) or not isinstance(strategy, FSDPStrategy):
            return strategy
        if self.pp_enabled:
            raise ConfigurationError(
                f"pp_size={self.pp_size} divides a model into stages, which FSDPStrategy does not. Leave "
                "fsdp_plugin out: dp_shard_size shards the stages."
            )
        options: dict[str, Any] = {"tp": self._size("tp"), "ep": self._size("ep")}
        if self.dp_replicate_enabled:
            options |= {
                "sharding_strategy": "HYBRID_SHARD",
                "device_mesh": (self._size("dp_replicate"), self._size("dp_shard")),
            }
        return strategy.with_options(**options)
