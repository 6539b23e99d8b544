"""State of a model whose stages are on several ranks, for checkpoints and callbacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.checkpoint.format.regions import TensorShards, full_region
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.tree import iterate_tensors, map_tensors
from trainwright.processes.process_group import Processes
from trainwright.strategies.fsdp.state import ShardedState, restore_foreach
from trainwright.strategies.megatron.staged_model import StageLinks
from trainwright.strategies.state import FullState


@dataclass(frozen=True)
class TensorStages:
    """Stages that hold and own each parameter and buffer of a task.

    Attributes:
        owners: Plain name → the stage that owns the tensor: the first stage that holds it. Every rank has the tensors
            that are in no stage. The first stage owns such parameters, because it trains them. The last stage owns such
            buffers, because it runs the full step, which may change buffers.
        in_no_stage: Plain names of the tensors that are in no stage.
        ties: Name in `task.named_parameters()` → the stages of a parameter that is in several stages.
    """

    owners: Mapping[str, int]
    in_no_stage: Collection[str]
    ties: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, task: nn.Module, modules: Sequence[nn.Module]) -> Self:
        """Find the stages of a task's tensors. `modules` contains one module for each stage."""
        holders: dict[int, list[int]] = {}  # id of a tensor → stages
        for stage, module in enumerate(modules):
            for tensor in (*module.parameters(), *module.buffers()):
                holders.setdefault(id(tensor), []).append(stage)
        owners: dict[str, int] = {}
        in_no_stage: set[str] = set()
        named = [*task.named_parameters(remove_duplicate=False), *task.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            if id(tensor) in holders:
                owners[plain_name(name)] = holders[id(tensor)][0]
            else:
                owners[plain_name(name)] = 0 if isinstance(tensor, nn.Parameter) else len(modules) - 1
                in_no_stage.add(plain_name(name))
        ties: dict[str, list[int]] = {}
        for name, parameter in task.named_parameters():
            stages = holders.get(id(parameter), [])
            if len(stages) > 1:
                ties[name] = stages
        return cls(owners, in_no_stage, ties)

    def owner(self, name: str) -> int | None:
        """Return the stage that owns a tensor. None for a tensor that the task got after it was divided."""
        return self.owners.get(plain_name(name))

    def is_in_no_stage(self, name: str) -> bool:
        """Return True for the name of a tensor that was outside of all stages when the task was divided."""
        return plain_name(name) in self.in_no_stage


class PipelineState(ShardedState):
    """State of a pipelined model. On each rank, the tensors of other ranks' stages are on the device `meta`.

    Args:
        links: Communication with the other ranks of the pipeline.
        stages_of: Stages of the task's tensors.
        mesh: All axes of the run.
        processes: Processes of the run.
    """

    def __init__(
        self,
        *args: Any,
        links: StageLinks,
        stages_of: TensorStages,
        mesh: DeviceMesh,
        processes: Processes,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._links = links
        self._stages_of = stages_of
        self._processes = processes
        other_axes = [name for name in mesh.mesh_dim_names or () if name != "pp"]
        self._is_first = all(mesh.get_local_rank(name) == 0 for name in other_axes)
        self._find_owners()

    def _find_owners(self) -> None:
        """Find the stage that owns each tensor of the task. The task may have replaced buffers since the last call."""
        self._owner_of: dict[int, int] = {}
        for name, tensor in [*self._task.named_parameters(), *self._task.named_buffers()]:
            stage = self._stages_of.owner(name)
            if stage is not None:
                self._owner_of[id(tensor)] = stage

    def _is_elsewhere(self, name: str) -> bool:
        stage = self._stages_of.owner(name)
        return stage is not None and stage not in self._links.own

    def _collected(self, tensor: torch.Tensor, stage: int | None, *, keep: bool) -> torch.Tensor:
        """Return the full value of a stage's tensor, on the host. Collective.

        Args:
            tensor: The tensor. Ignored on ranks other than the stage's.
            stage: The stage that owns the tensor. None if every rank has the tensor.
            keep: False: this rank gets a tensor on the device `meta`.
        """
        if stage is None:
            return super()._full(tensor, keep=keep)
        is_source = self._links.ranks[stage] == self._links.rank
        full = super()._full(tensor, keep=True) if is_source else None
        full = self._links.broadcast(full, stage)
        return full.cpu() if keep else torch.empty_like(full, device="meta")

    def _full(self, tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
        return self._collected(tensor, self._owner_of.get(id(tensor)), keep=keep)

    # Contents of a checkpoint

    def shards_of(self, tree: Any) -> Any:
        model, optimizers = tree
        named = list(model.items())
        for optimizer in optimizers:
            named.extend(optimizer["state"].items())
        own_tensors: list[DTensor] = []
        for name, held in named:
            if self._is_elsewhere(name):
                continue  # only the owner of a tied weight saves its shards
            own_tensors.extend(tensor for tensor in iterate_tensors(held) if isinstance(tensor, DTensor))
        known: dict[int, Any] = {}  # id of a tensor → its shards
        for tensor, shards in zip(own_tensors, super().shards_of(own_tensors), strict=True):
            known[id(tensor)] = shards
        model_shards = {name: self._shards_of(value, name, known) for name, value in model.items()}
        optimizer_shards = []
        for optimizer in optimizers:
            state = {name: self._shards_of(held, name, known) for name, held in optimizer["state"].items()}
            optimizer_shards.append({**optimizer, "state": state})
        return model_shards, optimizer_shards

    def _shards_of(self, tree: object, name: str, known: dict[int, Any]) -> Any:
        """Return the shards of tensors that this rank saves. Those that are not in `known` are added to it."""
        if self._stages_of.owner(name) is None:
            return tree
        saves_full = self._is_first and not self._is_elsewhere(name)

        def shards(tensor: torch.Tensor) -> Any:
            if id(tensor) not in known:  # all names of a tied weight have the same object, on every rank
                shape = tuple(tensor.shape)
                held = ((full_region(shape), tensor.detach()),) if saves_full else ()
                known[id(tensor)] = TensorShards(shape, tensor.dtype, held)
            return known[id(tensor)]

        return map_tensors(shards, tree)

    def model_state(self) -> dict[str, Any]:
        self._find_owners()
        return super().model_state()

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        absent: set[str] = set()  # names of other ranks' tensors
        for name, value in self._task.state_dict().items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                absent.add(plain_name(name))
        values = dict(state)
        for name, value in state.items():
            if plain_name(name) in absent and isinstance(value, torch.Tensor):
                values[name] = _on_meta(value)
        return super().load_model_state(values, strict)

    def optimizer_states(self) -> list[dict[str, Any]]:
        states = FullState.optimizer_states(self)
        # Ranks without a stage also call the collectives that read its tensors, for which they need the shapes.
        own_shapes: list[dict[str, Any]] = []
        for state in states:
            own = {name: held for name, held in state["state"].items() if not self._is_elsewhere(name)}
            own_shapes.append(map_tensors(_on_meta, own))
        shapes = self._processes.gather_object(own_shapes)
        collected = []
        for i, (optimizer, state) in enumerate(zip(self._optimizers, states, strict=True)):
            restore_foreach(optimizer, state)
            self._check_sharded(
                optimizer,
                state["state"],
                "but the parameter is sharded. Create the state with torch.zeros_like(parameter).",
            )
            values: dict[str, Any] = {}
            for name, held in state["state"].items():
                stage = self._stages_of.owner(name)
                if stage is not None and stage not in self._links.own:
                    held = shapes[self._links.global_rank(stage)][i][name]
                if not self.saves_shards:
                    held = map_tensors(partial(self._collected, stage=stage, keep=self._is_main), held)
                values[name] = held
            collected.append({**state, "state": values})
        return collected

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        absent = {plain_name(name) for parameter, name in self._parameter_names().items() if parameter.is_meta}
        values = {name: {} if plain_name(name) in absent else held for name, held in state.get("state", {}).items()}
        super().load_optimizer_state(optimizer, {**state, "state": values})

    # Single tensors

    def missing_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if id(tensor) in self._owner_of:  # only a collective call can read it
            return _on_meta(tensor)
        return super().missing_like(tensor)

    def full_gradients(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        parameters = {plain_name(name): parameter for name, parameter in self._task.named_parameters()}
        own_names: list[str] = []
        for name, parameter in parameters.items():
            if parameter.grad is not None and not self._is_elsewhere(name):
                own_names.append(name)
        names_of_ranks = self._processes.gather_object(own_names)
        gradients: dict[str, torch.Tensor] = {}
        for name, parameter in parameters.items():
            stage = self._stages_of.owner(name)
            owner = self._processes.rank if stage is None else self._links.global_rank(stage)
            if name in names_of_ranks[owner]:
                # Ranks without the stage pass the parameter, which has the shape of the gradient.
                gradient = parameter if parameter.grad is None else parameter.grad
                gradients[name] = self._collected(gradient, stage, keep=keep).detach()
        return gradients

    def collect(self, name: str, tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
        """Return the full parameter or buffer on the host (see `gather_tensor`). Collective."""
        return self._collected(tensor, self._stages_of.owner(name), keep=keep).detach()


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a full tensor on the device `meta`, also for a DTensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
