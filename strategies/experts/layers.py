"""Find the modules with the experts of a mixture-of-experts model, and divide the experts over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.experts.token_exchange import Connect, GatherExperts, exchange
from trainwright.strategies.mesh import MeshShape, data_axes, forget_groups
from trainwright.strategies.shards import local_shard
from trainwright.strategies.units import replace_parameters

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


def check_ep_size(ep: int, tp: int) -> int:
    """Return `ep`. Raise an error if it is not valid."""
    if isinstance(ep, bool) or not isinstance(ep, int) or ep < 1:
        raise ConfigurationError(f"ep={ep!r}: use the number of ranks over which experts are divided, such as 2.")
    if ep > 1 and tp > 1:
        raise ConfigurationError(f"ep={ep} and tp={tp}: tensor parallelism does not support divided experts. Use tp=1.")
    return ep


def check_mesh(ep: int, shape: MeshShape) -> MeshShape:
    """Return the mesh. Raise an error if the number of ranks that shard a replica is not divisible by `ep`."""
    shards = shape.dp_shard * shape.cp
    if shards % ep:
        raise ConfigurationError(
            f"One replica is sharded over {shards} ranks, which is not divisible by ep={ep}. Use a divisor of "
            f"{shards}, or sharding_strategy='HYBRID_SHARD' with another device_mesh."
        )
    return shape


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold the experts of a mixture-of-experts model, by name.

    Such a module has the attribute `num_experts`, parameters whose first dimension has this size, and the signature
    `forward(hidden_states, top_k_index, top_k_weights)`. This includes Mixtral, Qwen2-MoE and Qwen3-MoE of
    transformers 5.
    """
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def _holds_experts(module: nn.Module) -> bool:
    num_experts = getattr(module, "num_experts", None)
    parameters = list(module.parameters(recurse=False))
    if not parameters or not isinstance(num_experts, int):
        return False
    for parameter in parameters:
        if parameter.dim() < 2 or parameter.shape[0] != num_experts:
            return False
    return tuple(inspect.signature(module.forward).parameters)[:3] == _ARGUMENTS


def check_experts(model: nn.Module, ep: int, shards: int) -> list[nn.Module]:
    """Return the modules that hold experts, after checking that the experts can be divided.

    Args:
        model: The model or task.
        ep: Number of ranks over which the experts are divided.
        shards: Number of ranks that shard one replica, a multiple of `ep`.

    Raises:
        ConfigurationError: The model has no experts, or the number of experts is not divisible.
    """
    modules = find_experts(model)
    if not modules:
        raise ConfigurationError(
            f"ep={ep} divides experts, but {type(model).__name__} has none: no module has an attribute num_experts, "
            f"parameters with num_experts rows, and forward({', '.join(_ARGUMENTS)}). Use ep=1."
        )
    for name, module in modules.items():
        count: Any = module.num_experts
        if count % ep:
            fitting = " or ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise ConfigurationError(f"{name} has {count} experts, which are not divisible by ep={ep}. Use {fitting}.")
        if count % shards:
            raise ConfigurationError(
                f"{name} has {count} experts, which cannot be sharded over {shards} ranks. Use "
                f"sharding_strategy='HYBRID_SHARD' and device_mesh=(replicas, {ep}), whose product is the number of "
                "processes."
            )
    return list(modules.values())


class DividedExperts:
    """The experts of one model, divided over `ep` ranks.

    As in FSDP, the parameters of experts are sharded along the first dimension over all ranks of a replica. In a
    step, each group of `shards / ep` adjacent ranks gathers `num_experts / ep` consecutive experts: the first group
    gathers the first experts, and so on. The `ep` ranks with different experts exchange tokens.
    Experts stay gathered until backward ends.

    Args:
        model: The model or task.
        ep: Number of ranks over which the experts are divided.
        mesh: All axes of the run, by name. Only `dp_shard` and `dp_replicate` are supported.
        ranks: The data-parallel ranks.
        dtype: Data type of gathered experts. None means the data type of the parameters.

    Raises:
        ConfigurationError: See `check_experts`.

    Attributes:
        parameters: The parameters that are sharded so far.
    """

    def __init__(
        self, model: nn.Module, ep: int, mesh: DeviceMesh, ranks: DataRanks, dtype: torch.dtype | None
    ) -> None:
        self._mesh = data_axes(mesh)
        names = self._mesh.mesh_dim_names or ()
        shards = self._mesh.size(names.index("dp_shard"))
        self._model = model
        self._modules = check_experts(model, ep, shards)
        self._dtype = dtype
        self._divisor = shards  # gradients are sums over the ranks of a replica, and divided to average them
        self._replicas = ranks.size // shards
        self.parameters: list[nn.Parameter] = []
        self._divided: set[int] = set()  # ids of the modules that `divide` has changed
        # Two process groups divide the ranks of a replica. With 4 ranks and ep=2, ranks 0 and 1 gather the first
        # experts (`_share`), and ranks 0 and 2 exchange tokens (`_exchange`).
        self._experts_mesh: DeviceMesh | None = None
        self._share: dist.ProcessGroup | None = None  # None if each rank holds its experts alone
        if shards == ep:
            self._exchange = self._mesh.get_group("dp_shard")
        else:
            sizes = (self._replicas, ep, shards // ep)
            self._experts_mesh = init_device_mesh(mesh.device_type, sizes, mesh_dim_names=("replicas", "ep", "share"))
            self._exchange = self._experts_mesh.get_group("ep")
            self._share = self._experts_mesh.get_group("share")

    def divide(self, part: nn.Module) -> Sequence[nn.Parameter]:
        """Shard the experts in a module, whose tensors are on the device with rank 0's values. Not collective.

        Returns:
            The expert parameters that this call and all earlier calls have sharded.
        """
        modules_of_part = set(part.modules())
        for module in self._modules:
            if module not in modules_of_part or id(module) in self._divided:
                continue
            self._divided.add(id(module))
            new = {id(p): self._shard(p) for p in module.parameters(recurse=False)}
            replace_parameters(self._model, new)
            self.parameters += new.values()
            # Not compiled: the sizes of its collectives are read from the device.
            eager: Any = torch.compiler.disable(partial(self._forward, module))  # type: ignore[no-untyped-call]  # torch has no types here
            module.forward = eager
        return self.parameters

    def _shard(self, full: nn.Parameter) -> nn.Parameter:
        """Return this rank's shard, a copy, so that the full parameter is freed."""
        placements: list[Placement] = []
        for name in self._mesh.mesh_dim_names or ():
            placements.append(Shard(0) if name == "dp_shard" else Replicate())
        local = full.detach().chunk(self._divisor)[self._mesh.get_local_rank("dp_shard")].clone()
        shard = DTensor.from_local(
            local, self._mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )
        return nn.Parameter(shard, requires_grad=full.requires_grad)

    def _forward(
        self, module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Run the forward of a module with divided experts. Collective."""
        gathered: dict[str, Any] = {}
        for name, parameter in module.named_parameters(recurse=False):
            shard = parameter.to_local()
            dtype = shard.dtype
            if self._dtype is not None and shard.is_floating_point():
                dtype = self._dtype
            gathered[name] = GatherExperts.apply(shard, self._share, dtype, self._divisor)  # type: ignore[no-untyped-call]  # torch has no types here
        # The same module with the experts of this rank. copy.copy would call FSDPModule.__new__, which may call the
        # constructor, and functional_call cannot replace `num_experts` and `forward`.
        view: Any = object.__new__(type(module))
        members = {name: value for name, value in vars(module).items() if name != "forward"}
        count = module.num_experts // self._exchange.size()
        vars(view).update(members, _parameters={}, num_experts=count, **gathered)

        def compute(tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if len(tokens) > 0:
                outputs: torch.Tensor = type(view).forward(view, tokens, experts, weights)
                return outputs
            # Experts without tokens are connected to the output, too: their gradients are reduced on every rank.
            empty: torch.Tensor = Connect.apply(tokens, *gathered.values())  # type: ignore[no-untyped-call]  # torch has no types here
            return empty

        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        index = top_k_index.reshape(len(rows), -1)
        weights = top_k_weights.reshape(len(rows), -1)
        summed = exchange(rows, index, weights, num_experts=module.num_experts, group=self._exchange, compute=compute)
        return summed.view_as(hidden_states)

    @torch.no_grad()
    def average_replicas(self) -> None:
        """Average the accumulated gradients over replicas. A repeated call does not change them. Collective."""
        if self._replicas == 1:
            return
        group = self._mesh.get_group("dp_replicate")
        for parameter in self.parameters:
            if parameter.grad is not None:
                grad = local_shard(parameter.grad)
                dist.all_reduce(grad, group=group)
                grad /= self._replicas

    def undo(self) -> None:
        """Restore the forwards, and release the process groups. Parameters stay sharded. Not collective."""
        for module in self._modules:
            vars(module).pop("forward", None)
        if self._experts_mesh is not None:
            forget_groups(self._experts_mesh)
        self._experts_mesh = None
        self._share = None
        del self._exchange
