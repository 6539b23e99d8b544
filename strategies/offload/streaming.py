"""Streaming of a model's weights to the device unit by unit, in the forward and again in the backward.

The parameters of a unit are stored on the host (see `host_storage`). They are on the device only during the unit's
forward and backward. Gradients are copied to the host as soon as they are computed. Between steps all parameters and
gradients are on the host, so that optimizers, checkpoints, averages and norms use ordinary host tensors.

Autograd saves a view of the weight's device storage for the backward. The memory of this storage is freed, and then
allocated and filled again in the backward, as in torch's FSDP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from trainwright.core.errors import ConfigurationError
from trainwright.core.tree import iterate_tensors
from trainwright.strategies.offload.copy_stream import CopyStream, Fetched
from trainwright.strategies.offload.host_storage import HostStorage, flat_numel, place_in
from trainwright.strategies.offload.prefetch import Prefetcher

_UNITS_TO_ADD = 2  # units whose gradients may wait on the host for accumulation


class Unit:
    """The parameters of one part of a model, which are copied to the device together.

    Args:
        parameters: Parameters of this unit only.
        device: Device of the computation.
        weights: Host storage of weights.
        gradients: Host storage of gradients.
        stays: Keep the device copy between uses, and update the copy after each step.
        prefetcher: Copies the unit to the device, also before its use.
        gradients_out: Stream for copies of gradients to the host.

    Attributes:
        num_bytes: Size of the device copy.
        number: The unit's number in the prefetcher.
        arrived: Number of gradient copies of all units up to this unit's last one. Units step in ascending order.
    """

    stays_on_host = False

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        weights: HostStorage,
        gradients: HostStorage,
        *,
        stays: bool,
        prefetcher: Prefetcher,
        gradients_out: CopyStream,
    ) -> None:
        self.device = device
        self.stays = stays
        self._gradient_storage = gradients
        self._prefetcher, self._weights_in = prefetcher, prefetcher.copies_to(device)
        self._gradients_out = gradients_out
        self.parameters = list(parameters)
        self.on_device = self.in_backward = False
        self.stays_in_backward = False  # also after all its gradients are computed: other units may need it
        self.fresh = False  # the device copy has the current values
        self.arrived = 0
        self._gradients_event: Any = None  # end of the last copy of a gradient
        self._to_add: list[tuple[torch.Tensor, torch.Tensor]] = []  # accumulated gradients, new gradients
        self._last_use: Any = None  # end of the last computation with a copy that stays
        self._assigned: dict[int, torch.Tensor] = {}  # index of a parameter → value that the user assigned
        self._versions: list[int] = []  # versions of the parameters when the copy was queued
        self._expected = 0  # gradients not yet computed in this backward
        self.inputs_to_come = 0  # inputs whose gradients are not yet computed
        self._calls: list[list[tuple[torch.Tensor, Any]]] = []  # inputs of running calls
        self._leaf_hooks: list[Any] = []
        self._stashed: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._host_values: list[torch.Tensor] = [parameter.data for parameter in self.parameters]
        self._views: list[torch.Tensor] = list(self._host_values)
        self._gradients: list[torch.Tensor | None] = [None] * len(self.parameters)
        self.flats: list[tuple[torch.Tensor, torch.Tensor]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in self.parameters):
            self._lay_out([i for i, p in enumerate(self.parameters) if p.dtype == dtype], dtype, weights)
        trained: list[tuple[int, Any]] = [(i, p) for i, p in enumerate(self.parameters) if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(partial(self._take_gradient, i)) for i, p in trained]
        self.num_bytes = sum(device_flat.nbytes for _, device_flat in self.flats)
        self.number = prefetcher.add(self)

    def _lay_out(self, members: Sequence[int], dtype: torch.dtype, weights: HostStorage) -> None:
        tensors = [self.parameters[i].data for i in members]
        numel = flat_numel([tensor.shape for tensor in tensors], dtype)
        host = weights.empty(numel, dtype)
        device_flat = torch.empty(numel, dtype=dtype, device=self.device)
        for i, on_host, view in zip(members, place_in(host, tensors), place_in(device_flat, tensors), strict=True):
            on_host.copy_(self.parameters[i].data)
            self.parameters[i].data = self._host_values[i] = on_host
            self._views[i] = view
        device_flat.untyped_storage().resize_(0)
        self.flats.append((host, device_flat))

    # Copies to the device and back

    def fetch(self) -> Fetched:
        """Queue the copy to the device, unless the device copy is in use or has the current values."""
        if self.on_device or self.fresh:
            return Fetched({})
        after = self._last_use
        for _, device_flat in self.flats:
            memory = device_flat.untyped_storage()
            if not memory.nbytes():
                memory.resize_(device_flat.numel() * device_flat.itemsize)
                after = None  # queued work may still use this memory
        self._versions = self._present_versions()
        event = self._weights_in.queue(self._copy_all, after=after)
        self.fresh = True
        return Fetched({}, self._weights_in, event, free=self._free)

    def _copy_all(self) -> None:
        for host, device_flat in self.flats:
            self._weights_in.fill(device_flat.data, host)  # .data: autograd must not see a change

    def _present_versions(self) -> list[int]:
        return [0 if parameter.is_inference() else parameter._version for parameter in self.parameters]

    def move_to_device(self) -> None:
        """Move the parameters to the device, for use on the current stream."""
        if self.on_device:
            return
        former = self._assigned
        self._assigned = self._find_assigned()
        if former or self._assigned or self._versions != self._present_versions():  # written in place
            self.weights_changed()
        self._prefetcher.acquire(self.number).use()
        for i, value in self._assigned.items():
            self._views[i].data.copy_(value)
        for i, parameter in enumerate(self.parameters):
            self._stashed[i] = parameter.grad
            parameter.grad = None
            parameter.data = self._views[i]
        self.on_device = True

    def _find_assigned(self) -> dict[int, torch.Tensor]:
        """Return values that were assigned with `parameter.data = …`, by the parameter's index.

        The host storage keeps the old values: callbacks may restore them.
        """
        found = {i: p.data for i, p in enumerate(self.parameters) if p.data_ptr() != self._host_values[i].data_ptr()}
        for i, value in found.items():
            own = self._host_values[i]
            if (value.shape, value.dtype) != (own.shape, own.dtype):
                raise ConfigurationError(
                    f"a parameter of {own.dtype} {tuple(own.shape)} was assigned a value of {value.dtype} "
                    f"{tuple(value.shape)} during a run, which OffloadStrategy does not support. Change the model "
                    "before the run."
                )
        return found

    def move_to_host(self) -> None:
        """Move the parameters to the host. Does not wait for copies of gradients; see `wait_for_gradients`."""
        if self.on_device:
            for i, parameter in enumerate(self.parameters):
                if parameter.grad is not None:  # of a parameter that was frozen when the hooks were registered
                    self._copy_to_host(i, parameter)
                parameter.data = self._assigned.get(i, self._host_values[i])
                parameter.grad = self._stashed[i]
                self._stashed[i] = None
            self.on_device = False
            self._prefetcher.release()
            if self.stays:
                self._last_use = self._weights_in.mark()
        if self.in_backward:
            self.in_backward = False
            self.forget_inputs()
        if not (self.stays and self.fresh):
            self.weights_changed()

    def weights_changed(self) -> None:
        """Mark the device copy, or the queued copy, as outdated."""
        self._prefetcher.discard(self.number)
        self.fresh = False
        if not self.on_device:
            self._free()

    def _free(self) -> None:
        self.fresh = False
        for _, device_flat in self.flats:
            if not self.stays:
                device_flat.untyped_storage().resize_(0)

    def wait_for_gradients(self) -> None:
        """Wait until all gradients have been copied to the host, and accumulate them."""
        self._gradients_out.wait(self._gradients_event)
        self._gradients_event = None
        to_add = self._to_add
        self._to_add = []
        for total, gradient in to_add:
            total.add_(gradient)

    def add_gradients(self) -> None:
        """Accumulate gradients of this unit that are still being copied, to free host memory. Waits for the copies."""
        if self._to_add:
            self.wait_for_gradients()

    # Backward

    def begin_backward(self) -> None:
        """Move the parameters to the device, where they stay until all gradients are computed."""
        if not self.in_backward:
            self.move_to_device()
            self.in_backward = True
            self._expected = len(self._hooks)

    def expect_inputs(self, inputs: object) -> None:
        """Record the inputs of a call. The backward of the call ends with the gradients of the inputs."""
        tensors = _differentiable(inputs)
        self._calls.append([(tensor, tensor.register_hook(self._input_done)) for tensor in tensors])
        self.inputs_to_come += len(tensors)

    def returned(self, *, is_recorded: bool) -> None:
        """Record the end of the innermost call. `is_recorded` is True if autograd has recorded the call."""
        for tensor, handle in self._calls.pop() if self._calls else ():
            if not is_recorded:
                handle.remove()
                self.inputs_to_come -= 1
            elif tensor.is_leaf:  # outlives the graph: a parameter, or an input of activation checkpointing
                self._leaf_hooks.append(handle)

    def forget_inputs(self) -> None:
        """Stop waiting for gradients of inputs."""
        self.inputs_to_come = 0
        self._calls.clear()
        while self._leaf_hooks:
            self._leaf_hooks.pop().remove()

    def _input_done(self, gradient: torch.Tensor) -> None:
        self.inputs_to_come -= 1
        self._move_when_done()

    def _take_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Copy a gradient to the host as soon as it is computed."""
        if self.on_device:
            self._copy_to_host(index, parameter)
            self._expected -= 1
            self._move_when_done()

    def _copy_to_host(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        assert gradient is not None  # autograd calls the hook after it has set it
        before = self._stashed[index]
        if gradient.layout is not torch.strided:  # sparse embedding: small, of varying size
            self.wait_for_gradients()
            on_host = gradient.to(self._host_values[index].device)
            self._stashed[index] = on_host if before is None else before + on_host
        elif before is None:
            self._stashed[index] = self._queue_gradient(index, gradient)
        else:
            fetched, self._gradients_event = self._gradients_out.fetch(gradient)
            self._to_add.append((before, fetched))
            if self._gradients_event is None:
                self.wait_for_gradients()
        self.arrived = self._gradients_out.num_queued

    def _queue_gradient(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        mine = self._gradients[index]
        if mine is None:
            mine = self._gradient_storage.empty_like(gradient)
            self._gradients[index] = mine
        copy: Callable[[], Any] = partial(mine.copy_, gradient, non_blocking=True)
        self._gradients_event = self._gradients_out.queue(copy, source=gradient)
        return mine

    def _move_when_done(self) -> None:
        if not self.stays_in_backward and self.in_backward and self._expected <= 0 and self.inputs_to_come <= 0:
            self.move_to_host()

    def close(self) -> None:
        """Move the parameters to the host, and remove the hooks."""
        self.move_to_host()
        self.stays = False
        self.weights_changed()
        for hook in self._hooks:
            hook.remove()


def _differentiable(values: object) -> list[Any]:
    """Return the tensors in nested values that require gradients."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


class WeightStream:
    """All units of a model. While one unit computes, the next units are copied to the device.

    Args:
        modules: Modules of the units, without shared parameters.
        others: Further parameters. They form the root unit, which is on the device during a full step.
        device: Device of the computation.
        weights: Host storage of weights.
        gradients: Host storage of gradients.
        stays: Keep device copies between uses.
        ahead: Number of units that are copied before their use.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        others: Iterable[nn.Parameter],
        device: torch.device,
        weights: HostStorage,
        gradients: HostStorage,
        *,
        stays: bool,
        ahead: int,
    ) -> None:
        self._prefetcher = Prefetcher(num_units=ahead)
        self._weights_in, self._gradients_out = self._prefetcher.copies_to(device), CopyStream(device)
        make: Callable[[Iterable[nn.Parameter]], Unit] = partial(
            Unit,
            device=device,
            weights=weights,
            gradients=gradients,
            stays=stays,
            prefetcher=self._prefetcher,
            gradients_out=self._gradients_out,
        )
        taken: set[nn.Parameter] = set()
        self.units: list[Unit] = []
        self._handles: list[Any] = []
        self.stays = stays
        for module in modules:  # inner modules come first
            own = [parameter for parameter in module.parameters() if parameter not in taken]
            taken.update(own)
            unit = make(own)
            self.units.append(unit)
            self._handles += [
                module.register_forward_pre_hook(partial(self._before, unit), with_kwargs=True, prepend=True),
                module.register_forward_hook(partial(self._after, unit), always_call=True),
            ]
        self.root = make([parameter for parameter in others if parameter not in taken])
        self._behind: deque[Unit] = deque()  # units whose backward began last

    @property
    def all_units(self) -> list[Unit]:
        """The root unit, which is on the device during a full step, and the streamed units."""
        return [self.root, *self.units]

    def begin(self) -> None:
        """Move the root unit to the device. Called before a forward."""
        self.root.move_to_device()
        self._behind.clear()
        self._prefetcher.begin()

    def end(self) -> None:
        """Move all weights to the host. Called after a backward, or after a forward without one."""
        for unit in self.all_units:
            unit.move_to_host()
            unit.forget_inputs()

    def wait(self) -> None:
        """Wait until all copies are complete. The host may then read gradients and write weights."""
        self.wait_for_gradients()
        self._weights_in.synchronize()

    def wait_for_gradients(self) -> None:
        """Wait until all gradients have been copied to the host."""
        for unit in self.all_units:
            unit.add_gradients()
        self._gradients_out.synchronize()

    def weights_changed(self) -> None:
        """Mark all device copies as outdated. Called after an optimizer step, or after weights were loaded."""
        for unit in self.all_units:
            unit.weights_changed()

    # User-written loops

    def follow(self, model: nn.Module) -> None:
        """Register hooks that call `begin` and `end` in the forwards and backwards of the full model."""
        self.root.stays_in_backward = True
        self._handles += [
            model.register_forward_pre_hook(self._before_model, prepend=True),
            model.register_forward_hook(self._after_model, always_call=True),
        ]

    def _before_model(self, module: nn.Module, args: object) -> None:
        if self.root.in_backward:
            if torch._C._current_graph_task_id() != -1:  # a forward within the backward, as in `_before`
                return
            self.end()  # of a backward that failed
        self.weights_changed()  # maybe, since the last forward
        self.begin()

    def _after_model(self, module: nn.Module, args: object, output: object) -> None:
        if self.root.in_backward:
            return
        tensors = iterate_tensors(output) if torch.is_grad_enabled() else ()
        outputs: list[Any] = [tensor for tensor in tensors if tensor.requires_grad]
        for tensor in outputs:
            tensor.register_hook(self._begin_model_backward)
        self.root.move_to_host()
        if not outputs:
            self.end_and_wait()

    def _begin_model_backward(self, gradient: torch.Tensor) -> None:
        if not self.root.in_backward:
            self.root.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self.end_and_wait)  # after the last gradient

    def end_and_wait(self) -> None:
        """Call `end` and `wait`. The caller may then read gradients and write weights."""
        self.end()
        self.wait()

    # Between two steps

    def in_order_of_gradients(self) -> list[Unit]:
        """Return all units in the order in which their gradients were computed."""
        return sorted(self.all_units, key=lambda unit: unit.arrived)

    def copy_early(self, units: Iterable[Unit]) -> None:
        """Queue copies of given units that the next forward uses first, or of all given units if copies stay."""
        early = {self.root.number, *self._prefetcher.first()}
        self._prefetcher.prefetch([unit.number for unit in units if self.stays or unit.number in early])

    def close(self) -> None:
        """Remove the hooks, and move all parameters to the host."""
        for handle in self._handles:
            handle.remove()
        for unit in self.all_units:
            unit.close()

    def _before(self, unit: Unit, module: nn.Module, args: object, kwargs: object) -> None:
        unit.move_to_device()
        if unit.in_backward:  # recomputation of activation checkpointing
            return
        if torch.is_grad_enabled():
            unit.expect_inputs((args, kwargs))
        self._prefetcher.follow(unit.number)

    def _after(self, unit: Unit, module: nn.Module, args: object, output: object) -> None:
        if unit.in_backward:
            return
        outputs = _differentiable(output) if torch.is_grad_enabled() else []
        for tensor in outputs:
            tensor.register_hook(partial(self._begin_backward, unit))
        if torch.is_grad_enabled():
            unit.returned(is_recorded=bool(outputs))
        unit.move_to_host()

    def _begin_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        if not unit.in_backward:
            self._gradients_out.release()  # the device holds the gradients of one unit only
            self._behind.append(unit)
            if len(self._behind) > _UNITS_TO_ADD:
                self._behind.popleft().add_gradients()
        unit.begin_backward()
        self._prefetcher.follow(unit.number, backward=True)
