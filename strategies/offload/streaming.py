"""Streaming of a model's weights to the device unit by unit, in the forward and again in the backward.

The parameters of a unit are stored on the host (see `host_storage`). They are on the device only during the unit's
forward and backward (see `streamed_unit`). Between steps all parameters and gradients are on the host, so that
optimizers, checkpoints, averages and norms use ordinary host tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from trainwright.core.tree import iterate_tensors
from trainwright.strategies.offload.copy_stream import CopyStream
from trainwright.strategies.offload.host_storage import HostStorage
from trainwright.strategies.offload.prefetch import Prefetcher
from trainwright.strategies.offload.streamed_unit import Unit, differentiable_tensors

# The pending sums of a unit are computed when the backward of the second-next unit begins: the copies of its gradients
# have then probably ended, and only the gradients of this number of units need additional host memory.
_NUM_UNITS_WITH_PENDING_SUMS = 2


class WeightStream:
    """All units of a model. While one unit computes, the next units are copied to the device.

    Args:
        modules: Modules of the units, without shared parameters.
        others: Further parameters. They form the root unit, which is on the device in the full forward and backward.
        device: Device of the computation.
        weights: Host storage of weights.
        gradients: Host storage of gradients.
        stays: Keep device copies between uses.
        ahead: Number of units that are copied before their use.

    Attributes:
        units: The units of `modules`, in the same order.
        root: The unit of `others`.
        stays: True if device copies are kept between uses.
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
        # Modules are ordered from the innermost to the outermost, so that a parameter belongs to its innermost unit.
        for module in modules:
            parameters = [parameter for parameter in module.parameters() if parameter not in in_units]
            in_units.update(parameters)
            unit = make_unit(parameters)
            self.units.append(unit)
            self._handles += [
                module.register_forward_pre_hook(partial(self._before_unit, unit), with_kwargs=True, prepend=True),
                # `always_call`: after an error in the forward, torch calls the hook with the output None.
                module.register_forward_hook(partial(self._after_unit, unit), always_call=True),
            ]
        self.root = make_unit(parameter for parameter in others if parameter not in in_units)
        # Units whose backwards began last, the oldest first; see `_NUM_UNITS_WITH_PENDING_SUMS`. Emptied by `begin`.
        self._recent_units: deque[Unit] = deque()

    @property
    def all_units(self) -> list[Unit]:
        """The root unit and the streamed units."""
        return [self.root, *self.units]

    def begin(self) -> None:
        """Move the root unit to the device, and prefetch the first units. Called before a forward."""
        self.root.move_to_device()
        self._recent_units.clear()
        self._prefetcher.begin()

    def end(self) -> None:
        """Move all weights to the host, also after an error. Called after a backward, or after a forward without one.

        Copies of gradients may still be running; see `wait`.
        """
        for unit in self.all_units:
            unit.move_to_host()
            unit.forget_inputs()

    def wait(self) -> None:
        """Wait until all copies are complete. The host may then read gradients and write weights."""
        self.wait_for_gradients()
        self._weights_in.synchronize()

    def wait_for_gradients(self) -> None:
        """Wait until all gradients are on the host, including the sums over micro-batches."""
        for unit in self.all_units:
            unit.compute_pending_sums()
        self._gradients_out.synchronize()  # also copies of units without pending sums

    def weights_changed(self) -> None:
        """Mark all device copies as outdated. Called after an optimizer step, or after weights were loaded."""
        for unit in self.all_units:
            unit.weights_changed()

    # User-written loops

    def follow_model(self, model: nn.Module) -> None:
        """Register hooks that call `begin` and `end` in the forwards and backwards of the full model."""
        self.root.stays_in_backward = True
        self._handles += [
            model.register_forward_pre_hook(self._before_model, prepend=True),
            model.register_forward_hook(self._after_model, always_call=True),
        ]

    def _before_model(self, module: nn.Module, args: object) -> None:
        if self.root.in_backward:
            if torch._C._current_graph_task_id() != -1:  # recomputation of activation checkpointing
                return
            self.end()  # the last backward has failed
        self.weights_changed()  # the user's loop may have written weights since the last forward
        self.begin()

    def _after_model(self, module: nn.Module, args: object, output: object) -> None:
        if self.root.in_backward:  # recomputation of activation checkpointing
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
            # Autograd calls it after the last gradient of this backward.
            torch.autograd.Variable._execution_engine.queue_callback(self.end_and_wait)

    def end_and_wait(self) -> None:
        """Call `end` and `wait`. The caller may then read gradients and write weights."""
        self.end()
        self.wait()

    # Between two steps

    def in_order_of_gradients(self) -> list[Unit]:
        """Return all units in the order in which their gradients were computed."""
        return sorted(self.all_units, key=lambda unit: unit.last_gradient)

    def copy_early(self, units: Iterable[Unit]) -> None:
        """Queue copies of updated units before the next forward.

        Without `stays`, only the given units that the next forward uses first are copied, as many as `ahead` and the
        root. With `stays`, all given units are copied, because the device has memory for all of them.
        """
        early = {self.root.number, *self._prefetcher.first()}
        self._prefetcher.prefetch([unit.number for unit in units if self.stays or unit.number in early])

    # Hooks of the units. `partial` adds the unit to torch's arguments.

    def _before_unit(self, unit: Unit, module: nn.Module, args: object, kwargs: object) -> None:
        unit.move_to_device()
        if unit.in_backward:  # recomputation of activation checkpointing
            return
        if torch.is_grad_enabled():
            unit.begin_call((args, kwargs))
        self._prefetcher.follow(unit.number)

    def _after_unit(self, unit: Unit, module: nn.Module, args: object, output: object) -> None:
        if unit.in_backward:  # recomputation: the unit stays on the device for the backward that follows
            return
        if torch.is_grad_enabled():
            outputs = differentiable_tensors(output)
            for tensor in outputs:
                tensor.register_hook(partial(self._begin_unit_backward, unit))
            unit.end_call(is_recorded=outputs != [])
        unit.move_to_host()

    def _begin_unit_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        if not unit.in_backward:
            # Free the gradients of the previous unit after their copies: the device holds those of one unit only.
            self._gradients_out.release()
            self._recent_units.append(unit)
            if len(self._recent_units) > _NUM_UNITS_WITH_PENDING_SUMS:
                self._recent_units.popleft().compute_pending_sums()
        unit.begin_backward()
        self._prefetcher.follow(unit.number, backward=True)

    def close(self) -> None:
        """Remove the hooks, and move all parameters to the host."""
        for handle in self._handles:
            handle.remove()
        for unit in self.all_units:
            unit.close()
