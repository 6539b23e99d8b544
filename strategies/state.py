"""State of a model and its optimizers for checkpoints and callbacks. All strategies use the task's parameter names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.checkpoint.format.model import load_plain_state
from trainwright.checkpoint.format.optimizer import (
    check_named_optimizer_state,
    load_named_optimizer_state,
    named_optimizer_state,
)
from trainwright.core.errors import CheckpointError, ConfigurationError, nearest
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.tree import is_sharded

# This package's name → accepted names, in lower case: its own, and the name and the value of torch's `StateDictType`.
_STATE_DICT_TYPES = {
    "full": ("full", "full_state_dict", "1"),
    "sharded": ("sharded", "sharded_state_dict", "3"),
}


class FullState:
    """State of a task and its optimizers, whose parameters and gradients are in `p` and `p.grad`, full or as DTensors.

    Engines that store values elsewhere use a subclass.

    Args:
        task: The prepared task.
        optimizers: Its optimizers.
        device: Device of the collectives that gather shards. The results are on the host.
        is_main: True on the main rank, which alone receives the values of gathered tensors.
        names: Names of parameters that are in the optimizers but not in the task. Default: None.
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
        """The optimizers in order."""
        return self._optimizers

    # Checkpoints

    @property
    def saves_shards(self) -> bool:
        """True if each rank writes its own shards of a checkpoint. The same on every rank. Read before each save.

        If True, `model_state` and `optimizer_states` do not gather tensors. The caller passes their results to
        `shards_of`. Only the main rank saves unsharded tensors.
        """
        return False

    def shards_of(self, tree: object) -> Any:
        """Return a tree of state with `trainwright.checkpoint.TensorShards` in place of every sharded tensor.

        Called once for each save on every rank with the same tree, if `saves_shards` is True. Not collective. If
        several ranks hold the same values, only one may return them. A tensor that is in the tree twice must be
        replaced by the same object twice, so that it is written once.
        """
        return tree

    def model_state(self) -> dict[str, Any]:
        """Return the task's full weights and buffers by their names. The caller must not change them.

        Unsharded tensors are not copied. If `saves_shards` is True, sharded tensors are not copied either. Otherwise
        sharded tensors are gathered to the host of the main rank, and are on the device `meta` on other ranks, which is
        collective.
        """
        return dict(self._task.state_dict())

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Load full weights and buffers by their names into the prepared task, on every rank. Not collective.

        Returns:
            The task's names that are not in `state`, and the names in `state` that are not in the task.

        Raises:
            CheckpointError: Shapes differ, or names differ and `strict` is True.
        """
        return load_plain_state(self._task, state, strict=strict)

    def check_model_state(self, state: Mapping[str, Any]) -> None:
        """Check names and shapes of full weights and buffers, without loading them. Not collective.

        `load_model_state` changes the weights that fit before it reports the others. A task in which a module converts
        names or shapes while loading is not checked.

        Raises:
            CheckpointError: Names or shapes differ.
        """
        # With keep_vars, values are the parameters themselves, which `missing_like` recognizes.
        in_model = {plain_name(name): value for name, value in self._task.state_dict(keep_vars=True).items()}
        in_checkpoint = {plain_name(name): value for name, value in state.items()}
        problems = [f"{name} is missing" for name in in_model if name not in in_checkpoint]
        problems += [f"{name} is not in the model" for name in in_checkpoint if name not in in_model]
        for name, value in in_model.items():
            saved = in_checkpoint.get(name)
            if not isinstance(value, torch.Tensor) or saved is None:
                continue
            full = self.missing_like(value)  # the value may be a shard of another shape
            if full is None:
                full = value
            if tuple(saved.shape) != tuple(full.shape):
                problems.append(f"{name} is {tuple(saved.shape)} and not {tuple(full.shape)}")
        if problems and not _changes_names(self._task):
            raise CheckpointError(
                f"the saved weights do not fit {type(self._task).__name__}: {'; '.join(problems[:10])}."
            )

    def optimizer_states(self) -> list[dict[str, Any]]:
        """Return each optimizer's full state by parameter name (see `named_optimizer_state`). Collective like
        `model_state`.
        """
        names = self._parameter_names()
        return [named_optimizer_state(optimizer, names) for optimizer in self._optimizers]

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load the state of one optimizer in the format of `optimizer_states`, on every rank. Not collective.

        Raises:
            CheckpointError: The state does not fit (see `load_named_optimizer_state`). The optimizer is then unchanged.
        """
        load_named_optimizer_state(optimizer, state, self._parameter_names())

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Raise the errors of `load_optimizer_state` about class, groups and names, without loading the state."""
        check_named_optimizer_state(optimizer, state, self._parameter_names())

    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Return the names of the task's parameters, and of parameters that are only in the optimizers."""
        return self._names | {parameter: name for name, parameter in self._task.named_parameters()}

    # Single tensors

    def gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full value of a tensor of the task, or of a tensor that is sharded like a tensor of the task.

        An unsharded tensor is returned unchanged. For a sharded tensor, the call is collective: the main rank gets a
        copy on the host, and other ranks get a tensor on the device `meta`.
        """
        return self._full(tensor, keep=self._is_main)

    def missing_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a `meta` tensor with the full shape of a sharded tensor, or None if this rank holds the full value.

        Not collective.

        Args:
            tensor: A parameter or buffer of the task.
        """
        if not is_sharded(tensor):
            return None
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def shard_like(self, value: object, like: object) -> Any:
        """Shard a full tensor like the sharded tensor `like`, which has the same shape. Not collective.

        Any other value, or a value for an unsharded `like`, is returned unchanged.

        Args:
            value: Value from a checkpoint, of any shape, on the host.
            like: One of the task's tensors.
        """
        return shard_like(value, like)

    def full_parameters(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return the full parameters by the task's names. Tied parameters are returned once.

        Sharded parameters are gathered to the host, which is collective. Other parameters are not copied. The caller
        must not change them.

        Args:
            keep: False if this rank needs only shapes and dtypes. The rank may then get tensors on the device `meta`.
                Default: True.
        """
        full = {}
        for name, parameter in self._task.named_parameters():
            full[plain_name(name)] = self._full(parameter, keep=keep).detach()
        return full

    def full_gradients(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return the full gradients by parameter name. Collective if `full_parameters` is.

        Parameters without a gradient are omitted. The result is empty if the engine hides gradients. Must be called
        between `forward_backward` and `optimizer_step`. Gradients are accumulated, averaged and unscaled.

        Args:
            keep: See `full_parameters`. Default: True.
        """
        full = {}
        for name, parameter in self._task.named_parameters():
            if parameter.grad is not None:
                full[plain_name(name)] = self._full(parameter.grad, keep=keep).detach()
        return full

    def _full(self, tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
        """Return an unsharded tensor unchanged. Gather a sharded one: to the host if `keep` is True, else to `meta`."""
        if not is_sharded(tensor):
            return tensor
        from trainwright.strategies.shards import gather_full  # imports DTensor

        return gather_full(tensor, self._device, keep=keep)


class JointState(FullState):
    """The joint state of several models in one checkpoint.

    It does not load weights or read single tensors. The states of the models do.

    Args:
        task: A module whose children are the models.
        optimizers: All optimizers. Each optimizer belongs to one model.
        device, is_main: See `FullState`.
        parts: The states of the models, each with the prefix of the model's names in the checkpoint.
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
    def saves_shards(self) -> bool:
        return any(part.saves_shards for _, part in self._parts)

    def shards_of(self, tree: object) -> Any:
        # Each part replaces the tensors that are sharded in its way, and keeps the others.
        for _, part in self._parts:
            tree = part.shards_of(tree)
        return tree

    def model_state(self) -> dict[str, Any]:
        joint = {}
        for prefix, part in self._parts:
            for name, value in part.model_state().items():
                joint[prefix + name] = value
        return joint

    def optimizer_states(self) -> list[dict[str, Any]]:
        # By id, because the parts have the optimizers in another order. An optimizer exists as long as `self`.
        states: dict[int, dict[str, Any]] = {}
        for prefix, part in self._parts:
            for optimizer, state in zip(part.optimizers, part.optimizer_states(), strict=True):
                states[id(optimizer)] = _renamed(state, add=prefix)
        return [states[id(optimizer)] for optimizer in self._optimizers]

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        prefix, part = self._part_of(optimizer)
        part.load_optimizer_state(optimizer, _renamed(state, remove=prefix))

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        prefix, part = self._part_of(optimizer)
        part.check_optimizer_state(optimizer, _renamed(state, remove=prefix))

    def _part_of(self, optimizer: Optimizer) -> tuple[str, FullState]:
        """Return the model of an optimizer, with its prefix."""
        for prefix, part in self._parts:
            if any(optimizer is candidate for candidate in part.optimizers):
                return prefix, part
        raise AssertionError("each optimizer belongs to one model")


def _changes_names(module: nn.Module) -> bool:
    """Return whether a part of a module may convert names or shapes of weights while it loads them."""
    for part in module.modules():
        overrides_loading = (
            type(part).load_state_dict is not nn.Module.load_state_dict
            or type(part)._load_from_state_dict is not nn.Module._load_from_state_dict
        )
        if overrides_loading or part._load_state_dict_pre_hooks:
            return True
    return False


def _renamed(state: Mapping[str, Any], *, remove: str = "", add: str = "") -> dict[str, Any]:
    """Return the state of an optimizer with parameter names from which a prefix is removed or to which one is added."""

    def renamed(name: str) -> str:
        return add + name.removeprefix(remove)

    groups = []
    for group in state["groups"]:
        names = [renamed(name) for name in group["params"]]
        groups.append({**group, "params": names})
    by_parameter = {renamed(name): value for name, value in state["state"].items()}
    return {**state, "groups": groups, "state": by_parameter}


def shard_like(value: object, like: object) -> Any:
    """Shard a full tensor like `like`; see `FullState.shard_like`."""
    if not isinstance(value, torch.Tensor) or not is_sharded(like):
        return value
    # The state of a sharded parameter also holds values that are not sharded, such as Adam's number of steps.
    if value.shape != like.shape or like.dim() == 0:
        return value
    from trainwright.strategies.shards import shard_like  # imports DTensor

    return shard_like(value, like)


def state_dict_type_name(value: object) -> str:
    """Return `"sharded"` or `"full"` for a name of this package, torch or Hugging Face Accelerate.

    Raises:
        ConfigurationError: The name is unknown.
    """
    word = str(getattr(value, "name", value)).lower()  # torch's enum has a name
    for name, synonyms in _STATE_DICT_TYPES.items():
        if word in synonyms:
            return name
    known = [*_STATE_DICT_TYPES["full"], *_STATE_DICT_TYPES["sharded"]]
    raise ConfigurationError(
        f"state_dict_type={value!r} is unknown.{nearest(word, known)} Write 'sharded' (each rank "
        "writes its shards; any number of ranks reads them) or 'full' (rank 0 writes the full state)."
    )
