"""Conversion between the shards of a DeepSpeed engine and the full tensors of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.checkpoint.format.model import load_plain_state
from trainwright.checkpoint.format.optimizer import load_named_optimizer_state
from trainwright.checkpoint.format.regions import Span
from trainwright.checkpoint.format.regions import TensorShards as SavedShards
from trainwright.core.errors import CheckpointError
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.tree import map_tensors
from trainwright.strategies.deepspeed.library import is_partitioned
from trainwright.strategies.deepspeed.zero_model import ZeroModel
from trainwright.strategies.deepspeed.zero_shards import read_span
from trainwright.strategies.state import FullState

# DeepSpeed's own implementations of torch's optimizers: their states are interchangeable.
_ADAMS = ("DeepSpeedCPUAdam", "FusedAdam", "ZenFlowCPUAdam")


class ReplicatedState(FullState):
    """The state of a stage-0 engine, with optimizer states in the format of torch's own optimizers."""

    def optimizer_states(self) -> list[dict[str, Any]]:
        trees = super().optimizer_states()
        return [as_torch(tree, optimizer) for tree, optimizer in zip(trees, self._optimizers, strict=True)]


class ZeroState(FullState):
    """The state of an engine that shards parameters, gradients or optimizer states.

    Args:
        model: The model and its engine.
        task: The model whose names a checkpoint uses.
        optimizers: A list with the optimizer that the engine steps. Empty if the model is not trained.
        is_main: True on the main rank, which receives gathered values. Other ranks get tensors on the device `meta`.
        writes_shards: Each rank writes its shards of a checkpoint.
        keeps_float32: `release` returns trained parameters in float32, even if the engine computes in another dtype.

    Attributes:
        _shards: Shards of gradients and optimizer states. None if the model is not trained: stage 3 then shards only
            the weights.
        _groups, _dtypes: `groups` and `dtypes` of the `ZeroModel`.
        _parameters: The model's parameters by plain name. Tied parameters have one name.
        _trained: Ids of the parameters with shards of optimizer states.
        _placeholders: The shards that replace a placeholder, by the id of the placeholder. The placeholder is kept, so
            that its id stays in use. `model_state` begins a new save, and so removes them.
    """

    def __init__(
        self,
        model: ZeroModel,
        task: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        is_main: bool,
        writes_shards: bool,
        keeps_float32: bool,
    ) -> None:
        super().__init__(task, optimizers, model.device, is_main=is_main)
        self._library = model.library
        self._shards = model.shards
        self._groups = model.groups
        self._dtypes = model.dtypes
        self._writes_shards = writes_shards
        self._keeps_float32 = keeps_float32
        self._placeholders: dict[int, tuple[torch.Tensor, SavedShards]] = {}
        self._parameters = {plain_name(name): parameter for name, parameter in task.named_parameters()}
        self._trained: set[int] = set()
        for name in self._names_in_groups():
            parameter = self._parameters[name]
            if parameter.requires_grad and shape_of(parameter).numel() > 0:
                self._trained.add(id(parameter))

    def _names_in_groups(self) -> list[str]:
        """Return the names of the parameters that the optimizer has, in the order of its groups."""
        names = []
        for _, names_of_group in self._groups:
            names += names_of_group
        return names

    # Shards for checkpoints

    @property
    def saves_shards(self) -> bool:
        if not self._writes_shards:
            return False
        # Without an optimizer, stage 3 nevertheless shards weights.
        return self._shards is not None or any(is_partitioned(parameter) for parameter in self._parameters.values())

    def shards_of(self, tree: object) -> Any:
        return map_tensors(self._shards_of_placeholder, tree)

    def _placeholder_for(self, shards: SavedShards) -> torch.Tensor:
        """Return a `meta` tensor that `shards_of` replaces by the shards that this rank saves."""
        placeholder = torch.empty(shards.shape, dtype=shards.dtype, device="meta")
        self._placeholders[id(placeholder)] = placeholder, shards
        return placeholder

    def _shards_of_placeholder(self, tensor: torch.Tensor) -> Any:
        if id(tensor) not in self._placeholders:
            return tensor
        _, shards = self._placeholders[id(tensor)]
        return shards

    def _shards_or_full(self, value: torch.Tensor) -> torch.Tensor:
        """Return a placeholder for a sharded parameter, or the full value of any other tensor.

        Collective only for a weight that is on disk.
        """
        if self._shards is not None and id(value) in self._trained:
            return self._placeholder_for(self._shards.to_save(value, shape_of(value)))
        if not is_partitioned(value):
            return self._full_weight(value)
        partition: Any = value.ds_tensor  # type: ignore[attr-defined]  # DeepSpeed's attribute
        if partition.status.name != "AVAILABLE":  # it is on disk
            return self._full_weight(value)
        span = _partition(value)
        dtype = self._dtypes.get(id(value), partition.dtype)
        values = partition.data.view(-1).narrow(0, 0, span.stop - span.start).to(dtype)
        return self._placeholder_for(SavedShards(tuple(shape_of(value)), dtype, ((span, values),)))

    # Weights

    def model_state(self) -> dict[str, Any]:
        self._placeholders.clear()
        to_save = self._shards_or_full if self.saves_shards else self.gather_tensor
        convert = cache(to_save)  # tied weights are one tensor, also in a checkpoint
        state = dict(self._task.state_dict(keep_vars=True))
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = convert(value)
        return state

    def _full_weight(self, value: torch.Tensor) -> torch.Tensor:
        """Return a full parameter or buffer on this rank's device. Collective."""
        full = self._full_values(value)
        if id(value) in self._trained:
            return full
        return full.to(self._dtypes.get(id(value), full.dtype))  # the engine also casts frozen parameters

    def _full_values(self, value: torch.Tensor) -> torch.Tensor:
        # The model may have the weights in 16 bits. The shards have them in float32.
        value_is_exact = not is_partitioned(value) and value.dtype is torch.float32
        shards = self._shards
        if shards is not None and id(value) in self._trained and not value_is_exact:
            return shards.full(value, shape_of(value))
        if not is_partitioned(value):
            return value.detach()
        with self._library.zero.GatheredParameters([value]):
            return value.detach().clone()

    def _full(self, tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
        return _to_host_or_meta(self._full_weight(tensor), keep=keep)

    def missing_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        is_trained = id(tensor) in self._trained and self._shards is not None
        has_exact_weights = not is_trained or tensor.dtype is torch.float32
        if not is_partitioned(tensor) and has_exact_weights:
            return None
        dtype = torch.float32 if is_trained else self._dtypes.get(id(tensor), tensor.dtype)
        return torch.empty(shape_of(tensor), dtype=dtype, device="meta")

    def full_parameters(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        return {
            name: _to_host_or_meta(self._full_weight(parameter), keep=keep)
            for name, parameter in self._parameters.items()
        }

    def full_gradients(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        shards = self._shards
        if shards is None:
            return {}
        gradients_here = {id(parameter): gradient for parameter, gradient in shards.gradients()}
        full_gradients = {}
        for name, parameter in self._parameters.items():
            if id(parameter) in self._trained:
                full = shards.full_gradient(parameter, shape_of(parameter), gradients_here.get(id(parameter)))
                full_gradients[name] = _to_host_or_meta(full, keep=keep)
        return full_gradients

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        saved = {plain_name(name): value for name, value in state.items()}
        if any(is_partitioned(parameter) for parameter in self._parameters.values()):
            mismatches = self._load_sharded(saved, strict)
        else:
            mismatches = load_plain_state(self._task, state, strict=strict)
        # The optimizer's float32 shards are the weights that it steps. The model's 16-bit values are copies of them.
        shards = self._shards
        if shards is not None:
            for name, parameter in self._entries_of_task().items():
                if id(parameter) in self._trained and name in saved:
                    shards.set_value(parameter, saved[name])
            shards.after_loading()
        return mismatches

    def _entries_of_task(self) -> dict[str, Any]:
        """Return all entries of the task's state by plain name. Tied parameters have an entry for each name."""
        return {plain_name(name): value for name, value in self._task.state_dict(keep_vars=True).items()}

    def _load_sharded(self, saved: Mapping[str, Any], strict: bool) -> tuple[list[str], list[str]]:
        """Load weights into a model with partitioned parameters. Return missing and unexpected names."""
        current = self._entries_of_task()
        missing = [name for name in current if name not in saved]
        unexpected = [name for name in saved if name not in current]
        parameters = {}
        saved_buffers = {}
        for name, value in current.items():
            if name not in saved:
                continue
            if isinstance(value, nn.Parameter):
                parameters[name] = value
            else:
                saved_buffers[name] = saved[name]
        problems = []
        for name, parameter in parameters.items():
            if saved[name].shape != shape_of(parameter):
                problems.append(f"{name} is {tuple(saved[name].shape)} and not {tuple(shape_of(parameter))}")
        advice = "" if problems else "Pass strict=False to load what fits by name. "
        if strict:
            problems += [f"{name} is missing" for name in missing]
            problems += [f"{name} is not in the task" for name in unexpected]
        if problems:
            raise CheckpointError(
                f"the saved weights do not fit {type(self._task).__name__}. {advice}{'; '.join(problems[:10])}."
            )
        load_plain_state(self._task, saved_buffers, strict=False)
        for name, parameter in parameters.items():
            self._set_partition(parameter, saved[name])
        return missing, unexpected

    def _set_partition(self, parameter: Any, value: torch.Tensor) -> None:
        """Set a parameter, or this rank's partition of a sharded parameter, from a full value."""
        if not is_partitioned(parameter):
            parameter.data.copy_(value)
            return
        if parameter.ds_status.name == "AVAILABLE":
            parameter.partition()  # small parameters stay gathered after a step
        partition = parameter.ds_tensor
        if partition.status.name != "AVAILABLE":  # it is on disk
            with self._library.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(value)
            return
        span = _partition(parameter)
        partition.data.view(-1).narrow(0, 0, span.stop - span.start).copy_(read_span(value, span))

    # Optimizer

    def optimizer_states(self) -> list[dict[str, Any]]:
        return [self._optimizer_state(optimizer) for optimizer in self._optimizers]

    def _optimizer_state(self, real: Optimizer) -> dict[str, Any]:
        sharded = self.saves_shards
        states = {}
        for name in self._names_in_groups():
            states[name] = self._states_of_parameter(self._parameters[name], sharded=sharded)
        groups = [{**group, "params": names} for group, names in self._groups]
        return as_torch({"class": type(real).__qualname__, "groups": groups, "state": states}, real)

    def _states_of_parameter(self, parameter: nn.Parameter, *, sharded: bool = False) -> dict[str, Any]:
        """Return the optimizer states of a parameter. Collective, except with `sharded`, which returns placeholders."""
        shards = self._shards
        if shards is None or id(parameter) not in self._trained:
            return {}
        try:
            vectors, scalars = shards.state_of(parameter)
        except TypeError as error:
            raise CheckpointError(
                f"{type(shards.zero.optimizer).__name__}: {error}, and cannot be gathered from shards. Use "
                "strategy='ddp', or another optimizer."
            ) from error
        shape = shape_of(parameter)
        states: dict[str, Any] = {}
        for key in vectors:
            if sharded:
                states[key] = self._placeholder_for(shards.to_save(parameter, shape, key))
            else:
                states[key] = _to_host_or_meta(shards.full(parameter, shape, key), keep=self._is_main)
        for key, value in scalars.items():
            states[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return states

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        shards = self._shards
        assert shards is not None  # there is an optimizer
        groups = self._matching_groups(optimizer, state)
        states = {name: dict(state["state"][name]) for name in self._names_in_groups()}
        self._check_states(optimizer, states)
        for (group, _), saved in zip(self._groups, groups, strict=True):
            for key, value in saved.items():
                if key in group and key != "params":
                    group[key] = value
        trained = [name for name in states if id(self._parameters[name]) in self._trained]
        for name in trained:  # all, before the first is set: one flat tensor has the states of several parameters
            shards.clear_states(self._parameters[name])
        for name in trained:
            if states[name]:
                shards.set_states(self._parameters[name], _counting(optimizer, states[name]))
        shards.after_loading()

    def check_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        self._matching_groups(optimizer, state)

    def _matching_groups(self, real: Optimizer, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Check parameter names and optimizer class of a state. Return the state's groups in the order of the engine's
        groups.
        """
        # DeepSpeed's optimizer has flat tensors, so that names of parameters do not fit it. Load the groups into an
        # optimizer whose class has the same name and which has the original groups.
        names: dict[torch.Tensor, str] = {}
        groups = []
        for group, members in self._groups:
            parameters = [torch.empty(0, device="meta") for _ in members]
            names.update(zip(parameters, members, strict=True))
            groups.append({**group, "params": parameters})
        stand_in_class = type(torch_name(real), (Optimizer,), {})
        stand_in = stand_in_class(groups, {})
        without_states: dict[str, Any] = {name: {} for name in tree.get("state", {})}
        load_named_optimizer_state(stand_in, {**tree, "state": without_states}, names)
        return list(stand_in.param_groups)

    def _check_states(self, real: Optimizer, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that states, by the name of their parameter, can be stored in flat vectors."""
        counts: dict[int, tuple[str, float]] = {}  # id of a flat tensor → a parameter in it, and its number of steps
        shards = self._shards
        for name, values in states.items():
            parameter = self._parameters[name]
            if id(parameter) not in self._trained or shards is None:
                continue
            shape = shape_of(parameter)
            for key, value in values.items():
                has_dimensions = isinstance(value, torch.Tensor) and value.dim() > 0
                if has_dimensions and value.shape != shape:
                    raise CheckpointError(
                        f"{type(real).__name__} keeps {key!r} of shape {tuple(value.shape)} for {name!r} of shape "
                        f"{tuple(shape)}, which cannot be sharded. Use strategy='ddp', or reset the optimizer with "
                        "allow_missing=['optimizer']."
                    )
            if "step" in values:
                flat = id(shards.flat(parameter))
                steps = float(values["step"])
                other, steps_of_other = counts.setdefault(flat, (name, steps))
                if steps_of_other != steps:
                    raise CheckpointError(
                        f"{type(real).__name__} has stepped {name!r} {steps:g} times and {other!r} "
                        f"{steps_of_other:g} times, "
                        "but DeepSpeed steps the parameters of a group together. Put them into separate groups, or "
                        "reset the optimizer with allow_missing=['optimizer']."
                    )

    # The end

    def release(self) -> dict[int, nn.Parameter]:
        """Give the optimizers full states and their original groups, with new full parameters. Collective.

        Returns:
            id of a parameter → its new full parameter on the host.
        """
        # Gather the states first: their shards are then freed and make room for the weights.
        states_of_optimizers = []
        for _ in self._optimizers:
            states = {name: self._states_of_parameter(self._parameters[name]) for name in self._names_in_groups()}
            states_of_optimizers.append(states)
        if self._shards is not None:
            for parameter in self._parameters.values():
                if id(parameter) in self._trained:
                    self._shards.clear_states(parameter)
        new: dict[int, nn.Parameter] = {}
        for parameter in self._parameters.values():
            if id(parameter) in new:
                continue  # a tied weight
            value = self._full_weight(parameter).to("cpu", copy=True)
            if not (self._keeps_float32 and id(parameter) in self._trained):
                value = value.to(self._dtypes[id(parameter)])  # `dtypes` has an entry for every parameter
            new[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        for optimizer, states in zip(self._optimizers, states_of_optimizers, strict=True):
            optimizer.state.clear()
            for name, state in states.items():
                if state:
                    optimizer.state[new[id(self._parameters[name])]] = state
            optimizer.param_groups[:] = [group for group, _ in self._groups]
            for group, names in self._groups:
                group["params"] = [new[id(self._parameters[name])] for name in names]
        return new


def _partition(parameter: Any) -> Span:
    """Return this rank's elements of a partitioned parameter, without padding."""
    length: int = parameter.partition_numel()
    start = min(parameter.ds_zero_partition_rank * length, parameter.ds_numel)
    return Span(start, min(start + length, parameter.ds_numel))


def _to_host_or_meta(value: torch.Tensor, *, keep: bool) -> torch.Tensor:
    """Return a tensor on the host, or without `keep` on the device `meta`, for ranks that receive no values."""
    return value.cpu() if keep else torch.empty_like(value, device="meta")


def shape_of(parameter: torch.Tensor) -> torch.Size:
    """Return the full shape of a parameter."""
    if not is_partitioned(parameter):
        return parameter.shape
    shape: torch.Size = parameter.ds_shape  # type: ignore[attr-defined]  # DeepSpeed's attribute
    return shape


def torch_name(optimizer: Optimizer) -> str:
    """Return the class name of an optimizer. DeepSpeed's implementations have the names of torch's classes."""
    if type(optimizer).__name__ in _ADAMS:
        return "AdamW" if getattr(optimizer, "adam_w_mode", True) else "Adam"
    return type(optimizer).__qualname__


def as_torch(tree: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Convert the state of an optimizer class of DeepSpeed to the format of torch's class."""
    if type(optimizer).__name__ not in _ADAMS:
        return tree
    name = torch_name(optimizer)
    defaults = getattr(torch.optim, name)([torch.zeros(1)]).param_groups[0]
    groups = []
    for group in tree["groups"]:
        groups.append({key: group.get(key, default) for key, default in defaults.items()})  # torch's keys only
    states = {}
    for parameter, values in tree["state"].items():
        states[parameter] = dict(values)
        if "step" in values:  # a number in DeepSpeed, a tensor in torch
            states[parameter]["step"] = torch.tensor(float(values["step"]))
    return {**tree, "class": name, "groups": groups, "state": states}


def _counting(optimizer: Optimizer, values: dict[str, Any]) -> dict[str, Any]:
    """Return states whose step count is an int, which DeepSpeed's optimizer classes require."""
    if type(optimizer).__name__ in _ADAMS and "step" in values:
        return {**values, "step": int(values["step"])}
    return values
