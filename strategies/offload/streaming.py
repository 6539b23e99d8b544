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
        is_current: True if the device copy has the current values, or is being copied.
        arrived: Number of gradient copies of all units up to this unit's last one. Units step in ascending order.
        flats: Per dtype, the host storage and the device storage of all parameters of this dtype.
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
        self._prefetcher = prefetcher
        self._weights_in = prefetcher.copies_to(device)
        self._gradients_out = gradients_out
        self.parameters = list(parameters)
        self.on_device = False
        self.in_backward = False
        self.stays_in_backward = False  # also after all its gradients are computed: other units may need it
        self.is_current = False
        self.arrived = 0
        self._gradients_event: Any = None  # end of the last copy of a gradient
        self._to_add: list[tuple[torch.Tensor, torch.Tensor]] = []  # accumulated gradients, new gradients
        self._last_use: Any = None  # end of the last computation with a copy that stays
        self._assigned: dict[int, torch.Tensor] = {}  # index of a parameter → value that the user assigned
        self._versions: list[int] = []  # versions of the parameters when the copy was queued
        self._num_expected = 0  # gradients not yet computed in this backward
        self._num_inputs_expected = 0  # inputs whose gradients are not yet computed
        self._calls: list[list[tuple[torch.Tensor, Any]]] = []  # inputs of running calls, with their hooks
        self._leaf_hooks: list[Any] = []
        # By the index of a parameter:
        self._host_gradients: list[torch.Tensor | None] = [None] * len(self.parameters)  # while it is on the device
        self._host_values: list[torch.Tensor] = [parameter.data for parameter in self.parameters]
        self._device_views: list[torch.Tensor] = list(self._host_values)
        self._gradient_buffers: list[torch.Tensor | None] = [None] * len(self.parameters)  # reused in each step
        self.flats: list[tuple[torch.Tensor, torch.Tensor]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in self.parameters):
            self._allocate(dtype, weights)
        self._hooks: list[Any] = []
        for i, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(partial(self._take_gradient, i))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
        self.num_bytes = sum(device_flat.nbytes for _, device_flat in self.flats)
        self.number = prefetcher.add(self)

    def _allocate(self, dtype: torch.dtype, weights: HostStorage) -> None:
        """Move the parameters of a dtype to one host tensor, and reserve a device tensor without memory."""
        indices = [i for i, parameter in enumerate(self.parameters) if parameter.dtype == dtype]
        tensors = [self.parameters[i].data for i in indices]
        numel = flat_numel([tensor.shape for tensor in tensors], dtype)
        host = weights.empty(numel, dtype)
        device_flat = torch.empty(numel, dtype=dtype, device=self.device)
        host_views = place_in(host, tensors)
        device_views = place_in(device_flat, tensors)
        for i, host_view, device_view in zip(indices, host_views, device_views, strict=True):
            host_view.copy_(self.parameters[i].data)
            self.parameters[i].data = host_view
            self._host_values[i] = host_view
            self._device_views[i] = device_view
        device_flat.untyped_storage().resize_(0)
        self.flats.append((host, device_flat))

    # Copies to the device and back

    def fetch(self) -> Fetched:
        """Queue the copy to the device, unless the device copy is in use or has the current values."""
        if self.on_device or self.is_current:
            return Fetched({})
        after = self._last_use
        for _, device_flat in self.flats:
            memory = device_flat.untyped_storage()
            if not memory.nbytes():
                memory.resize_(device_flat.numel() * device_flat.itemsize)
                # Work queued on the current stream may still use new memory from the allocator: wait for all of it.
                after = None
        self._versions = self._current_versions()
        event = self._weights_in.queue(self._copy_all, after=after)
        self.is_current = True
        return Fetched({}, self._weights_in, event, free=self._free)

    def _copy_all(self) -> None:
        for host, device_flat in self.flats:
            self._weights_in.fill(device_flat.data, host)  # .data: autograd must not see a change

    def _current_versions(self) -> list[int]:
        """Return torch's counters of writes in place, which inference tensors do not have."""
        return [0 if parameter.is_inference() else parameter._version for parameter in self.parameters]

    def move_to_device(self) -> None:
        """Move the parameters to the device, for use on the current stream."""
        if self.on_device:
            return
        was_assigned = self._assigned != {}
        self._assigned = self._find_assigned()
        was_written = self._versions != self._current_versions()
        if was_assigned or self._assigned or was_written:
            self.weights_changed()
        self._prefetcher.acquire(self.number).use()
        for i, value in self._assigned.items():
            self._device_views[i].data.copy_(value)
        for i, parameter in enumerate(self.parameters):
            # A parameter and its gradient must be on the same device.
            self._host_gradients[i] = parameter.grad
            parameter.grad = None
            parameter.data = self._device_views[i]
        self.on_device = True

    def _find_assigned(self) -> dict[int, torch.Tensor]:
        """Return values that were assigned with `parameter.data = …`, by the parameter's index.

        The host storage keeps the old values: callbacks may restore them.
        """
        assigned: dict[int, torch.Tensor] = {}
        for i, (parameter, stored) in enumerate(zip(self.parameters, self._host_values, strict=True)):
            if parameter.data_ptr() == stored.data_ptr():
                continue
            value = parameter.data
            if (value.shape, value.dtype) != (stored.shape, stored.dtype):
                raise ConfigurationError(
                    f"a parameter of {stored.dtype} {tuple(stored.shape)} was assigned a value of {value.dtype} "
                    f"{tuple(value.shape)} during a run, which OffloadStrategy does not support. Change the model "
                    "before the run."
                )
            assigned[i] = value
        return assigned

    def move_to_host(self) -> None:
        """Move the parameters to the host. Does not wait for copies of gradients; see `wait_for_gradients`."""
        if self.on_device:
            for i, parameter in enumerate(self.parameters):
                if parameter.grad is not None:  # of a parameter that was frozen when the hooks were registered
                    self._copy_to_host(i, parameter)
                parameter.data = self._assigned.get(i, self._host_values[i])
                parameter.grad = self._host_gradients[i]
                self._host_gradients[i] = None
            self.on_device = False
            self._prefetcher.release()
            if self.stays:
                self._last_use = self._weights_in.mark()
        if self.in_backward:
            self.in_backward = False
            self.forget_inputs()
        if not (self.stays and self.is_current):
            self.weights_changed()

    def weights_changed(self) -> None:
        """Mark the device copy, or the queued copy, as outdated."""
        self._prefetcher.discard(self.number)
        self.is_current = False
        if not self.on_device:
            self._free()

    def _free(self) -> None:
        self.is_current = False
        if self.stays:
            return
        for _, device_flat in self.flats:
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
            self._num_expected = len(self._hooks)

    def begin_call(self, inputs: object) -> None:
        """Record the inputs of a call. The backward of the call ends with the gradients of the inputs."""
        tensors = _differentiable(inputs)
        self._calls.append([(tensor, tensor.register_hook(self._count_input)) for tensor in tensors])
        self._num_inputs_expected += len(tensors)

    def end_call(self, *, is_recorded: bool) -> None:
        """Record the end of the innermost call. `is_recorded` is True if autograd has recorded the call."""
        if not self._calls:  # cleared by a failed backward
            return
        for tensor, handle in self._calls.pop():
            if not is_recorded:
                handle.remove()
                self._num_inputs_expected -= 1
            elif tensor.is_leaf:  # outlives the graph: a parameter, or an input of activation checkpointing
                self._leaf_hooks.append(handle)

    def forget_inputs(self) -> None:
        """Stop waiting for gradients of inputs."""
        self._num_inputs_expected = 0
        self._calls.clear()
        while self._leaf_hooks:
            self._leaf_hooks.pop().remove()

    def _count_input(self, gradient: torch.Tensor) -> None:
        self._num_inputs_expected -= 1
        self._move_when_done()

    def _take_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Copy a gradient to the host as soon as it is computed."""
        if self.on_device:
            self._copy_to_host(index, parameter)
            self._num_expected -= 1
            self._move_when_done()

    def _copy_to_host(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        assert gradient is not None  # autograd calls the hook after it has set it
        accumulated = self._host_gradients[index]
        if gradient.layout is not torch.strided:  # sparse embedding: small, of varying size
            self.wait_for_gradients()
            on_host = gradient.to(self._host_values[index].device)
            self._host_gradients[index] = on_host if accumulated is None else accumulated + on_host
        elif accumulated is None:
            self._host_gradients[index] = self._queue_gradient(index, gradient)
        else:
            # The host can add only after the copy has ended, so it adds later; see `WeightStream._begin_backward`.
            fetched, self._gradients_event = self._gradients_out.fetch(gradient)
            self._to_add.append((accumulated, fetched))
            if self._gradients_event is None:  # the copy has ended already
                self.wait_for_gradients()
        self.arrived = self._gradients_out.num_queued

    def _queue_gradient(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Queue the copy of a gradient to its host buffer, and return the buffer."""
        buffer = self._gradient_buffers[index]
        if buffer is None:
            buffer = self._gradient_storage.empty_like(gradient)
            self._gradient_buffers[index] = buffer
        copy: Callable[[], Any] = partial(buffer.copy_, gradient, non_blocking=True)
        self._gradients_event = self._gradients_out.queue(copy, source=gradient)
        return buffer

    def _move_when_done(self) -> None:
        if self.stays_in_backward or not self.in_backward:
            return
        if self._num_expected <= 0 and self._num_inputs_expected <= 0:
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
        self._weights_in = self._prefetcher.copies_to(device)
        self._gradients_out = CopyStream(device)
        make_unit: Callable[[Iterable[nn.Parameter]], Unit] = partial(
            Unit,
            device=device,
            weights=weights,
            gradients=gradients,
            stays=stays,
            prefetcher=self._prefetcher,
            gradients_out=self._gradients_out,
        )
        in_units: set[nn.Parameter] = set()
        self.units: list[Unit] = []
        self._handles: list[Any] = []
        self.stays = stays
        for module in modules:  # inner modules come first, so that a parameter belongs to its innermost unit
            parameters = [parameter for parameter in module.parameters() if parameter not in in_units]
            in_units.update(parameters)
            unit = make_unit(parameters)
            self.units.append(unit)
            self._handles += [
                module.register_forward_pre_hook(partial(self._before, unit), with_kwargs=True, prepend=True),
                module.register_forward_hook(partial(self._after, unit), always_call=True),
            ]
        self.root = make_unit(parameter for parameter in others if parameter not in in_units)
        self._recent_units: deque[Unit] = deque()  # units whose backward began last, the oldest first

    @property
    def all_units(self) -> list[Unit]:
        """The root unit, which is on the device during a full step, and the streamed units."""
        return [self.root, *self.units]

    def begin(self) -> None:
        """Move the root unit to the device. Called before a forward."""
        self.root.move_to_device()
        self._recent_units.clear()
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
        self.weights_changed()  # the user's loop may have written weights since the last forward
        self.begin()

    def _after_model(self, module: nn.Module, args: object, output: object) -> None:
        if self.root.in_backward:
            return
        will_have_backward = False
        if torch.is_grad_enabled():
            for tensor in iterate_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin_model_backward)  # type: ignore[no-untyped-call]
                    will_have_backward = True
        self.root.move_to_host()
        if not will_have_backward:
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
            unit.begin_call((args, kwargs))
        self._prefetcher.follow(unit.number)

    def _after(self, unit: Unit, module: nn.Module, args: object, output: object) -> None:
        if unit.in_backward:
            return
        if torch.is_grad_enabled():
            outputs = _differentiable(output)
            for tensor in outputs:
                tensor.register_hook(partial(self._begin_backward, unit))
            unit.end_call(is_recorded=outputs != [])
        unit.move_to_host()

    def _begin_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        if not unit.in_backward:
            self._gradients_out.release()  # the device holds the gradients of one unit only
            self._recent_units.append(unit)
            if len(self._recent_units) > _UNITS_TO_ADD:
                self._recent_units.popleft().add_gradients()
        unit.begin_backward()
        self._prefetcher.follow(unit.number, backward=True)
