"""From an engine's pieces to what a checkpoint holds, and back: whole tensors by the task's own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.checkpoint.format.model import load_plain_state
from trainwright.checkpoint.format.optimizer import load_named_optimizer_state
from trainwright.checkpoint.format.regions import Pieces as SavedPieces
from trainwright.checkpoint.format.regions import Span
from trainwright.core.errors import CheckpointError
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.tree import map_tensors
from trainwright.strategies.deepspeed.library import is_partitioned
from trainwright.strategies.deepspeed.zero_model import ZeroModel
from trainwright.strategies.deepspeed.zero_pieces import cut
from trainwright.strategies.state import FullState

# DeepSpeed's own implementations of torch's optimizers: their states are interchangeable.
_ADAMS = ("DeepSpeedCPUAdam", "FusedAdam", "ZenFlowCPUAdam")


class ReplicatedState(FullState):
    """The state of an engine that keeps everything whole, in the terms of torch's own optimizers."""

    def optimizer_states(self) -> list[dict[str, Any]]:
        found = super().optimizer_states()
        return [as_torch(tree, optimizer) for tree, optimizer in zip(found, self._optimizers, strict=True)]


class ZeroState(FullState):
    """The state of an engine that keeps some of it in pieces.

    Args:
        model: in the engine.
        task: the model by the names of the checkpoint.
        optimizers: what the engine steps: one, or none.
        is_main: whether this rank wants the values; others get tensors on the device `meta`.
        writes_pieces: each rank writes its pieces of a checkpoint.
        keeps_float32: trained parameters are float32 once the engine has let go of them, whatever it computes in.
    """

    def __init__(
        self,
        model: ZeroModel,
        task: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        is_main: bool,
        writes_pieces: bool,
        keeps_float32: bool,
    ) -> None:
        super().__init__(task, optimizers, model.device, is_main=is_main)
        self._library, self._pieces, self._groups, self._dtypes = (
            model.library,
            model.pieces,
            model.groups,
            model.dtypes,
        )
        self._writes_pieces, self._keeps_float32 = writes_pieces, keeps_float32
        self._stand_ins: dict[int, tuple[torch.Tensor, SavedPieces]] = {}
        self._parameters = {plain_name(name): parameter for name, parameter in task.named_parameters()}
        trained = {name for _, names in self._groups for name in names}
        self._trained = {
            id(p) for name, p in self._parameters.items() if name in trained and p.requires_grad and _numel(p)
        }

    # Pieces that are saved as they lie

    @property
    def saves_pieces(self) -> bool:
        # Without an optimizer, stage 3 shards weights all the same.
        return self._writes_pieces and (
            self._pieces is not None or any(is_partitioned(parameter) for parameter in self._parameters.values())
        )

    def in_pieces(self, tree: Any) -> Any:
        return map_tensors(self._saved, tree)

    def _stand_for(self, pieces: SavedPieces) -> torch.Tensor:
        """Return a tensor on the device `meta` that `in_pieces` exchanges for what this rank saves."""
        stand_in = torch.empty(pieces.shape, dtype=pieces.dtype, device="meta")
        self._stand_ins[id(stand_in)] = stand_in, pieces
        return stand_in

    def _saved(self, tensor: torch.Tensor) -> Any:
        stand_in, pieces = self._stand_ins.get(id(tensor), (None, None))
        return tensor if stand_in is None else pieces

    def _to_save(self, value: torch.Tensor) -> torch.Tensor:
        """Return what stands for a parameter that lies in pieces, and others whole. Collective as `model_state`."""
        if self._pieces is not None and id(value) in self._trained:
            return self._stand_for(self._pieces.to_save(value, shape_of(value)))
        held: Any = value.ds_tensor if is_partitioned(value) else None  # type: ignore[attr-defined]  # DeepSpeed's
        if held is None or held.status.name != "AVAILABLE":  # whole anyway, or on a disk
            return self._weight(value)
        span, dtype = _partition(value), self._dtypes.get(id(value), held.dtype)
        values = held.data.view(-1).narrow(0, 0, span.stop - span.start).to(dtype)
        return self._stand_for(SavedPieces(tuple(shape_of(value)), dtype, ((span, values),)))

    # Weights

    def model_state(self) -> dict[str, Any]:  # trained weights are float32
        self._stand_ins.clear()
        to_save = self._to_save if self.saves_pieces else self.full_tensor
        convert = cache(to_save)  # tied weights are one tensor, also in a checkpoint
        found = self._task.state_dict(keep_vars=True)
        return {name: convert(v) if isinstance(v, torch.Tensor) else v for name, v in found.items()}

    def _weight(self, value: torch.Tensor) -> torch.Tensor:
        """Return a parameter or buffer whole, on this rank's device. Collective."""
        found = self._gathered(value)
        # The engine casts what is frozen too, and keeps no float32 copy of it.
        return found if id(value) in self._trained else found.to(self._dtypes.get(id(value), found.dtype))

    def _gathered(self, value: torch.Tensor) -> torch.Tensor:
        value_is_exact = not is_partitioned(value) and value.dtype is torch.float32
        if self._pieces is not None and id(value) in self._trained and not value_is_exact:
            return self._pieces.whole(value, shape_of(value))
        if not is_partitioned(value):
            return value.detach()
        with self._library.zero.GatheredParameters([value]):
            return value.detach().clone()

    def _whole(self, tensor: torch.Tensor, *, keep: bool) -> torch.Tensor:
        return _kept(self._weight(tensor), keep=keep)

    def missing_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        is_trained = id(tensor) in self._trained and self._pieces is not None
        if not is_partitioned(tensor) and not (is_trained and tensor.dtype is not torch.float32):
            return None
        dtype = torch.float32 if is_trained else self._dtypes.get(id(tensor), tensor.dtype)
        return torch.empty(shape_of(tensor), dtype=dtype, device="meta")

    def full_parameters(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        return {name: _kept(self._weight(parameter), keep=keep) for name, parameter in self._parameters.items()}

    def full_gradients(self, *, keep: bool = True) -> dict[str, torch.Tensor]:
        pieces = self._pieces
        if pieces is None:
            return {}
        held = {id(parameter): gradient for parameter, gradient in pieces.gradients()}
        found = {}
        for name, parameter in self._parameters.items():
            if id(parameter) in self._trained:
                whole = pieces.whole_gradient(parameter, shape_of(parameter), held.get(id(parameter)))
                found[name] = _kept(whole, keep=keep)
        return found

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        given = {plain_name(name): value for name, value in state.items()}
        if any(is_partitioned(parameter) for parameter in self._parameters.values()):
            found = self._load_into_pieces(given, strict)
        else:
            found = load_plain_state(self._task, state, strict=strict)
        for name, parameter in self._parameters_of_state():
            if id(parameter) in self._trained and name in given and self._pieces is not None:
                self._pieces.set_value(parameter, given[name])
        if self._pieces is not None:
            self._pieces.after_loading()
        return found

    def _parameters_of_state(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, value in self._task.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter):
                yield plain_name(name), value

    def _load_into_pieces(self, given: Mapping[str, Any], strict: bool) -> tuple[list[str], list[str]]:
        own = {plain_name(name): value for name, value in self._task.state_dict(keep_vars=True).items()}
        missing = [name for name in own if name not in given]
        left_over = [name for name in given if name not in own]
        parameters = dict(self._parameters_of_state())
        wrong = [
            f"{name} is {tuple(given[name].shape)} and not {tuple(shape_of(parameter))}"
            for name, parameter in parameters.items()
            if name in given and given[name].shape != shape_of(parameter)
        ]
        problems = [*wrong, *([f"{name} is missing" for name in missing] if strict else [])]
        problems += [f"{name} is not in the task" for name in left_over] if strict else []
        if problems:
            raise CheckpointError(
                f"the saved weights do not fit {type(self._task).__name__}. "
                f"{'' if wrong else 'Pass strict=False to load what fits by name. '}{'; '.join(problems[:10])}."
            )
        load_plain_state(
            self._task, {n: given[n] for n in own if n in given and n not in parameters}, strict=False
        )  # buffers
        for name, parameter in parameters.items():
            if name in given:
                self._set_partition(parameter, given[name])
        return missing, left_over

    def _set_partition(self, parameter: Any, value: torch.Tensor) -> None:
        """Put a whole value into this rank's partition of what modules compute with, or into what is whole."""
        if not is_partitioned(parameter):
            parameter.data.copy_(value)
            return
        if parameter.ds_status.name == "AVAILABLE":
            parameter.partition()  # small ones stay gathered after a step, with what is about to be overwritten
        held = parameter.ds_tensor
        if held.status.name != "AVAILABLE":  # on a disk
            with self._library.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(value)
            return
        span = _partition(parameter)
        held.data.view(-1).narrow(0, 0, span.stop - span.start).copy_(cut(value, span))

    # Optimizer

    def optimizer_states(self) -> list[dict[str, Any]]:
        return [self._state_of(optimizer) for optimizer in self._optimizers]

    def _state_of(self, real: Optimizer) -> dict[str, Any]:
        in_pieces = self.saves_pieces
        states = {
            name: self._states_of(self._parameters[name], in_pieces=in_pieces)
            for _, names in self._groups
            for name in names
        }
        return as_torch(
            {
                "class": type(real).__qualname__,
                "groups": [
                    {**{key: value for key, value in group.items() if key != "params"}, "params": names}
                    for group, names in self._groups
                ],
                "state": states,
            },
            real,
        )

    def _states_of(self, parameter: nn.Parameter, *, in_pieces: bool = False) -> dict[str, Any]:
        pieces = self._pieces
        if pieces is None or id(parameter) not in self._trained:
            return {}
        try:
            vectors, others = pieces.state_of(parameter)
        except TypeError as error:
            raise CheckpointError(
                f"{type(pieces.zero.optimizer).__name__}: {error}, so that it cannot be put together from pieces. Use "
                "strategy='ddp', or another optimizer."
            ) from error
        shape = shape_of(parameter)
        found: dict[str, Any] = {}
        for key in vectors:
            if in_pieces:
                found[key] = self._stand_for(pieces.to_save(parameter, shape, key))
            else:
                found[key] = _kept(pieces.whole(parameter, shape, key), keep=self._is_main)
        return found | {
            key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in others.items()
        }

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        pieces = self._pieces
        assert pieces is not None  # there is an optimizer
        groups = self._matching_groups(optimizer, state)
        states = {name: dict(state["state"][name]) for _, names in self._groups for name in names}
        self._check_states(optimizer, states)
        for (group, _), saved in zip(self._groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key in group and key != "params"})
        trained = [(n, self._parameters[n]) for n in states if id(self._parameters[n]) in self._trained]
        for _, parameter in trained:
            pieces.forget_states(parameter)
        for name, parameter in trained:
            if states[name]:
                pieces.set_states(parameter, _counting(optimizer, states[name]))
        pieces.after_loading()

    def _matching_groups(self, real: Optimizer, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the saved hyper-parameters in the order of the own groups, once names and classes are compared."""
        stand_in = type(torch_name(real), (Optimizer,), {})
        names: dict[torch.Tensor, str] = {}
        groups = []
        for group, members in self._groups:
            made = [torch.empty(0, device="meta") for _ in members]
            names.update(zip(made, members, strict=True))
            groups.append({**group, "params": made})
        shadow = stand_in(groups, {})
        bare: dict[str, Any] = {name: {} for name in tree.get("state", {})}
        load_named_optimizer_state(shadow, {**tree, "state": bare}, names)
        return list(shadow.param_groups)

    def _check_states(self, real: Optimizer, states: Mapping[str, Mapping[str, Any]]) -> None:
        counts: dict[int, tuple[str, float]] = {}
        pieces = self._pieces
        for name, values in states.items():
            parameter = self._parameters[name]
            if id(parameter) not in self._trained or pieces is None:
                continue
            shape = shape_of(parameter)
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape != shape:
                    raise CheckpointError(
                        f"{type(real).__name__} keeps {key!r} of shape {tuple(value.shape)} for {name!r}, which has "
                        "another shape, so that it cannot be cut into pieces. Use strategy='ddp', or start the "
                        "optimizer anew with allow_missing=['optimizer']."
                    )
            if "step" in values:
                flat, steps = id(pieces.flat(parameter)), float(values["step"])
                other, before = counts.setdefault(flat, (name, steps))
                if before != steps:
                    raise CheckpointError(
                        f"{type(real).__name__} has stepped {name!r} {steps:g} times and {other!r} {before:g} times, "
                        "and DeepSpeed steps the parameters of a group as one. Put them into groups of their own, or "
                        "start the optimizer anew with allow_missing=['optimizer']."
                    )

    # The end

    def release(self) -> dict[int, nn.Parameter]:
        """Give the optimizers whole states and the groups that they had, and return whole parameters. Collective."""
        # The states come first: once they are whole, their pieces go, and make room for the weights.
        whole = [
            {name: self._states_of(self._parameters[name]) for _, names in self._groups for name in names}
            for _ in self._optimizers
        ]
        if self._pieces is not None:
            for parameter in self._parameters.values():
                if id(parameter) in self._trained:
                    self._pieces.forget_states(parameter)
        new = {}
        for number, parameter in {id(p): p for p in self._parameters.values()}.items():
            value = self._weight(parameter).to("cpu", copy=True)
            if not (self._keeps_float32 and number in self._trained):
                value = value.to(self._dtypes[number])
            new[number] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        for optimizer, states in zip(self._optimizers, whole, strict=True):
            optimizer.state.clear()
            optimizer.state.update({new[id(self._parameters[name])]: state for name, state in states.items() if state})
            optimizer.param_groups[:] = [group for group, _ in self._groups]
            for group, names in self._groups:
                group["params"] = [new[id(self._parameters[name])] for name in names]
        return new


def _partition(parameter: Any) -> Span:
    """Return which elements of a partitioned parameter this rank has, without what pads the last ones."""
    length: int = parameter.partition_numel()
    start = min(parameter.ds_zero_partition_rank * length, parameter.ds_numel)
    return Span(start, min(start + length, parameter.ds_numel))


def _kept(value: torch.Tensor, *, keep: bool) -> torch.Tensor:
    return value.cpu() if keep else torch.empty_like(value, device="meta")


def shape_of(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of a parameter when it is whole."""
    held: Any = parameter
    found: torch.Size = held.ds_shape if is_partitioned(parameter) else held.shape
    return found


def _numel(parameter: torch.Tensor) -> int:
    return shape_of(parameter).numel()


def torch_name(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class, or of torch's own where DeepSpeed has one of the same states."""
    if type(optimizer).__name__ in _ADAMS:
        return "AdamW" if getattr(optimizer, "adam_w_mode", True) else "Adam"
    return type(optimizer).__qualname__


def as_torch(tree: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return a state as torch's own optimizer would have it, where DeepSpeed has one of the same states."""
    if type(optimizer).__name__ not in _ADAMS:
        return tree
    name = torch_name(optimizer)
    like = getattr(torch.optim, name)([torch.zeros(1)]).param_groups[0]
    keys = [key for key in like if key != "params"]
    groups = [
        {**{key: group.get(key, like[key]) for key in keys}, "params": group["params"]} for group in tree["groups"]
    ]
    state = {
        parameter: {k: torch.tensor(float(v)) if k == "step" else v for k, v in values.items()}
        for parameter, values in tree["state"].items()
    }
    return {**tree, "class": name, "groups": groups, "state": state}


def _counting(optimizer: Optimizer, values: dict[str, Any]) -> dict[str, Any]:
    """Return states as an optimizer of DeepSpeed's counts its steps: in whole numbers of Python."""
    if type(optimizer).__name__ in _ADAMS and "step" in values:
        return {**values, "step": int(values["step"])}
    return values
