"""State of a sharded model for checkpoints and callbacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.checkpoint.format.quantized_state import is_flat, shard_quantized
from trainwright.core.errors import CheckpointError, ConfigurationError
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.tree import map_tensors
from trainwright.strategies.fsdp.build import MetaBuilding, check_has_weights
from trainwright.strategies.fsdp.parallelize import ParallelModel
from trainwright.strategies.shards import shard_tree
from trainwright.strategies.state import FullState


class ShardedState(FullState):
    """State of a model whose sharded tensors are DTensors.

    Args:
        task, optimizers, device, is_main, names: See `FullState`.
        model: The sharded model.
        building: Records which weights a checkpoint must provide.
        writes_shards: Each rank saves its own shards until the model is unwrapped. False: rank 0 saves full tensors.
    """

    def __init__(
        self,
        task: nn.Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        *,
        is_main: bool,
        model: ParallelModel,
        building: MetaBuilding,
        writes_shards: bool,
        names: Mapping[torch.Tensor, str] | None = None,
    ) -> None:
        super().__init__(task, optimizers, device, is_main=is_main, names=names)
        self._model = model
        self._building = building
        self._writes_shards = writes_shards

    @property
    def saves_shards(self) -> bool:
        return self._writes_shards and self._model.is_wrapped

    def shards_of(self, tree: object) -> Any:
        assert self._model.mesh is not None  # called only while `saves_shards` is True
        return shard_tree(tree, self._model.mesh)

    def _to_save(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.saves_shards else self.gather_tensor(tensor)

    def model_state(self) -> dict[str, Any]:
        check_has_weights(self._task)
        convert = cache(lambda tensor: self._to_save(tensor).detach())  # tied weights stay one tensor in a checkpoint
        state = self._task.state_dict(keep_vars=True)
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = convert(value)
        return dict(state)

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        current = {plain_name(name): value for name, value in self._task.state_dict().items()}
        shards = {name: self.shard_like(value, current.get(plain_name(name))) for name, value in state.items()}
        missing, left_over = super().load_model_state(shards, strict=strict)
        self._building.awaited.intersection_update(missing)
        return missing, left_over

    def optimizer_states(self) -> list[dict[str, Any]]:
        states = super().optimizer_states()
        for optimizer, state in zip(self._optimizers, states, strict=True):
            restore_foreach(optimizer, state)
            self._check_sharded(
                optimizer,
                state["state"],
                "but the parameter is sharded. The state differs between ranks, and only rank 0 would save it. "
                "Create the state with torch.zeros_like(parameter), or use strategy='ddp'.",
            )
        return [map_tensors(self._to_save, state) for state in states]

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        parameters = {plain_name(name): parameter for parameter, name in self._parameter_names().items()}
        shards: dict[str, dict[str, Any]] = {}
        for name, values in state.get("state", {}).items():
            parameter = parameters.get(plain_name(name))
            shards[name] = {}
            for key, value in values.items():
                if parameter is not None and is_flat(value):
                    shards[name][key] = shard_quantized(value, parameter, self.shard_like)
                else:
                    shards[name][key] = self.shard_like(value, parameter)
        self._check_sharded(
            optimizer,
            shards,
            "but the parameter has another shape, so the state cannot be sharded. Use strategy='ddp', or start with "
            "a new optimizer state by allow_missing=['optimizer'].",
        )
        super().load_optimizer_state(optimizer, {**state, "state": shards})
        disable_foreach([optimizer])

    def _check_sharded(self, optimizer: Optimizer, states: Mapping[str, Mapping[str, Any]], problem: str) -> None:
        """Check that the states of sharded parameters are sharded. Only scalars may be unsharded.

        Args:
            states: Name of a parameter → its state.
            problem: The end of the error.
        """
        parameters = {plain_name(name): parameter for parameter, name in self._parameter_names().items()}
        for name, values in states.items():
            if not isinstance(parameters.get(plain_name(name)), DTensor):
                continue
            for key, value in values.items():
                is_full = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
                if is_full and value.dim() > 0:
                    raise CheckpointError(
                        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for {name!r}, "
                        f"{problem}"
                    )


def disable_foreach(optimizers: Iterable[Optimizer]) -> None:
    """Set `foreach=False` in parameter groups with tensors of several meshes.

    torch 2.13 cannot step such tensors together, which `foreach` does by default on accelerators.

    Raises:
        ConfigurationError: The user has set `foreach` or `fused` to True for such a group.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if not _is_mixed(group):
                continue
            for name in ("foreach", "fused"):
                if group.get(name):
                    raise ConfigurationError(
                        f"{type(optimizer).__name__}({name}=True) cannot step a parameter group with both layers that "
                        f"the tensor-parallel plan splits and layers that it does not. Remove {name}, or use separate "
                        "groups for the two."
                    )
            if "foreach" in group:
                group["foreach"] = False


def restore_foreach(optimizer: Optimizer, tree: Mapping[str, Any]) -> None:
    """Replace `foreach=False` by torch's default in a saved state, which a model without split layers may load.

    `disable_foreach` has set the value. A user's own `foreach=False` for such a group is replaced, too.
    """
    for group, saved in zip(optimizer.param_groups, tree["groups"], strict=True):
        if _is_mixed(group) and saved.get("foreach") is False:
            saved["foreach"] = None


def _is_mixed(group: Mapping[str, Any]) -> bool:
    """Return whether parameters of a group have different meshes, or some have none."""
    meshes = set()
    for parameter in group["params"]:
        if not parameter.is_meta:  # parameters of other pipeline stages are on `meta`
            meshes.add(parameter.device_mesh if isinstance(parameter, DTensor) else None)
    return len(meshes) > 1
