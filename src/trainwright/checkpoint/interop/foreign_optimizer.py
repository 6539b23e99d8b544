"""Parameter names for optimizer states of other programs. These states have positions instead of names.

`torch.optim` saves `{"state": {0: ...}, "param_groups": [{"params": [0, 1], ...}]}`. The numbers are positions in the
order in which the optimizer received its parameters. The class is not saved.

`named_from_positions` infers the class from the hyper-parameters, and the names from the first of these sources that
exists: FSDP's names, which the file has instead of positions; names from the user; `param_names` of torch in the file;
the order of the model's weights, if the optimizer has all of them in one group; shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from trainwright.core.errors import CheckpointError
from trainwright.core.names.hidden_names import plain_name

# Keys of a group that are not hyper-parameters of an optimizer's class: parameters, and keys that schedulers add.
_ADDED_KEYS = frozenset(
    {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
# Entries of torch's optimizer states that have their parameter's shape.
_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "exp_inf", "prev", "ax")
# Buffers of torch's normalization layers.
_BUFFER_NAMES = ("running_mean", "running_var", "num_batches_tracked")


class NamesUnknown(CheckpointError):
    """Raised if a file does not determine the parameter names of an optimizer. The message has the reason.

    `ClassUnknown` is the sub-class for the optimizer's class.

    Attributes:
        advice: the option with which the user provides the missing names or class.
    """

    advice = "Pass the parameter names in the optimizer's order with --param-names."


class ClassUnknown(NamesUnknown):
    """Raised if a file does not determine an optimizer's class."""

    advice = "Pass the class with --optimizer-class, for example --optimizer-class AdamW."


def named_from_positions(
    packed: Mapping[str, Any],
    weights: Mapping[str, Any],
    *,
    ordered: bool,
    names: Sequence[str] | None = None,
    class_name: str | None = None,
) -> dict[str, Any]:
    """Return a saved `optimizer.state_dict()` in the form that `named_optimizer_state` returns.

    For example, `{"state": {0: {"step": 5}}, "param_groups": [{"lr": 0.1, "params": [0]}]}` of a model with the weight
    `a` becomes `{"class": "SGD", "groups": [{"lr": 0.1, "params": ["a"]}], "state": {"a": {"step": 5}}}` with
    `class_name="SGD"`. A complete group determines the class.

    Args:
        packed: the saved state dict, with positions as in torch, or with parameter names, as FSDP saves it.
        weights: the state dict of the model, including buffers.
        ordered: True if `weights` are in the order of the model's modules. Safetensors files do not preserve this
            order.
        names: the parameter names in the optimizer's order. They have no effect if `packed` has names instead of
            positions. Default: None, which infers them.
        class_name: the optimizer's class. Default: None, which infers it.

    Raises:
        NamesUnknown: the names or the class are missing or ambiguous.
        CheckpointError: `packed` is not the state of an optimizer, `names` do not fit it or the weights, or its names
            are not those of weights.
    """
    try:
        groups = [dict(group) for group in packed["param_groups"]]
        positions_by_group = [list(group["params"]) for group in groups]
        state = {position: dict(values) for position, values in packed.get("state", {}).items()}
        # FSDP has the parameter's name instead of its position.
        has_names = any(isinstance(position, str) for position in chain.from_iterable(positions_by_group))
        if not has_names:
            positions_by_group = [[int(position) for position in positions] for positions in positions_by_group]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"this is not the state of a torch optimizer: {error!r}.") from error
    if has_names:
        name_of = {position: plain_name(str(position)) for position in chain.from_iterable(positions_by_group)}
        missing = [name for name in name_of.values() if name not in weights]
        if missing:
            raise CheckpointError(f"the file has no weights of the optimizer's parameters {', '.join(missing[:5])}.")
    else:
        name_of = _names(groups, positions_by_group, state, weights, ordered, names)
    named_groups = []
    for group, positions in zip(groups, positions_by_group, strict=True):
        named = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        named["params"] = [name_of[position] for position in positions]
        named_groups.append(named)
    return {
        "class": class_name or _class_of(groups),
        "groups": named_groups,
        # torch creates the state of a parameter at its first gradient, so that some parameters have none.
        "state": {name: state.get(position, {}) for position, name in name_of.items()},
    }


def steps_of(packed: Mapping[str, Any]) -> int:
    """Return the largest step count in a saved optimizer state, or 0 if the state has no step count."""
    steps = 0
    for values in packed.get("state", {}).values():
        if isinstance(values, Mapping) and "step" in values:
            steps = max(steps, int(values["step"]))
    return steps


def _names(
    groups: list[dict[str, Any]],
    positions_by_group: list[list[int]],
    state: Mapping[int, Mapping[str, Any]],
    weights: Mapping[str, Any],
    ordered: bool,
    names: Sequence[str] | None,
) -> dict[int, str]:
    """Return the parameter names by position, from the first source in the module's docstring that exists."""
    all_positions = list(chain.from_iterable(positions_by_group))
    shapes = {position: _shape_of(state.get(position, {})) for position in all_positions}
    if names is None and all("param_names" in group for group in groups):
        # An optimizer that was created from `named_parameters()` saves them. The model may have been compiled.
        names = [plain_name(str(name)) for group in groups for name in group["param_names"]]
    if names is not None:
        return _checked_names(names, shapes, weights)
    candidates = _parameters(weights)
    if len(candidates) < len(all_positions):
        raise NamesUnknown(
            f"the optimizer has {len(all_positions)} parameters, and the file has {len(candidates)} weights."
        )
    if ordered and len(groups) == 1 and len(candidates) == len(all_positions):
        # The usual `AdamW(model.parameters())`.
        name_of = dict(zip(all_positions, candidates, strict=True))
        _check_shapes(name_of, shapes, weights)
        return name_of
    return _names_by_shape(positions_by_group, shapes, candidates, weights, ordered)


def _checked_names(
    names: Sequence[str], shapes: Mapping[int, torch.Size | None], weights: Mapping[str, Any]
) -> dict[int, str]:
    """Return known names by position. `shapes` has the positions in the optimizer's order.

    Raises a `CheckpointError`, which is not a `NamesUnknown`, if the names do not fit: the user must correct them.
    """
    if len(names) != len(shapes) or len(set(names)) != len(names):
        raise CheckpointError(
            f"{len(set(names))} different names were given for an optimizer of {len(shapes)} parameters. Pass one "
            "name for each parameter."
        )
    missing = [name for name in names if name not in weights]
    if missing:
        raise CheckpointError(f"the file has no weights of the given names {', '.join(missing[:5])}.")
    name_of = dict(zip(shapes, names, strict=True))
    try:
        _check_shapes(name_of, shapes, weights)
    except NamesUnknown as error:
        raise CheckpointError(str(error)) from error
    return name_of


def _parameters(weights: Mapping[str, Any]) -> list[str]:
    """Return the names that may be parameters, in order. A tied tensor is included once, under its first name.

    Integers and the buffers of torch's batch norms are not included. Other buffers cannot be distinguished from
    parameters.
    """
    name_of_memory: dict[tuple[Any, ...], str] = {}
    for name, value in weights.items():
        if name.rpartition(".")[2] in _BUFFER_NAMES:
            continue
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        # Tied tensors have the same address. All empty tensors have the address 0, and count as different.
        memory = (value.data_ptr(), value.shape, value.stride()) if value.numel() else (name,)
        name_of_memory.setdefault(memory, name)
    return list(name_of_memory.values())


def _shape_of(values: Mapping[str, Any]) -> torch.Size | None:
    """Return the shape of a parameter with the optimizer state `values`, or None if the state has no such tensor."""
    for key in _LIKE_PARAMETER:
        value = values.get(key)
        if isinstance(value, torch.Tensor):
            return value.shape
    return None


def _check_shapes(
    name_of: Mapping[int, str], shapes: Mapping[int, torch.Size | None], weights: Mapping[str, Any]
) -> None:
    """Raise `NamesUnknown` if the state at a position has another shape than the weight with its name."""
    for position, name in name_of.items():
        shape = shapes[position]
        if shape is not None and shape != weights[name].shape:
            raise NamesUnknown(
                f"the optimizer's parameter {position} has the shape {tuple(shape)}, but the weight at that position, "
                f"{name!r}, has {tuple(weights[name].shape)}."
            )


def _names_by_shape(
    positions_by_group: list[list[int]],
    shapes: Mapping[int, torch.Size | None],
    candidates: list[str],
    weights: Mapping[str, Any],
    ordered: bool,
) -> dict[int, str]:
    """Return parameter names by position, inferred from shapes.

    All weights of a shape must be in the same group, as with weight decay for matrices only, which needs one group of
    matrices and one of vectors. Several weights of a shape are matched in the model's order, which must be known.

    Raises:
        NamesUnknown: a shape is unknown, or the names are ambiguous.
    """
    names_of_shape: dict[torch.Size, list[str]] = {}
    for name in candidates:
        names_of_shape.setdefault(weights[name].shape, []).append(name)
    name_of: dict[int, str] = {}
    for positions in positions_by_group:
        positions_of_shape: dict[torch.Size, list[int]] = {}
        for position in positions:
            shape = shapes[position]
            if shape is None:
                raise NamesUnknown("the shapes of some parameters are unknown, since they have no optimizer state.")
            positions_of_shape.setdefault(shape, []).append(position)
        for shape, same_shape in positions_of_shape.items():
            names = names_of_shape.get(shape, [])
            if len(names) != len(same_shape):
                raise NamesUnknown(
                    f"a group of the optimizer has {len(same_shape)} parameter(s) of the shape {tuple(shape)}, and the "
                    f"file has {len(names)} such weight(s), so the names are ambiguous."
                )
            if len(same_shape) > 1 and not ordered:
                raise NamesUnknown(
                    f"{len(same_shape)} weights have the shape {tuple(shape)}, and this file does not preserve their "
                    "order."
                )
            name_of |= zip(same_shape, names, strict=True)
    if ordered:
        # If weights of different shapes are not in the model's order, weights of one shape may not be in it either.
        order = {name: number for number, name in enumerate(candidates)}
        for positions in positions_by_group:
            numbers = [order[name_of[position]] for position in positions]
            if numbers != sorted(numbers):
                raise NamesUnknown("the order of the optimizer's parameters differs from the model's.")
    return name_of


def _class_of(groups: list[dict[str, Any]]) -> str:
    """Return the name of the only class of torch.optim whose groups have the hyper-parameters of the saved groups.

    Raises `ClassUnknown` if no class or several classes have them.
    """
    # All groups have the same keys.
    keys = frozenset(groups[0]) - _ADDED_KEYS if groups else frozenset()
    fitting = sorted(name for name, class_keys in _hyper_parameters().items() if class_keys - _ADDED_KEYS == keys)
    if set(fitting) >= {"Adam", "AdamW"} and "decoupled_weight_decay" in keys:
        # In newer versions of torch, AdamW is a sub-class of Adam that sets `decoupled_weight_decay` to True.
        fitting = ["AdamW" if groups[0]["decoupled_weight_decay"] else "Adam"]
    if len(fitting) != 1:
        which = " and ".join(fitting) or "no class in the installed torch.optim"
        raise ClassUnknown(f"the file does not name the optimizer's class, and its hyper-parameters match {which}.")
    return fitting[0]


def _hyper_parameters() -> dict[str, frozenset[str]]:
    """Return the keys of a parameter group by the class name, for each optimizer of the installed torch.optim."""
    keys_of: dict[str, frozenset[str]] = {}
    for name in torch.optim.__all__:
        cls = getattr(torch.optim, name)
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
            # A group's keys are known only after an optimizer was created. Muon accepts matrices only.
            shape = (1, 1) if name == "Muon" else (1,)
            parameter = torch.nn.Parameter(torch.zeros(shape))
            optimizer = cls([parameter], lr=0.1)  # type: ignore[call-arg]  # all have lr, the base class does not
            keys_of[name] = frozenset(optimizer.state_dict()["param_groups"][0])
    return keys_of
