"""Optimizer state keyed by parameter name, so that parameters can be reordered and regrouped."""

from __future__ import annotations

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
        names: name of each parameter of the optimizer. The prefixes that wrappers add to names are removed.

    Returns:
        `{"class": name, "groups": [{hyper-parameters..., "params": [names]}], "state": {name: {key: value}}}`, with
        `{}` for a parameter without state. Optional keys: `"shared"` (state that belongs to no parameter), `"extra"`
        (other entries of the state dict), `"dtypes"` (name → dtype of each parameter whose state has another dtype).
        Tensors are not copied. Quantized states are dictionaries of their tensors (see `flatten_quantized`).

    Raises:
        CheckpointError: a parameter has no name, or two parameters have the same name.
    """
    packed = optimizer.state_dict()
    names_of = _names_by_index(optimizer, packed, names)
    groups = [
        {
            **{key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS},
            "params": [names_of[index] for index in group["params"]],
        }
        for group in packed["param_groups"]
    ]
    state: dict[str, Any] = {name: {} for name in names_of.values()}
    shared: dict[Any, Any] = {}
    for key, value in packed["state"].items():
        if key in names_of:
            state[names_of[key]] = map_tensors(flatten_quantized, value)
        else:
            shared[key] = value
    tree: dict[str, Any] = {"class": type(optimizer).__qualname__, "groups": groups, "state": state}
    extra = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    dtypes = {
        names_of[index]: parameter.dtype
        for index, parameter in zip(names_of, _parameters(optimizer), strict=True)
        if any(
            tensor.dtype != parameter.dtype
            for key, value in packed["state"].get(index, {}).items()
            if key != "step"
            for tensor in iterate_tensors(value)
        )
    }
    if dtypes:
        tree["dtypes"] = dtypes
    if shared:
        tree["shared"] = shared
    if extra:
        tree["extra"] = extra
    return tree


def load_named_optimizer_state(
    optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], names: Mapping[torch.Tensor, str]
) -> None:
    """Load the result of `named_optimizer_state` into an optimizer over the same parameters, in any order.

    Calls `optimizer.load_state_dict`, so that its hooks run, and moves tensors to their parameter's device. A tensor
    that was saved in the dtype of its parameter is cast to the parameter's current dtype. Other tensors keep their
    dtype. A saved group is loaded into the group with the same parameters. Groups without such a counterpart are
    matched in order. Afterwards the optimizer shares no memory with `tree`.

    Raises:
        CheckpointError: the class or the number of groups differs, a parameter is missing on one side or has no saved
            state (the message names it), or the parameters of an LBFGS have a different order. The optimizer is
            unchanged.
    """
    packed = optimizer.state_dict()
    names_of = _names_by_index(optimizer, packed, names)
    own_groups = [[names_of[index] for index in group["params"]] for group in packed["param_groups"]]
    _check_fit(optimizer, tree, own_groups)
    saved_groups = list(tree["groups"])
    saved_state = dict(tree["state"])
    matches = _match_groups(own_groups, [list(group["params"]) for group in saved_groups])
    groups = []
    for group, match in zip(packed["param_groups"], matches, strict=True):
        saved = {key: value for key, value in saved_groups[match].items() if key != "params"}
        # A key that only a newer torch has keeps its current value.
        groups.append({**group, **saved, "params": group["params"]})
    state: dict[Any, Any] = map_tensors(torch.clone, dict(tree.get("shared", {})))
    parameters = dict(zip(names_of, _parameters(optimizer), strict=True))
    for index, name in names_of.items():
        if saved_state[name]:
            own = _own_copy(saved_state[name], parameters[index].device)
            state[index] = build_quantized(own, parameters[index].device)
    extra = map_tensors(torch.clone, dict(tree.get("extra", {})))
    dtypes = {index: tree.get("dtypes", {}).get(name) for index, name in names_of.items()}

    def keep(_: object, packed: dict[str, Any]) -> dict[str, Any]:
        states = {
            index: _kept(values, dtypes[index], parameters[index].device) if index in parameters else values
            for index, values in packed["state"].items()
        }
        return {**packed, "state": states}

    def restore(_: object) -> None:
        for parameter in parameters.values():
            if parameter in optimizer.state:
                optimizer.state[parameter] = _restored(optimizer.state[parameter])

    # User hooks see plain states: the wrapping runs after their pre-hooks, the unwrapping before their post-hooks.
    before = optimizer.register_load_state_dict_pre_hook(keep)
    after = optimizer.register_load_state_dict_post_hook(restore, prepend=True)
    try:
        optimizer.load_state_dict({**extra, "state": state, "param_groups": groups})
    finally:
        before.remove()
        after.remove()


def check_named_optimizer_state(
    optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], names: Mapping[torch.Tensor, str]
) -> None:
    """Raise the errors of `load_named_optimizer_state` without loading the state."""
    own_groups = [[plain_name(names[parameter]) for parameter in group["params"]] for group in optimizer.param_groups]
    _check_fit(optimizer, tree, own_groups)


def _check_fit(optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], own_groups: list[list[str]]) -> None:
    """Check that a saved state belongs to an optimizer of the same class with the same parameters.

    Args:
        optimizer: the optimizer.
        tree: the result of `named_optimizer_state`.
        own_groups: the names of the optimizer's parameters, by group.
    """
    own_class = type(optimizer).__qualname__
    try:
        saved_class = tree["class"]
        saved_state = dict(tree["state"])
        saved_names = [list(group["params"]) for group in tree["groups"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the saved optimizer state is incomplete: {error!r}.") from error
    if saved_class != own_class:
        raise CheckpointError(
            f"the checkpoint holds the state of {saved_class}, and this optimizer is {own_class}. Use {saved_class}, "
            "or start with a new optimizer state: pass allow_missing=['optimizer'] to Trainer.fit, or load the weights "
            "alone in a user-written loop."
        )
    _check_names(own_class, own_groups, saved_names, saved_state)
    # LBFGS flattens all parameters into one vector, so that its history is valid for one parameter order only.
    if isinstance(optimizer, torch.optim.LBFGS) and own_groups != saved_names:
        raise CheckpointError(
            f"LBFGS was saved with the parameters in the order {saved_names[0]}, and now their order is "
            f"{own_groups[0]}. Pass the parameters to LBFGS in the saved order."
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """A wrapper for a value that `Optimizer.load_state_dict` must not change."""

    value: Any


def _kept(value: Any, dtype: torch.dtype | None, device: torch.device, key: object = None) -> Any:
    """Wrap every value of a state in `_Kept` that torch would cast, or convert to another container.

    `dtype` is the dtype that the parameter had when it was saved. None: all its states were saved in this dtype.
    """
    if isinstance(value, torch.Tensor):
        if is_quantized(value):
            return _Kept(value)
        return value if key == "step" or dtype in (None, value.dtype) else _Kept(value.to(device))
    if type(value) is dict:
        return {name: _kept(item, dtype, device, name) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_kept(item, dtype, device) for item in value)
    return _Kept(map_tensors(lambda tensor: tensor.to(device), value)) if isinstance(value, Iterable) else value


def _restored(value: Any) -> Any:
    if type(value) is dict:
        return {name: _restored(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_restored(item) for item in value)
    return value.value if isinstance(value, _Kept) else value


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _own_copy(values: object, device: torch.device) -> Any:
    # Tensors on another device are copied when they are moved. Scalars such as `step` may stay on the CPU.
    return map_tensors(lambda value: value.clone() if value.device == device or value.numel() <= 1 else value, values)


def _names_by_index(
    optimizer: torch.optim.Optimizer, packed: Mapping[str, Any], names: Mapping[torch.Tensor, str]
) -> dict[int, str]:
    found: dict[int, str] = {}
    for group, packed_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        for parameter, index in zip(group["params"], packed_group["params"], strict=True):
            if parameter not in names:
                raise CheckpointError(
                    f"{type(optimizer).__qualname__} holds a parameter of shape {tuple(parameter.shape)} that is not a "
                    "parameter of the task, so its state cannot be saved by name. Register it in the task."
                )
            found[index] = plain_name(names[parameter])
    if len(set(found.values())) != len(found):
        raise CheckpointError(f"{type(optimizer).__qualname__}: two of its parameters have the same name.")
    return found


def _check_names(
    own_class: str, own_groups: list[list[str]], saved_groups: list[list[str]], saved_state: Mapping[str, Any]
) -> None:
    own = {name for group in own_groups for name in group}
    saved = {name for group in saved_groups for name in group}
    problems = [f"{name!r} is not in the checkpoint.{nearest(name, saved - own)}" for name in sorted(own - saved)] + [
        f"{name!r} is in the checkpoint and not in this optimizer." for name in sorted(saved - own)
    ]
    problems += [f"{name!r} has no saved state." for name in sorted(own & saved - saved_state.keys())]
    if problems:
        shown = " ".join(problems[:10]) + (f" (and {len(problems) - 10} more)" if len(problems) > 10 else "")
        advice = " If a callback adds groups, add them again in its on_fit_start; its state has been loaded by then."
        raise CheckpointError(f"the saved state of {own_class} does not fit: {shown}{advice if saved - own else ''}")
    if len(own_groups) != len(saved_groups):
        raise CheckpointError(
            f"{own_class} was saved with {len(saved_groups)} parameter groups and now has {len(own_groups)}. "
            "Use the same number of groups."
        )


def _match_groups(own: list[list[str]], saved: list[list[str]]) -> list[int]:
    """Return, for each group of `own`, the index of the group of `saved` with the same parameters, or the next unused
    index.
    """
    free = dict.fromkeys(range(len(saved)))
    matches: list[int | None] = []
    for group in own:
        same = next((number for number in free if set(saved[number]) == set(group)), None)
        matches.append(same)
        if same is not None:
            del free[same]
    rest = iter(free)
    return [next(rest) if match is None else match for match in matches]
