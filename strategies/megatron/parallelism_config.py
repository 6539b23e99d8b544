"""ParallelismConfig: sizes of the mesh axes with Hugging Face Accelerate's names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.kwargs_handler import KwargsHandler
from trainwright.strategies.ddp.strategy import DDPStrategy
from trainwright.strategies.experts.layers import check_ep_size
from trainwright.strategies.fsdp.options import check_sequence_ranks, check_sizes
from trainwright.strategies.fsdp.strategy import FSDPStrategy
from trainwright.strategies.fsdp.tensor_parallel import TensorParallelStrategy
from trainwright.strategies.megatron.option_table import PARALLELISM
from trainwright.strategies.megatron.strategy import MegatronStrategy
from trainwright.strategies.mesh import MeshShape
from trainwright.strategies.strategy import Strategy

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")  # outermost first


def _is_several(axis: str, doc: str) -> property:
    """Return a property that is True if an axis has several ranks."""
    return property(lambda config: getattr(config, f"{axis}_size") > 1, doc=doc)


@dataclass
class ParallelismConfig(KwargsHandler):
    """Number of ranks along each axis. The product of the sizes is the number of processes.

    A size that is None takes the value of its environment variable (`PARALLELISM_CONFIG_TP_SIZE`, …), or 1 if the
    variable is not set.

    Attributes:
        dp_replicate_size: Number of replicas of the model, which see different data.
        dp_shard_size: Number of ranks that shard a replica and see different data.
        tp_size: Number of ranks that split the layers of a model.
        pp_size: Number of pipeline stages (see `MegatronStrategy`), and of micro-batches per batch. Not in Accelerate.
        ep_size: Number of ranks over which experts are divided (see `FSDPStrategy`). `dp_shard_size` must be divisible
            by `ep_size`, which does not count in the product of the sizes. Not in Accelerate.
        cp_size, sp_size: Number of ranks that split the sequences of a batch (see `FSDPStrategy` and
            `Accelerator.maybe_context_parallel`). The ranks hold shards, too. Only one of the sizes can be above 1.
        cp_backend, sp_backend: Accepted without effect: Trainwright's attention is used.
        tp_handler, cp_handler, sp_handler: Not supported. Must be None.

    Raises:
        ConfigurationError: A size is invalid, or the sizes contradict each other.
    """

    dp_replicate_size: int | None = PARALLELISM.field("dp_replicate_size")
    dp_shard_size: int | None = PARALLELISM.field("dp_shard_size")
    tp_size: int | None = PARALLELISM.field("tp_size")
    cp_size: int | None = PARALLELISM.field("cp_size")
    cp_backend: str | None = "torch"
    sp_size: int | None = PARALLELISM.field("sp_size")
    sp_backend: str | None = "deepspeed"
    tp_handler: object = None
    cp_handler: object = None
    sp_handler: object = None
    pp_size: int | None = PARALLELISM.field("pp_size")
    ep_size: int | None = PARALLELISM.field("ep_size")

    def __post_init__(self) -> None:
        super().__post_init__()
        for axis in (*_AXES, "ep"):
            name = f"{axis}_size"
            if getattr(self, name) is None:
                setattr(self, name, 1)
            check_sizes(**{name: getattr(self, name)})
        check_sequence_ranks(self._size("cp"), self._size("sp"))
        for name in ("tp_handler", "cp_handler", "sp_handler"):
            if getattr(self, name) is not None:
                raise ConfigurationError(f"{name} is not supported. Remove it.")
        ep = self._size("ep")
        shards = self._size("dp_shard")
        if ep > 1 and self.pp_enabled:
            raise ConfigurationError(
                f"ep_size={ep} and pp_size={self.pp_size}: experts cannot be divided within pipeline stages. Use "
                "pp_size=1."
            )
        check_ep_size(ep, self._size("tp"))
        if shards % ep:
            raise ConfigurationError(
                f"dp_shard_size={shards} is not divisible by ep_size={ep}. Use a divisor of {shards} for ep_size, or "
                f"dp_shard_size={-(-shards // ep) * ep}."
            )

    def _size(self, axis: str) -> int:
        """Return the size of an axis, which `__post_init__` has set."""
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
        """The axes with more than one rank, outermost first."""
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
        """The axes of `build_device_mesh` over which FSDP replicates and shards a model.

        Ranks that split sequences hold shards, too: they belong to the axis `dp_shard`.
        """
        names = ["dp_replicate"] if self.dp_replicate_enabled else []
        if self.dp_shard_enabled or self.cp_enabled or self.sp_enabled:
            names.append("dp_shard")
        return names

    dp_replicate_enabled = _is_several("dp_replicate", "True if there are several replicas.")
    dp_shard_enabled = _is_several("dp_shard", "True if replicas are sharded.")
    tp_enabled = _is_several("tp", "True if layers are split.")
    pp_enabled = _is_several("pp", "True if the model is divided into stages.")
    cp_enabled = _is_several("cp", "True if sequences are split, and attention is a ring of ranks.")
    sp_enabled = _is_several("sp", "True if sequences are split, and attention exchanges heads.")

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Return torch's mesh with the active axes. Collective."""
        shape = MeshShape(
            pp=self._size("pp"),
            dp_replicate=self._size("dp_replicate"),
            dp_shard=self._size("dp_shard"),
            cp=self._size("cp") * self._size("sp"),  # one axis for both, since only one of them is above 1
            tp=self._size("tp"),
        )
        return shape.device_mesh(device_type)

    def strategy(self, num_processes: int) -> Strategy:
        """Return the strategy to use if no other plugin selects a strategy.

        Raises:
            ConfigurationError: The product of the sizes is not the number of processes, or the sizes need an FSDP
                plugin.
        """
        return self.arranged(self._unarranged(), num_processes)

    def _unarranged(self) -> Strategy:
        """Return a strategy for the active axes. If it is an `FSDPStrategy`, `arranged` sets its sizes."""
        if self.pp_enabled:
            sizes: dict[str, Any] = {axis: self._size(axis) for axis in _AXES}
            return MegatronStrategy(**sizes, num_micro_batches=sizes["pp"])
        if self.dp_shard_enabled:
            raise ConfigurationError(
                f"dp_shard_size={self.dp_shard_size} shards a model. Pass Accelerator(fsdp_plugin=…) too."
            )
        if self.active_mesh_dims == ["tp"]:
            return TensorParallelStrategy(tp=self._size("tp"))
        splits_models_or_sequences = self.tp_enabled or self.cp_enabled or self.sp_enabled
        if splits_models_or_sequences:
            return FSDPStrategy()
        return DDPStrategy()

    def arranged(self, strategy: Strategy, num_processes: int) -> Strategy:
        """Return another plugin's strategy with the sizes of this object. Only an `FSDPStrategy` is changed.

        Raises:
            ConfigurationError: The sizes are invalid, or their product is not the number of processes. `pp_size` is
                above 1 and the strategy is an `FSDPStrategy` of another plugin.
        """
        self.__post_init__()  # checks sizes that were assigned after the object was created
        if self.total_size != num_processes:
            shown_axes = [axis for axis in _AXES if axis != "sp" or self.sp_enabled]
            sizes = " × ".join(f"{axis}_size={self._size(axis)}" for axis in shown_axes)
            raise ConfigurationError(
                f"ParallelismConfig has {sizes} = {self.total_size} ranks, but there are {num_processes} processes. "
                f"Start {self.total_size} processes, or change the sizes."
            )
        # A MegatronStrategy is an FSDPStrategy that already has its sizes.
        if isinstance(strategy, MegatronStrategy) or not isinstance(strategy, FSDPStrategy):
            return strategy
        if self.pp_enabled:
            raise ConfigurationError(
                f"pp_size={self.pp_size} is not supported with fsdp_plugin. Remove fsdp_plugin: dp_shard_size shards "
                "the stages."
            )
        options: dict[str, Any] = {axis: self._size(axis) for axis in ("tp", "cp", "sp", "ep")}
        if self.dp_replicate_enabled:
            options["sharding_strategy"] = "HYBRID_SHARD"
            options["device_mesh"] = (self._size("dp_replicate"), self._size("dp_shard"))
        return strategy.with_options(**options)
