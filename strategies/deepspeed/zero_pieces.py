"""Where the float32 weights, gradients and optimizer states of an engine lie, parameter by parameter.

DeepSpeed cuts flat vectors of many parameters (stages 1 and 2) or each parameter (stage 3); here is the way from a
parameter to the piece of it that this rank holds, and back to whole tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trainwright.checkpoint.format.regions import Pieces as SavedPieces
from trainwright.checkpoint.format.regions import Span
from trainwright.checkpoint.format.shard_files import SavedTensor


@dataclass(frozen=True, slots=True)
class Piece:
    """What this rank holds of one parameter.

    Attributes:
        start, length: where it lies in the flat vector of its group, and in every state of that vector's shape.
        offset: its place in the parameter's elements.
    """

    start: int
    length: int
    offset: int

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the piece out of a flat vector: memory that it shares with it."""
        return vector.detach().view(-1).narrow(0, self.start, self.length)

    @property
    def span(self) -> Span:
        """Its place in the parameter's elements."""
        return Span(self.offset, self.offset + self.length)

    def from_whole(self, value: torch.Tensor) -> torch.Tensor:
        """Return the piece out of a parameter's whole value; no more than that is read of a checkpoint."""
        return cut(value, self.span)


def cut(value: torch.Tensor, span: Span) -> torch.Tensor:
    """Return a span of a tensor's elements; of one that lies in a checkpoint nothing else is read."""
    if isinstance(value, SavedTensor):
        return value.read(span)
    return value.detach().reshape(-1).narrow(0, span.start, span.stop - span.start)


class ZeroPieces(ABC):
    """An engine's pieces; see the sub-classes."""

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self.zero = optimizer
        self.device = device

    @property
    def states(self) -> dict[Any, dict[str, Any]]:
        """The states that the real optimizer keeps for flat vectors."""
        found: dict[Any, dict[str, Any]] = self.zero.optimizer.state
        return found

    @abstractmethod
    def flat(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's float32 vector of the group that a trained parameter belongs to. Not collective."""

    @abstractmethod
    def piece(self, parameter: torch.Tensor) -> Piece | None:
        """Return where this rank's piece of a trained parameter lies; None: it holds none of it. Not collective."""

    @abstractmethod
    def gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield trained parameters with this rank's piece of their gradients, between the last backward and the step.

        Pieces are memory that the step uses. Not collective.
        """

    @abstractmethod
    def discard_gradients(self) -> None:
        """Forget what backward passes have left. Not collective."""

    @contextmanager
    def loaded(self, parameter: torch.Tensor, *, changes: bool) -> Iterator[None]:
        """Have a parameter's flat vector and its states in memory meanwhile; `changes`: write them back afterwards."""
        yield

    def state_of(self, parameter: torch.Tensor) -> tuple[list[str], dict[str, Any]]:
        """Return which states a trained parameter has: names of those of its own shape, and the values of others."""
        with self.loaded(parameter, changes=False):
            flat = self.flat(parameter)
            state = self.states.get(flat, {})
            vectors = [key for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim()]
            for key in vectors:
                if state[key].numel() != flat.numel():
                    raise TypeError(f"the state {key!r} has another shape than the parameters")
            return vectors, {key: value for key, value in state.items() if key not in vectors}

    def whole(self, parameter: torch.Tensor, shape: torch.Size, key: str | None = None) -> torch.Tensor:
        """Return a trained parameter's float32 value, or with `key` one of its optimizer states, whole, on the device.

        Collective: every rank asks for the same.
        """
        full = torch.zeros(shape.numel(), dtype=torch.float32, device=self.device)
        with self.loaded(parameter, changes=False):
            piece, flat = self.piece(parameter), self.flat(parameter)
            if piece is not None:
                source = flat if key is None else self.states[flat][key]
                full.narrow(0, piece.offset, piece.length).copy_(piece.of(source))
        dist.all_reduce(full)
        return full.view(shape)

    def to_save(self, parameter: torch.Tensor, shape: torch.Size, key: str | None = None) -> SavedPieces:
        """Return what this rank saves of what `whole` would return: memory that the engine uses, where it has it.

        Not collective.
        """
        piece = self.piece(parameter)
        if piece is None:
            return SavedPieces(tuple(shape), torch.float32)
        with self.loaded(parameter, changes=False):
            flat = self.flat(parameter)
            held = piece.of(flat if key is None else self.states[flat][key]).to(torch.float32)
            if self.is_swapped(parameter):
                held = held.clone()
        return SavedPieces(tuple(shape), torch.float32, ((piece.span, held),))

    def is_swapped(self, parameter: torch.Tensor) -> bool:
        """Tell whether the vector of a trained parameter lies on a disk. Not collective."""
        return False

    def whole_gradient(self, parameter: torch.Tensor, shape: torch.Size, held: torch.Tensor | None) -> torch.Tensor:
        """Return a trained parameter's averaged and unscaled gradient whole, in the dtype that the engine keeps it in.

        Collective: every rank asks for the same.
        """
        full = torch.zeros(shape.numel(), dtype=self.zero.gradient_accumulation_dtype, device=self.device)
        piece = self.piece(parameter)
        if piece is not None and held is not None:
            values = held.detach().view(-1).narrow(0, 0, piece.length)  # what is behind pads it
            full.narrow(0, piece.offset, piece.length).copy_(values)
        dist.all_reduce(full)
        scale: float = self.zero.loss_scale
        return full.view(shape) / scale

    def set_value(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Put a whole value into this rank's float32 piece of a trained parameter. Not collective."""
        with self.loaded(parameter, changes=True):
            piece = self.piece(parameter)
            if piece is not None:
                piece.of(self.flat(parameter)).copy_(piece.from_whole(value))

    def set_states(self, parameter: torch.Tensor, values: dict[str, Any]) -> None:
        """Put whole optimizer states into this rank's piece of them. Not collective."""
        with self.loaded(parameter, changes=True):
            piece, flat = self.piece(parameter), self.flat(parameter)
            state = self.states.setdefault(flat, {})
            for key, value in values.items():
                if not isinstance(value, torch.Tensor) or not value.dim():
                    state[key] = value.clone() if isinstance(value, torch.Tensor) else value
                    continue
                if key not in state:
                    state[key] = torch.zeros_like(flat, dtype=value.dtype, requires_grad=False)
                if piece is not None:
                    piece.of(state[key]).copy_(piece.from_whole(value))

    def forget_states(self, parameter: torch.Tensor) -> None:
        """Let a parameter's group begin anew: without states where they are in memory. Not collective."""
        self.states.pop(self.flat(parameter), None)

    @abstractmethod
    def after_loading(self) -> None:
        """Bring what is computed from loaded values and states up to date. Not collective."""


class FlatPieces(ZeroPieces):
    """Stages 1 and 2: the parameters of a group lie one after the other in a vector, of which each rank has a part."""

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        super().__init__(optimizer, device)
        self._group = {id(p): number for number, group in enumerate(optimizer.bit16_groups) for p in group}

    def flat(self, parameter: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.zero.single_partition_of_fp32_groups[self._group[id(parameter)]]
        return found

    def piece(self, parameter: torch.Tensor) -> Piece | None:
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        in_parameter, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Piece(in_flat.start, in_flat.numel, in_parameter.start)

    def forget_states(self, parameter: torch.Tensor) -> None:
        super().forget_states(parameter)
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
            yield from zip(parameters, grads, strict=False)  # what is left over pads the vector

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


class ParameterPieces(ZeroPieces):
    """Stage 3: of each parameter every rank has a part, padded to one length; sub-groups of them share a vector."""

    def _position(self, parameter: torch.Tensor) -> tuple[int, int, int]:
        group, start, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
        return group, start, length

    def flat(self, parameter: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.zero.fp32_partitioned_groups_flat[self._position(parameter)[0]]
        return found

    def piece(self, parameter: torch.Tensor) -> Piece | None:
        _, start, length = self._position(parameter)
        held: Any = parameter
        offset = self.zero._get_param_partition_rank(held) * length
        real = min(length, held.ds_numel - offset)
        return Piece(start, real, offset) if real > 0 else None

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
        zero, group = self.zero, self._position(parameter)[0]
        if not self.is_swapped(parameter):
            yield
            return
        zero._optimizer_states_and_gradient_swap_in(group)
        yield
        if changes:
            zero._optimizer_states_and_gradient_swap_out(group)
        else:
            zero._release_swap_buffers(group)

    def forget_states(self, parameter: torch.Tensor) -> None:
        if not self.is_swapped(parameter):
            super().forget_states(parameter)
            return
        with self.loaded(parameter, changes=True):
            for value in self.states.get(self.flat(parameter), {}).values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    def after_loading(self) -> None:
        for number, parameters in enumerate(self.zero.fp16_groups):
            with self.loaded(parameters[0], changes=False):
                self.zero._reassign_or_swap_out_partitioned_parameters(number)
