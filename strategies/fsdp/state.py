"""The state of a model in pieces, as checkpoints and callbacks see it."""

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
from trainwright.strategies.fsdp.build import MetaBuilding, check_not_given_up
from trainwright.strategies.fsdp.parallelize import ParallelModel
from trainwright.strategies.shards import pieces_of
from trainwright.strategies.state import FullState


class ShardedState(FullState):
    """Reads and writes DTensors, by the task's own names. With `writes_pieces` each rank saves its own pieces."""

    def __init__(
        self,
        task: nn.Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        *,
        is_main: bool,
        model: ParallelModel,
        building: MetaBuilding,
        writes_pieces: bool,
        names: Mapping[torch.Tensor, str] | None = None,
    ) -> None:
        super().__init__(task, optimizers, device, is_main=is_main, names=names)
        self._model, self._building, self._writes_pieces = model, building, writes_pieces

    @property
    def saves_pieces(self) -> bool:
        return self._writes_pieces and self._model.is_together

    def in_pieces(self, tree: Any) -> Any:
        assert self._model.mesh is not None  # `saves_pieces` was asked
        return pieces_of(tree, self._model.mesh)

    def _to_save(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.saves_pieces else self.full_tensor(tensor)

    def model_state(self) -> dict[str, Any]:
        check_not_given_up(self._task)
        convert = cache(
            lambda tensor: self._to_save(tensor).detach()
        )  # tied weights are one tensor, also in a checkpoint
        found = self._task.state_dict(keep_vars=True)
        return {name: convert(v) if isinstance(v, torch.Tensor) else v for name, v in found.items()}

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        own = {plain_name(name): value for name, value in self._task.state_dict().items()}
        missing, left_over = super().load_model_state(
            {name: self.shard_like(value, own.get(plain_name(name))) for name, value in state.items()}, strict=strict
        )
        self._building.awaited.intersection_update(missing)
        return missing, left_over

    def optimizer_states(self) -> list[dict[str, Any]]:
        states = super().optimizer_states()
        for optimizer, state in zip(self._optimizers, states, strict=True):
            forget_one_by_one(optimizer, state)
            self._check_sharded(
                optimizer,
                state["state"],
                "which is sharded. Each rank has another one, and only that of rank 0 would be saved. Build it from "
                "the parameter (torch.zeros_like(parameter)), or use strategy='ddp'.",
            )
        return [map_tensors(self._to_save, state) for state in states]

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        own = {plain_name(name): parameter for parameter, name in self._parameter_names().items()}
        pieces = {}
        for name, values in state.get("state", {}).items():
            like = own.get(plain_name(name))
            pieces[name] = {
                key: shard_quantized(value, like, self.shard_like)
                if like is not None and is_flat(value)
                else self.shard_like(value, like)
                for key, value in values.items()
            }
        self._check_sharded(
            optimizer,
            pieces,
            "which has another shape, so that it cannot be cut into pieces. Use strategy='ddp', or start the optimizer "
            "anew with allow_missing=['optimizer'].",
        )
        super().load_optimizer_state(optimizer, {**state, "state": pieces})
        step_one_by_one([optimizer])

    def _check_sharded(self, optimizer: Optimizer, states: Mapping[str, Mapping[str, Any]], problem: str) -> None:
        """Check that the states of sharded parameters are sharded; only scalars may be full."""
        own = {plain_name(name): parameter for parameter, name in self._parameter_names().items()}
        for name, values in states.items():
            for key, value in values.items() if isinstance(own.get(plain_name(name)), DTensor) else ():
                if isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, DTensor):
                    kept = f"{key!r} of shape {tuple(value.shape)}"
                    raise CheckpointError(f"{type(optimizer).__name__} keeps {kept} for {name!r}, {problem}")


def step_one_by_one(optimizers: Iterable[Optimizer]) -> None:
    """Let optimizers step parameters of several kinds one after the other: torch 2.13 takes no two kinds at once.

    Changes `foreach`, which torch sets to True by itself on accelerators, in the groups that need it.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if not _is_mixed(group):
                continue
            for name in ("foreach", "fused"):
                if group.get(name):
                    raise ConfigurationError(
                        f"{type(optimizer).__name__}({name}=True), and a parameter group holds layers that are split "
                        "by the tensor-parallel plan beside some that are not, which torch cannot step together. Leave "
                        f"{name} out, or give the two kinds groups of their own."
                    )
            if "foreach" in group:
                group["foreach"] = False


def forget_one_by_one(optimizer: Optimizer, tree: Mapping[str, Any]) -> None:
    """Take what `step_one_by_one` has changed out of a saved state, which may be loaded where nothing is split."""
    for group, saved in zip(optimizer.param_groups, tree["groups"], strict=True):
        if _is_mixed(group) and saved.get("foreach") is False:
            saved["foreach"] = None


def _is_mixed(group: Mapping[str, Any]) -> bool:
    here = [p for p in group["params"] if not p.is_meta]  # what other stages of a pipeline hold is not stepped here
    return len({p.device_mesh if isinstance(p, DTensor) else None for p in here}) > 1
