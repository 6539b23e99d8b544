"""A unit: the parameters of one part of a model, which are on the host and are copied to the device for each use.

Gradients are copied to the host as soon as they are computed. In the second and later micro-batches of a step, each
gradient is copied to a new host tensor, and added to the sum of the earlier ones once the copy has ended.

Autograd saves a view of the weight's device storage for the backward. The memory of this storage is freed, and then
allocated and filled again in the backward, as in torch's FSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.offload.copy_stream import CopyStream, Fetched
from trainwright.strategies.offload.host_storage import HostStorage, flat_numel, place_in
from trainwright.strategies.offload.prefetch import Prefetcher


class _PendingSum(NamedTuple):
    """An addition on the host that is possible only after the copy of the gradient has ended.

    Attributes:
        total: The gradients of earlier micro-batches on the host, to which `gradient` is added.
        gradient: Host tensor to which the gradient of this micro-batch is being copied.
    """

    total: torch.Tensor
    gradient: torch.Tensor


class _CallInput(NamedTuple):
    """An input of a forward that requires a gradient, and the handle of the hook that counts this gradient."""

    tensor: torch.Tensor
    hook: Any


class Unit:
    """The parameters of one part of a model, which are copied to the device together.

    The life of a unit in a training step is: `fetch` (by the prefetcher, before or at the use), `move_to_device`, the
    forward, `move_to_host`; then `fetch` again, `begin_backward`, the backward, in which each gradient is copied to the
    host, and `move_to_host` after the last gradient.

    Args:
        parameters: Parameters of this unit only.
        device: Device of the computation.
        weights: Host storage of weights.
        gradients: Host storage of gradients.
        stays: Keep the device copy between uses, and update the copy after each step.
        prefetcher: Copies the unit to the device, also before its use.
        gradients_out: Stream for copies of gradients to the host. All units share it.

    Attributes:
        parameters: The parameters. Their `data` is in host storage, or on the device while `on_device` is True.
        num_bytes: Size of the device copy.
        number: The unit's number in the prefetcher.
        flats: Per dtype, the host storage and the device storage of all parameters of this dtype.
        stays: True if the device memory is kept until `close`.
        on_device: True from `move_to_device` to `move_to_host`: the parameters refer to device memory.
        is_current: True if the device copy has the values of the host storage, or is being copied. Set by `fetch`, and
            reset by `weights_changed` and whenever the device memory is freed.
        in_backward: True from `begin_backward` to the next `move_to_host`.
        stays_in_backward: Set by `WeightStream.follow_model` for the root unit. True keeps the unit on the device after
            its last gradient, because the backwards of other units may use its parameters.
        last_gradient: Position of this unit's last gradient copy among the gradient copies of all units. It never
            decreases. The optimizer steps the units in ascending order of it.
    """

    # Required by `Fetchable`: the unit is computed on the device, not in host memory.
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
        num_parameters = len(self.parameters)

        # The device copy

        self.on_device = False
        self.is_current = False
        # The parameters' versions when `fetch` queued the copy. If they differ at the use, the user has written to the
        # weights in place since then, and the copy is outdated. Empty before the first fetch.
        self._versions: list[int] = []
        # Values that the user assigned with `parameter.data = …`, by the index of the parameter. Set by each
        # `move_to_device`, which copies them to the device instead of the values in host storage. `move_to_host` then
        # assigns them again, and not the values in host storage.
        self._assigned: dict[int, torch.Tensor] = {}
        # Only with `stays`: event after the last computation with the device copy, set by `move_to_host`. The next copy
        # to the same memory starts after it. None before the first use, and on devices without a copy stream.
        self._end_of_last_use: Any = None

        # Gradients

        # On the host, by the index of the parameter, while the parameters are on the device: torch requires
        # `parameter.grad` on the parameter's device. Set by `move_to_device`, replaced by `_copy_to_host`, and moved to
        # `parameter.grad` by `move_to_host`.
        self._host_gradients: list[torch.Tensor | None] = [None] * num_parameters
        # Memory of the first gradient of each step. Allocated once, and reused in each step.
        self._gradient_buffers: list[torch.Tensor | None] = [None] * num_parameters
        # End of the last copy of a gradient. None if no copy was queued since `wait_for_gradients`, and on devices
        # without a copy stream.
        self._gradients_event: Any = None
        # Added by `_copy_to_host`, and computed by `wait_for_gradients`.
        self._pending_sums: list[_PendingSum] = []
        self.last_gradient = 0

        # The backward

        self.in_backward = False
        self.stays_in_backward = False
        # Number of trainable parameters whose gradients are not yet computed. Set by `begin_backward`. If a parameter
        # is unused, the number stays above 0, and `WeightStream.end` moves the unit.
        self._num_gradients_expected = 0
        # Number of inputs of all calls whose gradients are not yet computed.
        self._num_inputs_expected = 0
        # Inputs of the running calls, the innermost call last. Several calls run at once if a module calls itself.
        self._calls: list[list[_CallInput]] = []
        # Hooks on inputs that are leaves. Other hooks are freed with the graph.
        self._leaf_hooks: list[Any] = []

        # Values of the parameters on the host and on the device, by the index of the parameter. `_allocate` replaces
        # all elements.
        self._host_values: list[torch.Tensor] = [parameter.data for parameter in self.parameters]
        self._device_views: list[torch.Tensor] = list(self._host_values)
        self.flats: list[tuple[torch.Tensor, torch.Tensor]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in self.parameters):
            self._allocate(dtype, weights)
        # One hook per trainable parameter.
        self._hooks: list[Any] = []
        for i, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(partial(self._take_gradient, i))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
        self.num_bytes = sum(device_flat.nbytes for _, device_flat in self.flats)
        self.number = prefetcher.add(self)  # reads `num_bytes`

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
        # After the views, because torch creates no views of memory that is not allocated.
        device_flat.untyped_storage().resize_(0)
        self.flats.append((host, device_flat))

    # Copies to the device and back

    def fetch(self) -> Fetched:
        """Queue the copy to the device, unless the device copy is in use or has the current values.

        The result has no tensors, because `move_to_device` assigns the device copy to the parameters.
        """
        if self.on_device or self.is_current:
            return Fetched({})
        copy_after = self._end_of_last_use
        for _, device_flat in self.flats:
            memory = device_flat.untyped_storage()
            if not memory.nbytes():
                memory.resize_(device_flat.numel() * device_flat.itemsize)
                # Queued computations may still use this memory, which the allocator reuses at once. None makes the
                # copy wait for all computations that are queued now.
                copy_after = None
        self._versions = self._current_versions()
        event = self._weights_in.queue(self._copy_all, after=copy_after)
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
        copy_has_assigned_values = self._assigned != {}  # written to the device copy in the last use
        self._assigned = self._find_assigned()
        was_written = self._versions != self._current_versions()
        if copy_has_assigned_values or self._assigned or was_written:
            self.weights_changed()
        self._prefetcher.acquire(self.number).use()  # released by `move_to_host`
        for i, value in self._assigned.items():
            self._device_views[i].data.copy_(value)
        for i, parameter in enumerate(self.parameters):
            # A parameter and its gradient must be on the same device, so the gradient is removed before the move.
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
        """Move the parameters and gradients to the host, and free the device copy unless it stays.

        Also discards a prefetched copy, unless it is current and stays. Does not wait for copies of gradients; see
        `wait_for_gradients`.
        """
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
                self._end_of_last_use = self._weights_in.mark()
        if self.in_backward:
            self.in_backward = False
            self.forget_inputs()
        keeps_copy = self.stays and self.is_current
        if not keeps_copy:
            self.weights_changed()

    def weights_changed(self) -> None:
        """Mark the device copy, or the queued copy, as outdated. Free it, unless it is in use or stays."""
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
        """Wait until all gradients have been copied to the host, and compute the pending sums."""
        self._gradients_out.wait(self._gradients_event)
        self._gradients_event = None
        pending_sums = self._pending_sums
        self._pending_sums = []
        for total, gradient in pending_sums:
            total.add_(gradient)

    def compute_pending_sums(self) -> None:
        """Accumulate the gradients of later micro-batches. Waits for copies only if sums are pending.

        Frees the host memory of these gradients.
        """
        if self._pending_sums:
            self.wait_for_gradients()

    # Backward

    def begin_backward(self) -> None:
        """Move the parameters to the device, where they stay until all gradients are computed.

        Has no effect if the unit's backward has begun, in a unit with several outputs or calls.
        """
        if not self.in_backward:
            self.move_to_device()
            self.in_backward = True
            self._num_gradients_expected = len(self._hooks)

    def begin_call(self, inputs: object) -> None:
        """Record the inputs of a call. The backward of the call ends with the gradients of the inputs.

        Autograd may compute these gradients after all gradients of parameters, and uses the weights for them.
        """
        call: list[_CallInput] = []
        for tensor in differentiable_tensors(inputs):
            call.append(_CallInput(tensor, tensor.register_hook(self._count_input)))
        self._calls.append(call)
        self._num_inputs_expected += len(call)

    def end_call(self, *, is_recorded: bool) -> None:
        """Record the end of the innermost call. `is_recorded` is True if autograd has recorded the call."""
        if not self._calls:  # `forget_inputs` was called since the call began
            return
        for tensor, hook in self._calls.pop():
            if not is_recorded:
                hook.remove()
                self._num_inputs_expected -= 1
            elif tensor.is_leaf:  # outlives the graph: a parameter, or an input of activation checkpointing
                self._leaf_hooks.append(hook)

    def forget_inputs(self) -> None:
        """Stop waiting for gradients of inputs, at the end of a backward or if no backward follows.

        Hooks on inputs that are not leaves remain in their graph. They call `_count_input` if this graph is used again.
        """
        self._num_inputs_expected = 0
        self._calls.clear()
        while self._leaf_hooks:
            self._leaf_hooks.pop().remove()

    def _count_input(self, gradient: torch.Tensor) -> None:
        self._num_inputs_expected -= 1
        self._move_when_done()

    def _take_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Copy a gradient to the host as soon as it is computed. Autograd calls this after it has set the gradient."""
        # Otherwise the parameter was used on the host, for example in a penalty on the weights: its gradient is there.
        if self.on_device:
            self._copy_to_host(index, parameter)
            self._num_gradients_expected -= 1
            self._move_when_done()

    def _copy_to_host(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        assert gradient is not None  # `move_to_host` checks it; autograd calls `_take_gradient` after it was set
        accumulated = self._host_gradients[index]
        if gradient.layout is not torch.strided:  # sparse embedding: small, of varying size
            self.wait_for_gradients()  # `accumulated` may be the total of a pending sum
            on_host = gradient.to(self._host_values[index].device)
            self._host_gradients[index] = on_host if accumulated is None else accumulated + on_host
        elif accumulated is None:
            self._host_gradients[index] = self._queue_gradient(index, gradient)
        else:
            # The host can add only after the copy has ended. It adds when a later unit's backward begins, or in
            # `WeightStream.wait_for_gradients`.
            on_host, self._gradients_event = self._gradients_out.fetch(gradient)
            self._pending_sums.append(_PendingSum(accumulated, on_host))
            if self._gradients_event is None:  # without a copy stream, the copy has ended already
                self.wait_for_gradients()
        self.last_gradient = self._gradients_out.num_queued

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
        """Move the unit to the host if no further gradient is expected."""
        if self.stays_in_backward or not self.in_backward:
            return
        # A number is negative if a graph is used again (retain_graph=True) after `forget_inputs`.
        if self._num_gradients_expected <= 0 and self._num_inputs_expected <= 0:
            self.move_to_host()

    def close(self) -> None:
        """Move the parameters to the host, and remove the hooks."""
        self.move_to_host()
        self.stays = False
        self.weights_changed()
        for hook in self._hooks:
            hook.remove()


def differentiable_tensors(values: object) -> list[Any]:
    """Return the tensors in nested values that require gradients."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
