"""State of a model whose stages are on several ranks, for checkpoints and callbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

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


class PipelineState(ShardedState):
    """State of a pipelined model. On each rank, the tensors of other ranks' stages are on the device `meta`.

    Args:
        links: Communication with the other ranks of the pipeline.
        owners: Plain name of a tensor → the stage that owns it.
        mesh: All axes of the run.
        processes: Processes of the run.
    """

    def __init__(
        self,
        *args: Any,
        links: StageLinks,
        owners: Mapping[str, int],
        mesh: DeviceMesh,
        processes: Processes,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._links, self._owners, self._processes = links, owners, processes
        others = [name for name in mesh.mesh_dim_names or () if name != "pp"]
        self._is_first = all(mesh.get_local_rank(name) == 0 for name in others)
        self._find_stages()

    def _find_stages(self) -> None:
        """Find the stage of each tensor of the task. The task may have replaced buffers since the last call."""
        named = [*self._task.named_parameters(), *self._task.named_buffers()]
        self._stages = {id(t): self._owners[plain_name(n)] for n, t in named if plain_name(n) in self._owners}

    def _is_elsewhere(self, name: str) -> bool:
        stage = self._owners.get(plain_name(name))
        return stage is not None and stage not in self._links.own

    def _collected(self, tensor: torch.Tensor, stage: int | None, *, keep: bool) -> torch.Tensor:
        """Return the full value of a stage's tensor, on the host. Collective.

        Args:
            tensor: The tensor. Ranks without the stage pass a tensor of the same shape and dtype, on any device.
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
        return self._collected(tensor, self._stages.get(id(tensor)), keep=keep)

    # Contents of a checkpoint

    def shards_of(self, tree: Any) -> Any:
        model, optimizers = tree
        named = [*model.items(), *(item for one in optimizers for item in one["state"].items())]
        # Only the owner of a tied weight saves its shards.
        here = [
            tensor
            for name, held in named
            for tensor in iterate_tensors(held)
            if isinstance(tensor, DTensor) and not self._is_elsewhere(name)
        ]
        known = dict(zip(map(id, here), super().shards_of(here), strict=True))
        states = [
            {**one, "state": {name: self._shards_of(held, name, known) for name, held in one["state"].items()}}
            for one in optimizers
        ]
        return {name: self._shards_of(value, name, known) for name, value in model.items()}, states

    def _shards_of(self, tree: object, name: str, known: dict[int, Any]) -> Any:
        if plain_name(name) not in self._owners:
            return tree
        is_ours = self._is_first and not self._is_elsewhere(name)

        def own_shard(tensor: torch.Tensor) -> Any:
            if id(tensor) not in known:  # all names of a tied weight have the same object, on every rank
                shape = tuple(tensor.shape)
                held = ((full_region(shape), tensor.detach()),) if is_ours else ()
                known[id(tensor)] = TensorShards(shape, tensor.dtype, held)
            return known[id(tensor)]

        return map_tensors(own_shard, tree)

    def model_state(self) -> dict[str, Any]:
        self._find_stages()
        return super().model_state()

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        absent = {
            plain_name(name)
            for name, value in self._task.state_dict().items()
            if isinstance(value, torch.Tensor) and value.is_meta
        }
        here = {name: _empty(value) if plain_name(name) in absent else value for name, value in state.items()}
        return super().load_model_state(here, strict)

    def optimizer_states(self) -> list[dict[str, Any]]:
        states = FullState.optimizer_states(self)
        shapes = self._processes.gather_object(
            [
                {name: map_tensors(_empty, held) for name, held in one["state"].items() if not self._is_elsewhere(name)}
                for one in states
            ]
        )
        found = []
        for k, (optimizer, state) in enumerate(zip(self._optimizers, states, strict=True)):
            restore_foreach(optimizer, state)
            self._check_sharded(
                optimizer,
                state["state"],
                "but the parameter is sharded. Create the state with torch.zeros_like(parameter).",
            )
            held = {}
            for name, own in state["state"].items():
                stage = self._owners.get(plain_name(name))
                if self._is_elsewhere(name):
                    own = shapes[self._links.global_rank(stage or 0)][k][name]
                keep = partial(self._collected, stage=stage, keep=self._is_main)
                held[name] = own if self.saves_shards else map_tensors(keep, own)
            found.append({**state, "state": held})
        return found

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        absent = {plain_name(name) for parameter, name in self._parameter_names().items() if parameter.is_meta}
        mine = {name: {} if plain_name(name) in absent else held for name, held in state.get("state", {}).items()}
        super().load_optimizer_state(optimizer, {**state, "state": mine})

    # Single tensors

    def missing_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if id(tensor) in self._stages:  # only a collective call can read it
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return super().missing_like(tensor)

    def full_gradients(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        parameters = {plain_name(name): p for name, p in self._task.named_parameters()}
        there = self._processes.gather_object(
            [name for name, p in parameters.items() if p.grad is not None and not self._is_elsewhere(name)]
        )
        found = {}
        for name, parameter in parameters.items():
            stage = self._owners.get(name)
            owner = self._processes.rank if stage is None else self._links.global_rank(stage)
            if name in there[owner]:
                grad = parameter if parameter.grad is None else parameter.grad
                found[name] = self._collected(grad, stage, keep=keep).detach()
        return found

    def collect(self, name: str, tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
        """Return the full parameter or buffer on the host (see `gather_tensor`). Collective."""
        return self._collected(tensor, self._owners.get(plain_name(name)), keep=keep).detach()


def _empty(tensor: object) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def owners_of(task: nn.Module, modules: Sequence[nn.Module]) -> tuple[dict[str, int], set[str], dict[str, list[int]]]:
    """Assign each parameter and buffer to the stage that owns it: the first stage that holds it.

    Every rank has the tensors that are in no stage. The first stage owns such parameters, because it trains them. The
    last stage owns such buffers, because it runs the full step, which may change buffers.

    Args:
        task: The task, which contains the modules of the stages.
        modules: One module for each stage.

    Returns:
        The owner of each tensor by plain name, the plain names of tensors in no stage, and the stages of each parameter
        that is in several stages, by its name in `task.named_parameters()`.
    """
    stages: dict[int, list[int]] = {}
    for stage, module in enumerate(modules):
        for tensor in (*module.parameters(), *module.buffers()):
            stages.setdefault(id(tensor), []).append(stage)
    named = [*task.named_parameters(remove_duplicate=False), *task.named_buffers(remove_duplicate=False)]
    owners = {}
    for name, tensor in named:
        outside = [0 if isinstance(tensor, nn.Parameter) else len(modules) - 1]
        owners[plain_name(name)] = stages.get(id(tensor), outside)[0]
    everywhere = {plain_name(name) for name, tensor in named if id(tensor) not in stages}
    ties = {name: stages[id(p)] for name, p in task.named_parameters() if len(stages.get(id(p), [])) > 1}
    return owners, everywhere, ties
