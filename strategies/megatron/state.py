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
    """Stages that hold each parameter and buffer of a task, and the stage that owns it.

    A stage owns a tensor if the rank of the stage provides its value: for checkpoints, callbacks and the gradient norm.
    A tensor in several stages, such as a weight that an embedding and an output layer share, has one owner.

    Attributes:
        owners: Plain name → the stage that owns the tensor. It is the first stage that holds the tensor. A tensor in no
            stage is on every rank. The first stage owns such parameters. The last stage owns such buffers, because it
            runs the full step, which may change buffers.
        in_no_stage: Plain names of the tensors that are in no stage, such as a parameter of the task itself.
        ties: Name in `task.named_parameters()` → the stages of a parameter that is in several stages, in order.
    """

    owners: Mapping[str, int]
    in_no_stage: Collection[str]
    ties: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, task: nn.Module, modules: Sequence[nn.Module]) -> Self:
        """Find the stages of a task's tensors. `modules` contains one module for each stage."""
        stages_by_id: dict[int, list[int]] = {}  # id of a tensor → the stages that hold it
        for stage, module in enumerate(modules):
            for tensor in (*module.parameters(), *module.buffers()):
                stages_by_id.setdefault(id(tensor), []).append(stage)
        owners: dict[str, int] = {}
        in_no_stage: set[str] = set()
        # With duplicates, because a state_dict contains every name of a tied tensor.
        named = [*task.named_parameters(remove_duplicate=False), *task.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            if id(tensor) in stages_by_id:
                owners[plain_name(name)] = stages_by_id[id(tensor)][0]
            else:
                owners[plain_name(name)] = 0 if isinstance(tensor, nn.Parameter) else len(modules) - 1
                in_no_stage.add(plain_name(name))
        ties: dict[str, list[int]] = {}
        for name, parameter in task.named_parameters():
            stages = stages_by_id.get(id(parameter), [])
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
        tensor_stages: Stages of the task's tensors.
        mesh: All axes of the run.
        processes: Processes of the run.
    """

    def __init__(
        self,
        *args: Any,
        links: StageLinks,
        tensor_stages: TensorStages,
        mesh: DeviceMesh,
        processes: Processes,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._links = links
        self._tensor_stages = tensor_stages
        self._processes = processes
        # True on one rank of each stage, which saves the unsharded tensors of the stage.
        self._saves_unsharded = True
        for axis in mesh.mesh_dim_names or ():
            if axis != "pp" and mesh.get_local_rank(axis) != 0:
                self._saves_unsharded = False
        self._owner_by_id: dict[int, int] = {}  # id of a tensor of the task → the stage that owns it
        self._find_owners()

    def _find_owners(self) -> None:
        """Find the stage that owns each tensor of the task. The task may have replaced buffers since the last call."""
        self._owner_by_id.clear()
        for name, tensor in [*self._task.named_parameters(), *self._task.named_buffers()]:
            stage = self._tensor_stages.owner(name)
            if stage is not None:
                self._owner_by_id[id(tensor)] = stage

    def _is_owned_here(self, name: str) -> bool:
        """Return whether a stage of this rank owns a tensor. False for a tensor that no stage owns."""
        return self._tensor_stages.owner(name) in self._links.own

    def _is_owned_elsewhere(self, name: str) -> bool:
        """Return whether a stage of another rank owns a tensor. This rank may hold the tensor, too."""
        stage = self._tensor_stages.owner(name)
        return stage is not None and stage not in self._links.own

    def _full(self, tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
        return self._gather_from(self._owner_by_id.get(id(tensor)), tensor, keep=keep)

    def _gather_from(self, stage: int | None, tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
        """Return the full value of a stage's tensor, on the host. Collective.

        Args:
            stage: The stage that owns the tensor. None if every rank has the tensor.
            tensor: The tensor. Ignored on ranks without the stage.
            keep: False if this rank gets a tensor on the device `meta` instead of the value.
        """
        if stage is None:
            return super()._full(tensor, keep=keep)
        has_stage = self._links.ranks[stage] == self._links.rank
        # The ranks of the stage first gather their shards. Each of them then sends the value along its pipeline.
        full = super()._full(tensor, keep=True) if has_stage else None
        full = self._links.broadcast(full, stage)
        return full.cpu() if keep else torch.empty_like(full, device="meta")

    # Contents of a checkpoint

    def shards_of(self, tree: Any) -> Any:
        # `tree` is (model_state(), optimizer_states()):
        # ({"head.weight": tensor}, [{"state": {"head.weight": {"exp_avg": tensor, "step": tensor}}, …}]).
        model, optimizers = tree
        values_by_name = list(model.items())
        for optimizer in optimizers:
            values_by_name.extend(optimizer["state"].items())

        # Ranks with the same shards divide the writing of these shards. They must therefore pass the same DTensors in
        # the same order, which are those that their stages own.
        own_tensors: list[DTensor] = []
        for name, value in values_by_name:
            if self._is_owned_here(name):
                own_tensors.extend(tensor for tensor in iterate_tensors(value) if isinstance(tensor, DTensor))
        replacements: dict[int, TensorShards] = {}  # id of a tensor → the shards that this rank saves
        for tensor, shards in zip(own_tensors, super().shards_of(own_tensors), strict=True):
            replacements[id(tensor)] = shards

        replaced_model = {name: self._replaced(value, name, replacements) for name, value in model.items()}
        replaced_optimizers = []
        for optimizer in optimizers:
            state = {name: self._replaced(value, name, replacements) for name, value in optimizer["state"].items()}
            replaced_optimizers.append({**optimizer, "state": state})
        return replaced_model, replaced_optimizers

    def _replaced(self, tree: object, name: str, replacements: dict[int, TensorShards]) -> Any:
        """Return the values of a parameter or buffer with `TensorShards` in place of tensors.

        `replacements` contains the DTensors that this rank owns. Other tensors are added: unsharded ones, and those of
        other ranks, of which this rank saves nothing.
        """
        if self._tensor_stages.owner(name) is None:
            return tree  # every rank has the value, and the main rank saves it
        saves_full = self._saves_unsharded and self._is_owned_here(name)

        def replace(tensor: torch.Tensor) -> TensorShards:
            # All names of a tied weight have the same tensor, on every rank, and get the same `TensorShards`.
            if id(tensor) not in replacements:
                shape = tuple(tensor.shape)
                held = ((full_region(shape), tensor.detach()),) if saves_full else ()
                replacements[id(tensor)] = TensorShards(shape, tensor.dtype, held)
            return replacements[id(tensor)]

        return map_tensors(replace, tree)

    def model_state(self) -> dict[str, Any]:
        self._find_owners()
        return super().model_state()

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        absent_names: set[str] = set()  # of tensors that only other ranks hold
        for name, value in self._task.state_dict().items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                absent_names.add(plain_name(name))
        # Names and shapes are checked also for absent tensors, but their values are not read.
        values = dict(state)
        for name, value in state.items():
            if plain_name(name) in absent_names and isinstance(value, torch.Tensor):
                values[name] = _on_meta(value)
        return super().load_model_state(values, strict)

    def optimizer_states(self) -> list[dict[str, Any]]:
        # Not ShardedState's: it would gather each tensor among the ranks of this rank's stage only.
        states = FullState.optimizer_states(self)
        # Ranks without a stage also call the collectives that gather its tensors, for which they need the same keys and
        # shapes. For each optimizer: {"head.weight": {"exp_avg": tensor on `meta`}}.
        own_shapes: list[dict[str, Any]] = []
        for state in states:
            own_state = {name: values for name, values in state["state"].items() if not self._is_owned_elsewhere(name)}
            own_shapes.append(map_tensors(_on_meta, own_state))
        shapes_by_rank = self._processes.gather_object(own_shapes)
        complete_states = []
        for i, (optimizer, state) in enumerate(zip(self._optimizers, states, strict=True)):
            restore_foreach(optimizer, state)
            self._check_sharded(
                optimizer,
                state["state"],
                "but the parameter is sharded. Create the state with torch.zeros_like(parameter).",
            )
            values_by_name: dict[str, Any] = {}
            for name, own_values in state["state"].items():
                stage = self._tensor_stages.owner(name)
                values = own_values
                if stage is not None and stage not in self._links.own:
                    values = shapes_by_rank[self._links.global_rank(stage)][i][name]
                if not self.saves_shards:
                    values = map_tensors(partial(self._gather_from, stage, keep=self._is_main), values)
                values_by_name[name] = values
            complete_states.append({**state, "state": values_by_name})
        return complete_states

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        absent_names: set[str] = set()  # of parameters that only other ranks hold
        for parameter, name in self._parameter_names().items():
            if parameter.is_meta:
                absent_names.add(plain_name(name))
        values_by_name: dict[str, Any] = {}
        for name, values in state.get("state", {}).items():
            values_by_name[name] = {} if plain_name(name) in absent_names else values
        super().load_optimizer_state(optimizer, {**state, "state": values_by_name})

    # Single tensors

    def missing_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if id(tensor) in self._owner_by_id:  # even if this rank holds it: `gather_tensor` is collective for it
            return _on_meta(tensor)
        return super().missing_like(tensor)

    def full_gradients(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        parameters = {plain_name(name): parameter for name, parameter in self._task.named_parameters()}
        # Every rank gathers the same gradients: those that their owners have.
        own_names: list[str] = []
        for name, parameter in parameters.items():
            if parameter.grad is not None and not self._is_owned_elsewhere(name):
                own_names.append(name)
        names_by_rank = self._processes.gather_object(own_names)
        gradients: dict[str, torch.Tensor] = {}
        for name, parameter in parameters.items():
            stage = self._tensor_stages.owner(name)
            owner = self._processes.rank if stage is None else self._links.global_rank(stage)
            if name in names_by_rank[owner]:
                # Ranks without the stage have no gradient. `_gather_from` ignores what they pass.
                gradient = parameter if parameter.grad is None else parameter.grad
                gradients[name] = self._gather_from(stage, gradient, keep=keep).detach()
        return gradients

    def collect(self, name: str, tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
        """Return the full value of the parameter or buffer `tensor` on the host. Collective.

        Unlike `gather_tensor`, it finds the owner by name, which also works for a tensor that was replaced.

        Args:
            name: Name of the tensor in the task.
            tensor: The tensor, on the device `meta` on ranks that do not hold it.
            keep: False if this rank gets a tensor on the device `meta` instead of the value.
        """
        return self._gather_from(self._tensor_stages.owner(name), tensor, keep=keep).detach()


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return an unsharded tensor on the device `meta` with the shape and dtype of a tensor or DTensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
