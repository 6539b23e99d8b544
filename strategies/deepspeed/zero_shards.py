"""Shards of a DeepSpeed engine's float32 weights, gradients and optimizer states, parameter by parameter.

Stages 1 and 2 shard flat vectors of many parameters; stage 3 shards each parameter. The classes here find this rank's
shard of a parameter and reassemble full tensors.
"""

# DeepSpeed's accessors (0.19: safe_get_full_fp32_param, safe_get_local_optimizer_state, …) do not serve here. A sharded
# save needs the span of the parameter that a shard holds, which they do not return; a load writes only this span, and
# reads no more of the file. At stages 1 and 2 they read links that exist only after the first optimizer step.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
    """

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self.zero = optimizer
        self.device = device

    @property
    def states(self) -> dict[Any, dict[str, Any]]:
        """The optimizer states of the flat vectors."""
        found: dict[Any, dict[str, Any]] = self.zero.optimizer.state
        return found

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
            vectors = [key for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim()]
            for key in vectors:
                if state[key].numel() != flat.numel():
                    raise TypeError(f"the state {key!r} has another shape than the parameters")
            return vectors, {key: value for key, value in state.items() if key not in vectors}

    def full(self, parameter: torch.Tensor, shape: torch.Size, key: str | None = None) -> torch.Tensor:
        """Return the full float32 value of a trained parameter, or its optimizer state `key`, on the device.

        Collective: every rank passes the same arguments.
        """
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
                if not isinstance(value, torch.Tensor) or not value.dim():
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


class FlatShards(ZeroShards):
    """Shards at stages 1 and 2: each rank holds a part of one flat vector for each parameter group."""

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        super().__init__(optimizer, device)
        self._group = {id(p): number for number, group in enumerate(optimizer.bit16_groups) for p in group}

    def flat(self, parameter: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.zero.single_partition_of_fp32_groups[self._group[id(parameter)]]
        return found

    def shard(self, parameter: torch.Tensor) -> ShardRange | None:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        in_parameter = mapping.lp_fragment_address
        in_flat = mapping.hp_fragment_address
        return ShardRange(in_flat.start, in_flat.numel, in_parameter.start)

    def clear_states(self, parameter: torch.Tensor) -> None:
        super().clear_states(parameter)
        if (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
            mapping.optim_fragment = {}  # views of them

    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        zero = self.zero
        for number, parameters in enumerate(zero.params_in_partition):
            if zero.cpu_offload:
                grads = zero.offload_gradient_dict[number]
            else:
                found = zero.averaged_gradients.get(number) or []
                grads = [grad for grad in found if not getattr(grad, "_zero_padding", False)]
            yield from zip(parameters, grads, strict=False)  # further gradients are padding

    def discard_gradients(self) -> None:
        zero = self.zero
        zero.zero_grad()
        for number in range(len(zero.bit16_groups)):
            zero.averaged_gradients[number] = zero.all_grad_tensors[number] = None
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
        self.zero._hp_optimizer_states_linked = False
        if self.states:
            self.zero._lazy_init_hp_params_optimizer_state()


class ParameterShards(ZeroShards):
    """Shards at stage 3: each rank holds a padded part of each parameter. Parts of several parameters form a vector."""

    def _position(self, parameter: torch.Tensor) -> tuple[int, int, int]:
        group, start, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
        return group, start, length

    def flat(self, parameter: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.zero.fp32_partitioned_groups_flat[self._position(parameter)[0]]
        return found

    def shard(self, parameter: torch.Tensor) -> ShardRange | None:
        _, start, length = self._position(parameter)
        held: Any = parameter
        offset = self.zero._get_param_partition_rank(held) * length
        real = min(length, held.ds_numel - offset)
        return ShardRange(start, real, offset) if real > 0 else None

    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        zero = self.zero
        for number, parameters in enumerate(zero.fp16_groups):
            if not zero.offload_optimizer:
                yield from zip(parameters, zero.averaged_gradients.get(number) or [], strict=False)
                continue
            for parameter in parameters:
                with self.loaded(parameter, changes=False):
                    _, start, length = self._position(parameter)
                    yield parameter, zero.fp32_partitioned_groups_flat[number].grad.narrow(0, start, length)

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
        return bool(self.zero._swappable_optimizer_subgroup(self._position(parameter)[0]))

    @contextmanager
    def loaded(self, parameter: torch.Tensor, *, changes: bool) -> Iterator[None]:
        zero = self.zero
        group = self._position(parameter)[0]
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
