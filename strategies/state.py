"""A model's state as checkpoints and callbacks see it: by the task's own names, whatever a strategy makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.checkpoint.format.model import load_plain_state
from trainwright.checkpoint.format.optimizer import load_named_optimizer_state, named_optimizer_state
from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.tree import is_cut

_STATE_DICT_TYPES = {
    "full": ("full", "full_state_dict", "1"),
    "sharded": ("sharded", "sharded_state_dict", "3"),
}


class FullState:
    """The state of a task and its optimizers where every rank holds it whole, or at least in `p` and `p.grad`.

    An engine that keeps it elsewhere, or in pieces, has a sub-class of its own.

    Args:
        task: prepared.
        optimizers: its optimizers.
        device: where pieces are exchanged, if there are any.
        is_main: whether this rank wants the values of what has to be put together.
        names: The names of parameters of optimizers that are not the task's. Default: None.
    """

    def __init__(
        self,
        task: nn.Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        *,
        is_main: bool,
        names: Mapping[torch.Tensor, str] | None = None,
    ) -> None:
        self._names = dict(names or {})
        self._task = task
        self._optimizers = optimizers
        self._device = device
        self._is_main = is_main

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers whose states these are, in order."""
        return self._optimizers

    # What a checkpoint holds

    @property
    def saves_pieces(self) -> bool:
        """Whether each rank writes its own pieces into a checkpoint now. The same on every rank; asked before a save.

        If it is True, `model_state` and `optimizer_states` collect nothing: they return tensors as they lie on this
        rank, which `in_pieces` understands. What is whole there is saved by the main rank.
        """
        return False

    def in_pieces(self, tree: Any) -> Any:
        """Return a tree of state with `trainwright.checkpoint.Pieces` for every tensor that lies in pieces.

        Called on every rank with the same tree when `saves_pieces` is True, once for each save. Not collective. Of
        values that several ranks hold, one alone may give them; the same object in two places must stay one.
        """
        return tree

    def model_state(self) -> dict[str, Any]:
        """Return the task's whole weights and buffers by their own names, not to be changed.

        References where this process holds them whole or `saves_pieces`, copies on the host otherwise: then collective,
        and on other ranks than the main one the tensors have a shape and no values (device `meta`).
        """
        return dict(self._task.state_dict())

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Load whole weights and buffers by their own names into the prepared task, on every rank. Not collective.

        Returns:
            The task's names that are not in `state`, and those of `state` that are not in the task.

        Raises:
            CheckpointError: shapes differ, or names do and `strict`.
        """
        return load_plain_state(self._task, state, strict=strict)

    def optimizer_states(self) -> list[dict[str, Any]]:
        """Return each optimizer's whole state by parameter name (see `named_optimizer_state`); as `model_state`."""
        names = self._parameter_names()
        return [named_optimizer_state(optimizer, names) for optimizer in self._optimizers]

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load one of what `optimizer_states` returned, on every rank. Not collective.

        Raises:
            CheckpointError: it does not fit (see `load_named_optimizer_state`); the optimizer is left as it was.
        """
        load_named_optimizer_state(optimizer, state, self._parameter_names())

    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return self._names | {parameter: name for name, parameter in self._task.named_parameters()}

    # Single tensors, for callbacks and for whoever compares one strategy with another

    def full_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return one of the task's tensors, or one that is cut alike, whole.

        As it is where it lies whole. Otherwise collective: a copy on the host; on other ranks than the main one it has
        a shape and no values (device `meta`).
        """
        return self._whole(tensor, keep=self._is_main)

    def missing_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor on the device `meta` like the full value of one that this rank does not hold in full.

        None if it holds the value. Not collective.

        Args:
            tensor: a parameter or buffer of the task.
        """
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if is_cut(tensor) else None

    def shard_like(self, value: Any, like: Any) -> Any:
        """Cut a whole tensor as `like` is cut; what is not to be cut, or does not fit, stays as it is. Not collective.

        Args:
            value: of a checkpoint: any shape, on the host.
            like: one of the task's tensors.
        """
        return shard_like(value, like)

    def full_parameters(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return the parameters whole, by the task's own names; those of one tensor once.

        Args:
            keep: False: this rank wants shapes and dtypes only, and may get tensors on the device `meta`.

        Collective where they lie in pieces (copies on the host then); otherwise references, not to be changed.
        """
        found = self._task.named_parameters()
        return {plain_name(name): self._whole(p, keep=keep).detach() for name, p in found}

    def full_gradients(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return the gradients that there are, likewise; none of an engine that hides them.

        Called between `forward_backward` and `optimizer_step`: accumulated, averaged over ranks, unscaled.
        """
        found = [(name, p.grad) for name, p in self._task.named_parameters()]
        return {plain_name(name): self._whole(g, keep=keep).detach() for name, g in found if g is not None}

    def _whole(self, tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
        if not is_cut(tensor):
            return tensor
        from trainwright.strategies.shards import whole

        return whole(tensor, self._device, keep=keep)


class JointState(FullState):
    """The state of several models, each with a state of its own, as one checkpoint.

    Weights are loaded, and single tensors are read, through the states of the models.

    Args:
        task: A module whose children are the models.
        optimizers: All optimizers, each of which belongs to one part.
        device, is_main: see `FullState`.
        parts: The states, each with the prefix of its names in the checkpoint.
    """

    def __init__(
        self,
        task: nn.Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        *,
        is_main: bool,
        parts: Sequence[tuple[str, FullState]],
    ) -> None:
        super().__init__(task, optimizers, device, is_main=is_main)
        self._parts = parts

    @property
    def saves_pieces(self) -> bool:
        return any(part.saves_pieces for _, part in self._parts)

    def in_pieces(self, tree: Any) -> Any:
        for _, part in self._parts:
            tree = part.in_pieces(tree)
        return tree

    def model_state(self) -> dict[str, Any]:
        return {prefix + name: value for prefix, part in self._parts for name, value in part.model_state().items()}

    def optimizer_states(self) -> list[dict[str, Any]]:
        found = {
            id(optimizer): _renamed(state, add=prefix)
            for prefix, part in self._parts
            for optimizer, state in zip(part.optimizers, part.optimizer_states(), strict=True)
        }
        return [found[id(optimizer)] for optimizer in self._optimizers]

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        for prefix, part in self._parts:
            if any(optimizer is own for own in part.optimizers):
                part.load_optimizer_state(optimizer, _renamed(state, remove=prefix))


def _renamed(state: Mapping[str, Any], *, remove: str = "", add: str = "") -> dict[str, Any]:
    """Return the state of an optimizer with another prefix of the names of parameters."""

    def renamed(name: str) -> str:
        return add + name.removeprefix(remove)

    groups = [{**group, "params": [renamed(name) for name in group["params"]]} for group in state["groups"]]
    return {**state, "groups": groups, "state": {renamed(name): value for name, value in state["state"].items()}}


def shard_like(value: Any, like: Any) -> Any:
    """Shard a full tensor as `like` is sharded; other values are returned as they are. Not collective."""
    if isinstance(value, torch.Tensor) and is_cut(like) and value.shape == like.shape and like.dim():
        from trainwright.strategies.shards import piece_of

        return piece_of(value, like)
    return value


def state_dict_type_name(value: Any) -> str:
    """Return `"sharded"` or `"full"` for what says so, in torch's and Hugging Face Accelerate's words too.

    Raises:
        ConfigurationError: it is neither.
    """
    word = str(getattr(value, "name", value)).lower()  # torch's enumeration has names
    for name, words in _STATE_DICT_TYPES.items():
        if word in words:
            return name
    known = [word for words in _STATE_DICT_TYPES.values() for word in words]
    raise ConfigurationError(
        f"state_dict_type={value!r} is unknown.{nearest(word, known)} Write 'sharded' (each rank "
        "writes its pieces; any number of ranks reads them) or 'full' (rank 0 writes the whole)."
    )
