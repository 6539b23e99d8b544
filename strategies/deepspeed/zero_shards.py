"""Shards of a DeepSpeed engine's float32 weights, gradients and optimizer states, parameter by parameter.

Stages 1 and 2 shard flat vectors of many parameters; stage 3 shards each parameter. The classes here find this rank's
shard of a parameter and reassemble full tensors.

Example at stage 1, with 2 ranks and one group of two parameters, `a` with 6 elements and `b` with 4: the flat vector is
`a0 … a5 b0 … b3`, and rank 1 holds its second half, `a5 b0 … b3`. Its shard of `a` is ShardRange(start=0, length=1,
offset=5), and its shard of `b` is ShardRange(start=1, length=4, offset=0).
"""

# DeepSpeed's accessors (0.19: safe_get_full_fp32_param, safe_get_local_optimizer_state, …) do not serve here. A sharded
# save needs the span of the parameter that a shard holds, which they do not return; a load writes only this span, and
# reads no more of the file. At stages 1 and 2 they read links that exist only after the first optimizer step.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trainwright.checkpoint.format.regions import Span
from trainwright.checkpoint.format.regions import TensorShards as SavedShards
from trainwright.checkpoint.format.shard_files import SavedTensor


@dataclass(frozen=True, slots=True)
class ShardRange:
    """This rank's shard of one parameter.

    Attributes:
        start: First element of the shard in the flat vector that contains it; see `ZeroShards.flat`. Optimizer states
            have the shape of that vector.
        length: Number of elements.
        offset: First element of the parameter that the shard holds.
    """

    start: int
    length: int
    offset: int

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """Return a view of the shard's elements in a flat vector."""
        return vector.detach().view(-1).narrow(0, self.start, self.length)

    @property
    def span(self) -> Span:
        """The elements of the parameter that the shard holds."""
        return Span(self.offset, self.offset + self.length)

    def shard_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the shard of a full value. If the value is in a checkpoint, only the shard is read."""
        return read_span(value, self.span)


def read_span(value: torch.Tensor, span: Span) -> torch.Tensor:
    """Return a span of a tensor's elements. If the tensor is in a checkpoint, only the span is read."""
    if isinstance(value, SavedTensor):
        return value.read(span)
    return value.detach().reshape(-1).narrow(0, span.start, span.stop - span.start)


class ZeroShards(ABC):
    """Access to the shards of an engine, for one parameter at a time.

    Args:
        optimizer: DeepSpeed's `engine.optimizer`.
        device: Device on which tensors are gathered.

    Attributes:
        zero: The argument `optimizer`. It wraps torch's optimizer, `zero.optimizer`, whose parameters are the flat
            vectors.
        device: The argument.
    """

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self.zero = optimizer
        self.device = device

    @property
    def states(self) -> dict[Any, dict[str, Any]]:
        """The optimizer states of the flat vectors."""
        states: dict[Any, dict[str, Any]] = self.zero.optimizer.state
        return states

    @abstractmethod
    def flat(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the flat float32 vector that contains this rank's shard of a trained parameter. Not collective."""

    @abstractmethod
    def shard(self, parameter: torch.Tensor) -> ShardRange | None:
        """Return this rank's shard of a trained parameter, or None if this rank holds no element. Not collective."""

    @abstractmethod
    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield trained parameters with this rank's shards of their gradients. Not collective.

        Must be called between the last backward and the step. The step reuses the memory of the shards.
        """

    @abstractmethod
    def discard_gradients(self) -> None:
        """Discard accumulated gradients. Not collective."""

    @contextmanager
    def loaded(self, parameter: torch.Tensor, *, changes: bool) -> Iterator[None]:
        """Return a context in which the flat vector of a parameter and its states are in memory.

        With `changes`, the context writes the vector and the states back to disk at its end.
        """
        yield

    def state_of(self, parameter: torch.Tensor) -> tuple[list[str], dict[str, Any]]:
        """Return the names of a parameter's optimizer states that are vectors, and the values of its scalar states."""
        with self.loaded(parameter, changes=False):
            flat = self.flat(parameter)
            state = self.states.get(flat, {})
            vectors = []
            scalars = {}
            for key, value in state.items():
                if not _is_vector(value):
                    scalars[key] = value
                elif value.numel() == flat.numel():
                    vectors.append(key)
                else:
                    raise TypeError(f"the state {key!r} has another shape than the parameters")
            return vectors, scalars

    def full(self, parameter: torch.Tensor, shape: torch.Size, key: str | None = None) -> torch.Tensor:
        """Return the full float32 value of a trained parameter, or its optimizer state `key`, on the device.

        Collective: every rank passes the same arguments.
        """
        # Each rank contributes its elements to zeros, so that the sum is the full value.
        full = torch.zeros(shape.numel(), dtype=torch.float32, device=self.device)
        with self.loaded(parameter, changes=False):
            shard = self.shard(parameter)
            flat = self.flat(parameter)
            if shard is not None:
                source = flat if key is None else self.states[flat][key]
                full.narrow(0, shard.offset, shard.length).copy_(shard.of(source))
        dist.all_reduce(full)
        return full.view(shape)

    def to_save(self, parameter: torch.Tensor, shape: torch.Size, key: str | None = None) -> SavedShards:
        """Return this rank's shard of the result of `full`. Not collective.

        The shard is a view of the engine's memory, unless the engine stores it on disk.
        """
        shard = self.shard(parameter)
        if shard is None:
            return SavedShards(tuple(shape), torch.float32)
        with self.loaded(parameter, changes=False):
            flat = self.flat(parameter)
            held = shard.of(flat if key is None else self.states[flat][key]).to(torch.float32)
            if self.is_swapped(parameter):
                held = held.clone()
        return SavedShards(tuple(shape), torch.float32, ((shard.span, held),))

    def is_swapped(self, parameter: torch.Tensor) -> bool:
        """Return whether the vector of a trained parameter is on disk. Not collective."""
        return False

    def full_gradient(self, parameter: torch.Tensor, shape: torch.Size, held: torch.Tensor | None) -> torch.Tensor:
        """Return a trained parameter's full gradient, averaged and unscaled, in the engine's dtype.

        Collective: every rank passes the same parameter, and its own shard `held` from `gradients`, or None.
        """
        full = torch.zeros(shape.numel(), dtype=self.zero.gradient_accumulation_dtype, device=self.device)
        shard = self.shard(parameter)
        if shard is not None and held is not None:
            values = held.detach().view(-1).narrow(0, 0, shard.length)  # without the padding
            full.narrow(0, shard.offset, shard.length).copy_(values)
        dist.all_reduce(full)
        scale: float = self.zero.loss_scale
        return full.view(shape) / scale

    def set_value(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Set this rank's float32 shard of a trained parameter from a full value. Not collective."""
        with self.loaded(parameter, changes=True):
            shard = self.shard(parameter)
            if shard is not None:
                shard.of(self.flat(parameter)).copy_(shard.shard_of(value))

    def set_states(self, parameter: torch.Tensor, values: dict[str, Any]) -> None:
        """Set this rank's shards of optimizer states from full states. Not collective."""
        with self.loaded(parameter, changes=True):
            shard = self.shard(parameter)
            flat = self.flat(parameter)
            state = self.states.setdefault(flat, {})
            for key, value in values.items():
                if not _is_vector(value):
                    state[key] = value.clone() if isinstance(value, torch.Tensor) else value
                    continue
                if key not in state:
                    state[key] = torch.zeros_like(flat, dtype=value.dtype, requires_grad=False)
                if shard is not None:
                    shard.of(state[key]).copy_(shard.shard_of(value))

    def clear_states(self, parameter: torch.Tensor) -> None:
        """Remove the optimizer states of the flat vector of a parameter. On disk, set them to zero. Not collective."""
        self.states.pop(self.flat(parameter), None)

    @abstractmethod
    def after_loading(self) -> None:
        """Update what the engine derives from weights and optimizer states, after both were loaded. Not collective."""


def _is_vector(value: object) -> bool:
    """Return whether an optimizer state has a value for each element, unlike a count of steps."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


class FlatShards(ZeroShards):
    """Shards at stages 1 and 2: each rank holds a part of one flat vector for each parameter group.

    Attributes of DeepSpeed 0.19 that are used here, each with an entry for every parameter group:

    - `bit16_groups`: the model's parameters.
    - `single_partition_of_fp32_groups`: this rank's part of the flat vector.
    - `params_in_partition`: the parameters with elements in this part, in the order of the vector.
    - `averaged_gradients`: the gradients of these elements, one tensor for each parameter, and then padding. With
      `cpu_offload`, `offload_gradient_dict` has them.
    """

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        super().__init__(optimizer, device)
        self._groups: dict[int, int] = {}  # id of a parameter, which the optimizer keeps alive → number of its group
        for number, group in enumerate(optimizer.bit16_groups):
            for parameter in group:
                self._groups[id(parameter)] = number

    def flat(self, parameter: torch.Tensor) -> torch.Tensor:
        vector: torch.Tensor = self.zero.single_partition_of_fp32_groups[self._groups[id(parameter)]]
        return vector

    def shard(self, parameter: torch.Tensor) -> ShardRange | None:
        # DeepSpeed sets the mapping between the parameter ("lp", low precision) and the vector ("hp", high precision).
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:  # this rank's part of the vector has no element of the parameter
            return None
        in_parameter = mapping.lp_fragment_address
        in_flat = mapping.hp_fragment_address
        return ShardRange(in_flat.start, in_flat.numel, in_parameter.start)

    def clear_states(self, parameter: torch.Tensor) -> None:
        super().clear_states(parameter)
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:
            mapping.optim_fragment = {}  # it has views of the removed states

    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        zero = self.zero
        for number, parameters in enumerate(zero.params_in_partition):
            if zero.cpu_offload:
                gradients = zero.offload_gradient_dict[number]
            else:
                gradients = []
                for gradient in zero.averaged_gradients.get(number) or []:  # None after a step
                    if not getattr(gradient, "_zero_padding", False):
                        gradients.append(gradient)
            yield from zip(parameters, gradients, strict=False)  # further gradients are padding

    def discard_gradients(self) -> None:
        # The same state as after DeepSpeed's own step, which frees gradients only if it also updates the weights.
        zero = self.zero
        zero.zero_grad()
        for number in range(len(zero.bit16_groups)):
            zero.averaged_gradients[number] = None
            zero.all_grad_tensors[number] = None
        zero._release_preflattened_grad_buffers()
        zero.micro_step_id = -1
        zero._epilogue_ran_this_backward = False
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
            zero._offload_accumulated_param_ids = set()

    def update_model(self) -> None:
        """Copy the optimizer's shards of the weights to the model on every rank. Collective."""
        self.zero.update_lp_params()

    def after_loading(self) -> None:
        # The mappings of parameters have views of the states, which are other tensors now.
        self.zero._hp_optimizer_states_linked = False
        if self.states:
            self.zero._lazy_init_hp_params_optimizer_state()


class _Position(NamedTuple):
    """Position of this rank's padded part of a parameter.

    Attributes:
        group: Number of the sub-group.
        start: First element of the part in the sub-group's vector.
        length: Number of elements, with padding. It is equal on all ranks.
    """

    group: int
    start: int
    length: int


class ParameterShards(ZeroShards):
    """Shards at stage 3: each rank holds a padded part of each parameter. Parts of several parameters form a vector.

    Attributes of DeepSpeed 0.19 that are used here:

    - `fp16_groups`: the model's parameters of each sub-group, which has one vector.
    - `fp32_partitioned_groups_flat`: the vector of each sub-group.
    - `grad_position`: see `_position`.
    - `averaged_gradients`: lists of gradients by sub-group. With `offload_optimizer`, the gradient of the vector.
    """

    def _position(self, parameter: torch.Tensor) -> _Position:
        return _Position(*self.zero.grad_position[self.zero.get_param_id(parameter)])

    def flat(self, parameter: torch.Tensor) -> torch.Tensor:
        vector: torch.Tensor = self.zero.fp32_partitioned_groups_flat[self._position(parameter).group]
        return vector

    def shard(self, parameter: torch.Tensor) -> ShardRange | None:
        position = self._position(parameter)
        sharded: Any = parameter
        offset = self.zero._get_param_partition_rank(sharded) * position.length
        # Without the padding, with which all ranks' parts are equally long. A rank may hold padding only.
        length = min(position.length, sharded.ds_numel - offset)
        return ShardRange(position.start, length, offset) if length > 0 else None

    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        zero = self.zero
        for number, parameters in enumerate(zero.fp16_groups):
            if not zero.offload_optimizer:
                yield from zip(parameters, zero.averaged_gradients.get(number) or [], strict=False)
                continue
            for parameter in parameters:
                with self.loaded(parameter, changes=False):
                    position = self._position(parameter)
                    gradient = zero.fp32_partitioned_groups_flat[number].grad
                    yield parameter, gradient.narrow(0, position.start, position.length)

    def discard_gradients(self) -> None:
        zero = self.zero
        zero.zero_grad()
        zero.averaged_gradients = {}
        zero._offload_boundary_param_ids = set()
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()
        if zero.offload_optimizer:
            zero.reset_cpu_buffers()

    def is_swapped(self, parameter: torch.Tensor) -> bool:
        return bool(self.zero._swappable_optimizer_subgroup(self._position(parameter).group))

    @contextmanager
    def loaded(self, parameter: torch.Tensor, *, changes: bool) -> Iterator[None]:
        zero = self.zero
        group = self._position(parameter).group
        if not self.is_swapped(parameter):
            yield
            return
        zero._optimizer_states_and_gradient_swap_in(group)
        yield
        if changes:
            zero._optimizer_states_and_gradient_swap_out(group)
        else:
            zero._release_swap_buffers(group)

    def clear_states(self, parameter: torch.Tensor) -> None:
        if not self.is_swapped(parameter):
            super().clear_states(parameter)
            return
        with self.loaded(parameter, changes=True):
            for value in self.states.get(self.flat(parameter), {}).values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    def after_loading(self) -> None:
        for number, parameters in enumerate(self.zero.fp16_groups):
            with self.loaded(parameters[0], changes=False):
                self.zero._reassign_or_swap_out_partitioned_parameters(number)
