"""Optimizer state keyed by parameter name, so that parameters can be reordered and regrouped.

`Optimizer.state_dict()` of torch has `{"state": {0: {"exp_avg": …}}, "param_groups": [{"lr": 0.1, "params": [0]}]}`. It
is called `packed` here, and its numbers `index`: positions of the parameters in all groups. In the named tree, names
replace these numbers: `{"state": {"layer.weight": {"exp_avg": …}}, "groups": [{"lr": 0.1, "params":
["layer.weight"]}]}`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainwright.checkpoint.format.quantized_state import build_quantized, flatten_quantized, is_quantized
from trainwright.core.errors import CheckpointError, nearest
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.tree import iterate_tensors, map_tensors

# Keys of a parameter group that are positions or names, not hyper-parameters.
_NOT_HYPERPARAMETERS = ("params", "param_names")


def named_optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> dict[str, Any]:
    """Return the state of a torch optimizer, keyed by parameter name instead of position.

    Args:
        optimizer: the optimizer. Its `state_dict()` is called, so that its state-dict hooks run.
        names: name of each parameter of the optimizer, and maybe of others. The prefixes that wrappers add to names are
            removed.

    Returns:
        `{"class": name, "groups": [{hyper-parameters..., "params": [names]}], "state": {name: {key: value}}}`, with
        `{}` for a parameter without state. Optional keys: `"shared"` (state that belongs to no parameter), `"extra"`
        (other entries of the state dict), `"dtypes"` (name → dtype of each parameter whose state has another dtype).
        Tensors are not copied. Quantized states are dictionaries of their tensors (see `flatten_quantized`).

    Raises:
        CheckpointError: a parameter has no name, or two parameters have the same name.
    """
    packed = optimizer.state_dict()
    names_by_index = _names_by_index(optimizer, packed, names)
    groups = []
    for group in packed["param_groups"]:
        named_group = {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}
        named_group["params"] = [names_by_index[index] for index in group["params"]]
        groups.append(named_group)
    state: dict[str, Any] = {name: {} for name in names_by_index.values()}
    shared: dict[Any, Any] = {}
    for key, value in packed["state"].items():
        if key in names_by_index:
            state[names_by_index[key]] = map_tensors(flatten_quantized, value)
        else:
            shared[key] = value
    tree: dict[str, Any] = {"class": type(optimizer).__qualname__, "groups": groups, "state": state}
    dtypes: dict[str, torch.dtype] = {}
    # Both are in the order of the groups.
    for index, parameter in zip(names_by_index, _parameters(optimizer), strict=True):
        if _has_other_dtype(packed["state"].get(index, {}), parameter.dtype):
            dtypes[names_by_index[index]] = parameter.dtype
    extra = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    if dtypes:
        tree["dtypes"] = dtypes
    if shared:
        tree["shared"] = shared
    if extra:
        tree["extra"] = extra
    return tree


def _has_other_dtype(values: Mapping[Any, Any], dtype: torch.dtype) -> bool:
    """Return whether a tensor of a parameter's state has another dtype than the parameter."""
    for key, value in values.items():
        # torch does not cast `step`, a float32 in most of its optimizers.
        if key != "step" and any(tensor.dtype != dtype for tensor in iterate_tensors(value)):
            return True
    return False


def load_named_optimizer_state(
    optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], names: Mapping[torch.Tensor, str]
) -> None:
    """Load the result of `named_optimizer_state` into an optimizer over the same parameters, in any order.

    Calls `optimizer.load_state_dict`, so that its hooks run, and moves tensors to their parameter's device. A tensor
    that was saved in the dtype of its parameter is cast to the parameter's current dtype. Other tensors keep their
    dtype. A saved group is loaded into the group with the same parameters. Groups without such a counterpart are
    matched in order. Afterwards the optimizer shares no memory with `tree`.

    Raises:
        CheckpointError: the saved state is incomplete, the class or the number of groups differs, a parameter is
            missing on one side or has no saved state (the message names it), or the parameters of an LBFGS have a
            different order. The optimizer is unchanged.
    """
    packed = optimizer.state_dict()
    names_by_index = _names_by_index(optimizer, packed, names)
    current_groups = [[names_by_index[index] for index in group["params"]] for group in packed["param_groups"]]
    _check_fit(optimizer, tree, current_groups)
    saved_groups = list(tree["groups"])
    matches = _match_groups(current_groups, [list(group["params"]) for group in saved_groups])
    groups = []
    for group, match in zip(packed["param_groups"], matches, strict=True):
        # A key that only a newer torch has keeps its current value.
        groups.append({**group, **saved_groups[match], "params": group["params"]})
    # Both are in the order of the groups.
    parameters = dict(zip(names_by_index, _parameters(optimizer), strict=True))
    state: dict[Any, Any] = map_tensors(torch.clone, dict(tree.get("shared", {})))
    for index, name in names_by_index.items():
        values = tree["state"][name]
        if values:  # torch has no entry for a parameter without state
            device = parameters[index].device
            state[index] = build_quantized(_cloned_unless_moved(values, device), device)
    extra = map_tensors(torch.clone, dict(tree.get("extra", {})))
    saved_dtypes = tree.get("dtypes", {})

    def protect_states(_: object, loaded: dict[str, Any]) -> dict[str, Any]:
        states = {}
        for index, values in loaded["state"].items():
            if index in parameters:
                saved_dtype = saved_dtypes.get(names_by_index[index])
                values = _protected(values, saved_dtype, parameters[index].device)
            states[index] = values
        return {**loaded, "state": states}

    def unprotect_states(_: object) -> None:
        for parameter in parameters.values():
            if parameter in optimizer.state:
                optimizer.state[parameter] = _unprotected(optimizer.state[parameter])

    # User hooks receive plain states: the pre-hook runs after theirs, and the post-hook before theirs.
    pre_hook = optimizer.register_load_state_dict_pre_hook(protect_states)
    post_hook = optimizer.register_load_state_dict_post_hook(unprotect_states, prepend=True)
    try:
        optimizer.load_state_dict({**extra, "state": state, "param_groups": groups})
    finally:
        pre_hook.remove()
        post_hook.remove()


def check_named_optimizer_state(
    optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], names: Mapping[torch.Tensor, str]
) -> None:
    """Raise the errors of `load_named_optimizer_state` without loading the state."""
    current_groups = []
    for group in optimizer.param_groups:
        current_groups.append([plain_name(names[parameter]) for parameter in group["params"]])
    _check_fit(optimizer, tree, current_groups)


def _check_fit(optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], current_groups: list[list[str]]) -> None:
    """Check that a saved state has the class of the optimizer and its parameters, `current_groups` by name."""
    current_class = type(optimizer).__qualname__
    try:
        saved_class = tree["class"]
        saved_state = dict(tree["state"])
        saved_names = [list(group["params"]) for group in tree["groups"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the saved optimizer state is incomplete: {error!r}.") from error
    if saved_class != current_class:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved_class}, and this optimizer is {current_class}. "
            f"Use {saved_class}, or start with a new optimizer state: pass allow_missing=['optimizer'] to "
            "Trainer.fit, or load the weights alone in a user-written loop."
        )
    _check_names(current_class, current_groups, saved_names, saved_state)
    # LBFGS flattens all parameters into one vector, so that its history is valid for one parameter order only.
    if isinstance(optimizer, torch.optim.LBFGS) and current_groups != saved_names:
        raise CheckpointError(
            f"LBFGS was saved with the parameters in the order {saved_names[0]}, and now their order is "
            f"{current_groups[0]}. Pass the parameters to LBFGS in the saved order."
        )


@dataclass(frozen=True, slots=True)
class _Protected:
    """A wrapper for a value that `Optimizer.load_state_dict` must not change."""

    value: Any


def _protected(value: Any, dtype: torch.dtype | None, device: torch.device, key: object = None) -> Any:
    """Wrap every value of a parameter's state that `Optimizer.load_state_dict` would change.

    Args:
        value: the state, or a value in it.
        dtype: the dtype that the parameter had when it was saved, from `"dtypes"` of the saved tree. None means that
            all tensors of the state were saved in this dtype.
        device: device of the parameter.
        key: key of `value` in the state.
    """
    # torch 2.13 casts each tensor except `step` to the parameter's dtype, and replaces every iterable by
    # type(value)(items): a namedtuple raises, a text becomes "<generator object …>", a deque loses its length.
    if isinstance(value, torch.Tensor):
        if is_quantized(value):
            return _Protected(value)
        if key == "step" or dtype is None or dtype == value.dtype:
            return value  # torch casts and moves it
        return _Protected(value.to(device))
    if type(value) is dict:
        return {name: _protected(item, dtype, device, name) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_protected(item, dtype, device) for item in value)
    if isinstance(value, Iterable):
        return _Protected(map_tensors(lambda tensor: tensor.to(device), value))
    return value


def _unprotected(value: Any) -> Any:
    """Return a result of `_protected` with the wrapped values."""
    if type(value) is dict:
        return {name: _unprotected(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_unprotected(item) for item in value)
    if isinstance(value, _Protected):
        return value.value
    return value


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _cloned_unless_moved(values: object, device: torch.device) -> Any:
    """Return saved values whose tensors share no memory with them once they have been moved to `device`."""

    def cloned(tensor: torch.Tensor) -> torch.Tensor:
        # The move to another device copies a tensor. torch leaves scalars such as `step` on the CPU.
        may_stay = tensor.device == device or tensor.numel() <= 1
        return tensor.clone() if may_stay else tensor

    return map_tensors(cloned, values)


def _names_by_index(
    optimizer: torch.optim.Optimizer, packed: Mapping[str, Any], names: Mapping[torch.Tensor, str]
) -> dict[int, str]:
    """Return the name of each parameter by its index in the state dict `packed`, in the order of the groups."""
    names_by_index: dict[int, str] = {}
    for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        for parameter, index in zip(group["params"], packed_group["params"], strict=True):
            if parameter not in names:
                raise CheckpointError(
                    f"{type(optimizer).__qualname__} holds a parameter of shape {tuple(parameter.shape)} that is not a "
                    "parameter of the task, so its state cannot be saved by name. Register it in the task."
                )
            names_by_index[index] = plain_name(names[parameter])
    if len(set(names_by_index.values())) != len(names_by_index):
        raise CheckpointError(f"{type(optimizer).__qualname__}: two of its parameters have the same name.")
    return names_by_index


def _check_names(
    current_class: str, current_groups: list[list[str]], saved_groups: list[list[str]], saved_state: Mapping[str, Any]
) -> None:
    """Check that the groups have the same parameters in total, each with a saved state, and the same number."""
    current = set(itertools.chain.from_iterable(current_groups))
    saved = set(itertools.chain.from_iterable(saved_groups))
    only_saved = saved - current
    without_state = (current & saved) - saved_state.keys()
    problems = []
    for name in sorted(current - saved):
        problems.append(f"{name!r} is not in the checkpoint.{nearest(name, only_saved)}")
    for name in sorted(only_saved):
        problems.append(f"{name!r} is in the checkpoint and not in this optimizer.")
    for name in sorted(without_state):
        problems.append(f"{name!r} has no saved state.")
    if problems:
        message = f"the saved state of {current_class} does not fit: {' '.join(problems[:10])}"
        if len(problems) > 10:
            message += f" (and {len(problems) - 10} more)"
        if only_saved:
            advice = "If a callback adds groups, add them again in its on_fit_start; its state has been loaded by then."
            message = f"{message} {advice}"
        raise CheckpointError(message)
    if len(current_groups) != len(saved_groups):
        raise CheckpointError(
            f"{current_class} was saved with {len(saved_groups)} parameter groups and now has {len(current_groups)}. "
            "Use the same number of groups."
        )


def _match_groups(current: list[list[str]], saved: list[list[str]]) -> list[int]:
    """Return the index of the saved group for each current group. Both lists have the same length.

    A group with the same parameters is used, or if there is none, the first saved group that no other group uses. For
    the current groups [a, b], [c], [d] and the saved groups [d], [a], [b, c], the result is [1, 2, 0].
    """
    unused = list(range(len(saved)))
    matches: dict[int, int] = {}  # index of a current group → index of a saved group
    for number, group in enumerate(current):
        for candidate in unused:
            if set(saved[candidate]) == set(group):
                matches[number] = candidate
                unused.remove(candidate)
                break
    for number in range(len(current)):
        if number not in matches:
            matches[number] = unused.pop(0)
    return [matches[number] for number in range(len(current))]
