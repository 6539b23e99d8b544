"""Bring the weights of one part of a model after the other to the device, in the forward and again in the backward.

A part's parameters are at home on the host (see `homes`) and on the device only from just before its forward until just
after, and the same in the backward, whose gradients go home as they come. Between steps every parameter and gradient is
at home, so that optimizers, checkpoints, averages and norms see ordinary tensors of the host.

What autograd keeps of a weight for the backward is a view of the memory that the weight had on the device. That memory
is freed and filled again in the same storage, as torch's own sharding does.
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
from trainwright.strategies.offload.homes import Home, flat_numel, place_in
from trainwright.strategies.offload.prefetch import Prefetcher

_UNITS_TO_ADD = 2  # whose gradients may wait on the host to be added to those of earlier micro-batches


class Unit:
    """The parameters of one part of a model, which come and go together.

    Args:
        parameters: none of them in another unit.
        device: where they are used.
        weights: where they are at home.
        gradients: where their gradients are.
        stays: keep the copy on the device between uses, and bring it up to date after each step.
        prefetcher: brings it to the device, and may do so ahead of its use.
        gradients_out: the copies of gradients from the device.

    Attributes:
        num_bytes: of the copy on the device.
        number: that the prefetcher knows it by.
        arrived: grows with each gradient: units are stepped in its order, in which their gradients are at home.
    """

    stays_on_host = False

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        weights: Home,
        gradients: Home,
        *,
        stays: bool,
        prefetcher: Prefetcher,
        gradients_out: CopyStream,
    ) -> None:
        self.device, self.stays, self._gradient_home = device, stays, gradients
        self._prefetcher, self._weights_in = prefetcher, prefetcher.copies_to(device)
        self._gradients_out = gradients_out
        self.parameters = list(parameters)
        self.is_here = self.in_backward = False
        self.stays_in_backward = False  # also when all of its gradients are there: other parts may still need it
        self.fresh = False  # the copy on the device has the present values
        self.arrived = 0
        self._gradients_event: Any = None  # when the gradients that were queued last are at home
        self._to_add: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients, to those of earlier micro-batches
        self._last_use: Any = None  # when the computation was through with the copy that stays
        self._assigned: dict[int, torch.Tensor] = {}  # values elsewhere than at home, by the parameter's index
        self._versions: list[int] = []  # of the parameters when the copy was queued
        self._expected = 0  # gradients that are still to come in this backward
        self.inputs_to_come = 0  # inputs whose gradient is not there yet
        self._calls: list[list[tuple[torch.Tensor, Any]]] = []  # that are under way, with their inputs
        self._leaf_hooks: list[Any] = []
        self._stashed: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._homes: list[torch.Tensor] = [parameter.data for parameter in self.parameters]
        self._views: list[torch.Tensor] = list(self._homes)
        self._gradients: list[torch.Tensor | None] = [None] * len(self.parameters)
        self.flats: list[tuple[torch.Tensor, torch.Tensor]] = []
        for dtype in dict.fromkeys(parameter.dtype for parameter in self.parameters):
            self._lay_out([i for i, p in enumerate(self.parameters) if p.dtype == dtype], dtype, weights)
        trained: list[tuple[int, Any]] = [(i, p) for i, p in enumerate(self.parameters) if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(partial(self._take_gradient, i)) for i, p in trained]
        self.num_bytes = sum(there.nbytes for _, there in self.flats)
        self.number = prefetcher.add(self)

    def _lay_out(self, members: Sequence[int], dtype: torch.dtype, weights: Home) -> None:
        tensors = [self.parameters[i].data for i in members]
        numel = flat_numel([tensor.shape for tensor in tensors], dtype)
        home = weights.empty(numel, dtype)
        there = torch.empty(numel, dtype=dtype, device=self.device)
        for i, at_home, view in zip(members, place_in(home, tensors), place_in(there, tensors), strict=True):
            at_home.copy_(self.parameters[i].data)
            self.parameters[i].data = self._homes[i] = at_home
            self._views[i] = view
        there.untyped_storage().resize_(0)
        self.flats.append((home, there))

    # Coming and going

    def fetch(self) -> Fetched:
        """Queue the copy to the device, unless it is in use there or has the present values."""
        if self.is_here or self.fresh:
            return Fetched({})
        after = self._last_use
        for _, there in self.flats:
            memory = there.untyped_storage()
            if not memory.nbytes():
                memory.resize_(there.numel() * there.itemsize)
                after = None  # others may be computing with this memory yet
        self._versions = self._present_versions()
        event = self._weights_in.queue(self._copy_all, after=after)
        self.fresh = True
        return Fetched({}, self._weights_in, event, free=self._free)

    def _copy_all(self) -> None:
        for home, there in self.flats:
            self._weights_in.fill(there.data, home)  # data: to autograd, the values are those it has seen

    def _present_versions(self) -> list[int]:
        return [0 if parameter.is_inference() else parameter._version for parameter in self.parameters]

    def come(self) -> None:
        """Have the parameters on the device, for what the present stream does from now on."""
        if self.is_here:
            return
        former, self._assigned = self._assigned, self._find_assigned()
        if former or self._assigned or self._versions != self._present_versions():  # written in place since
            self.weights_changed()
        self._prefetcher.take(self.number).use()
        for i, value in self._assigned.items():
            self._views[i].data.copy_(value)
        for i, parameter in enumerate(self.parameters):
            self._stashed[i], parameter.grad = parameter.grad, None
            parameter.data = self._views[i]
        self.is_here = True

    def _find_assigned(self) -> dict[int, torch.Tensor]:
        """Return values that somebody has put in a parameter's place by `parameter.data = …`, by its index. They stay
        there, and those at home as they are: they may be put back.
        """
        found = {i: p.data for i, p in enumerate(self.parameters) if p.data_ptr() != self._homes[i].data_ptr()}
        for i, value in found.items():
            if (value.shape, value.dtype) != (self._homes[i].shape, self._homes[i].dtype):
                raise ConfigurationError(
                    f"a parameter of {self._homes[i].dtype} {tuple(self._homes[i].shape)} was given values of "
                    f"{value.dtype} {tuple(value.shape)} in a run, for which OffloadStrategy has no room on the "
                    "device. Change the model before the run."
                )
        return found

    def go(self) -> None:
        """Have the parameters at home; gradients that have come are there, or on their way (`wait_for_gradients`)."""
        if self.is_here:
            for i, parameter in enumerate(self.parameters):
                if parameter.grad is not None:  # of one that was frozen when the hooks were put on
                    self._bring_home(i, parameter)
                parameter.data = self._assigned.get(i, self._homes[i])
                parameter.grad, self._stashed[i] = self._stashed[i], None
            self.is_here = False
            self._prefetcher.give_back()
            if self.stays:
                self._last_use = self._weights_in.mark()
        if self.in_backward:
            self.in_backward = False
            self.forget_inputs()
        if not (self.stays and self.fresh):
            self.weights_changed()

    def weights_changed(self) -> None:
        """Take the copy on the device, or what was queued to become one, for out of date."""
        self._prefetcher.forget(self.number)
        self.fresh = False
        if not self.is_here:
            self._free()

    def _free(self) -> None:
        self.fresh = False
        for _, there in self.flats:
            if not self.stays:
                there.untyped_storage().resize_(0)

    def wait_for_gradients(self) -> None:
        """Return when gradients that were on their way are at home, and added to those that were there before."""
        self._gradients_out.wait(self._gradients_event)
        self._gradients_event = None
        to_add, self._to_add = self._to_add, []
        for total, gradient in to_add:
            total.add_(gradient)

    def add_gradients(self) -> None:
        """Wait for gradients that are to be added, so that the host need not hold them; not for others."""
        if self._to_add:
            self.wait_for_gradients()

    # Backward

    def begin_backward(self) -> None:
        """Come again, and stay until all gradients are there."""
        if not self.in_backward:
            self.come()
            self.in_backward = True
            self._expected = len(self._hooks)

    def expect_inputs(self, inputs: Any) -> None:
        """Take note of what a call is made with: with the gradient of that, its backward is over."""
        tensors = _differentiable(inputs)
        self._calls.append([(tensor, tensor.register_hook(self._input_done)) for tensor in tensors])
        self.inputs_to_come += len(tensors)

    def returned(self, *, is_recorded: bool) -> None:
        """Take note that the call which began last is over, and whether it will have a backward."""
        for tensor, handle in self._calls.pop() if self._calls else ():
            if not is_recorded:
                handle.remove()
                self.inputs_to_come -= 1
            elif tensor.is_leaf:  # which outlives the graph: a parameter, or what a checkpoint computes anew from
                self._leaf_hooks.append(handle)

    def forget_inputs(self) -> None:
        """Wait for no gradients of inputs any more."""
        self.inputs_to_come = 0
        self._calls.clear()
        while self._leaf_hooks:
            self._leaf_hooks.pop().remove()

    def _input_done(self, gradient: torch.Tensor) -> None:
        self.inputs_to_come -= 1
        self._go_when_done()

    def _take_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Bring a gradient home as soon as it is there."""
        if self.is_here:
            self._bring_home(index, parameter)
            self._expected -= 1
            self._go_when_done()

    def _bring_home(self, index: int, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None  # that is what the hook is called for
        before = self._stashed[index]
        if gradient.layout is not torch.strided:  # of an embedding with sparse=True: small, and of any size
            self.wait_for_gradients()
            at_home = gradient.to(self._homes[index].device)
            self._stashed[index] = at_home if before is None else before + at_home
        elif before is None:
            self._stashed[index] = self._gradient_at_home(index, gradient)
        else:
            fetched, self._gradients_event = self._gradients_out.fetch(gradient)
            self._to_add.append((before, fetched))
            if self._gradients_event is None:
                self.wait_for_gradients()
        self.arrived = self._gradients_out.num_queued

    def _gradient_at_home(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        mine = self._gradients[index]
        if mine is None:
            mine = self._gradient_home.empty_like(gradient)
            self._gradients[index] = mine
        copy: Callable[[], Any] = partial(mine.copy_, gradient, non_blocking=True)
        self._gradients_event = self._gradients_out.queue(copy, source=gradient)
        return mine

    def _go_when_done(self) -> None:
        if not self.stays_in_backward and self.in_backward and self._expected <= 0 and self.inputs_to_come <= 0:
            self.go()

    def close(self) -> None:
        """Go home for good; the parameters stay where they are at home."""
        self.go()
        self.stays = False
        self.weights_changed()
        for hook in self._hooks:
            hook.remove()


def _differentiable(values: Any) -> list[Any]:
    """Return the tensors in some values that gradients flow to."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


class WeightStream:
    """All parts of a model, coming in the order in which they run; the next ones are copied beside the computation.

    Args:
        modules: the parts that come and go, none with a parameter of another.
        others: parameters outside of them, which are on the device for the whole of a step.
        device: where they are used.
        weights: where weights are at home.
        gradients: where gradients are.
        stays: keep copies on the device between uses.
        ahead: how many parts are copied ahead of their use.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        others: Iterable[nn.Parameter],
        device: torch.device,
        weights: Home,
        gradients: Home,
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
        for module in modules:  # inner ones come first and keep what is theirs
            own = [parameter for parameter in module.parameters() if parameter not in taken]
            taken.update(own)
            unit = make(own)
            self.units.append(unit)
            self._handles += [
                module.register_forward_pre_hook(partial(self._before, unit), with_kwargs=True, prepend=True),
                module.register_forward_hook(partial(self._after, unit), always_call=True),
            ]
        self.root = make([parameter for parameter in others if parameter not in taken])
        self._behind: deque[Unit] = deque()  # whose backward began last

    @property
    def all_units(self) -> list[Unit]:
        """The one with what all parts share, and those that come and go."""
        return [self.root, *self.units]

    def begin(self) -> None:
        """Before a forward: have what all parts share on the device."""
        self.root.come()
        self._behind.clear()
        self._prefetcher.begin()

    def end(self) -> None:
        """After a backward, or a forward without one: weights are at home, and gradients there or on their way."""
        for unit in self.all_units:
            unit.go()
            unit.forget_inputs()

    def wait(self) -> None:
        """Return when all gradients are at home, and nothing is copied any more: the host may read and write."""
        self.wait_for_gradients()
        self._weights_in.synchronize()

    def wait_for_gradients(self) -> None:
        """Return when all gradients are at home."""
        for unit in self.all_units:
            unit.add_gradients()
        self._gradients_out.synchronize()

    def weights_changed(self) -> None:
        """After a step of the optimizer, or after weights were loaded: copies on the device are out of date."""
        for unit in self.all_units:
            unit.weights_changed()

    # User-written loops

    def follow(self, model: nn.Module) -> None:
        """Call `begin` and `end` in the forwards and backwards of the model that has all parts, by hooks."""
        self.root.stays_in_backward = True
        self._handles += [
            model.register_forward_pre_hook(self._before_model, prepend=True),
            model.register_forward_hook(self._after_model, always_call=True),
        ]

    def _before_model(self, module: nn.Module, args: Any) -> None:
        if self.root.in_backward:
            if torch._C._current_graph_task_id() != -1:  # a forward within the backward, as in `_before`
                return
            self.end()  # of a backward that failed
        self.weights_changed()  # maybe, since the last forward
        self.begin()

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.root.in_backward:
            return
        tensors = iterate_tensors(output) if torch.is_grad_enabled() else ()
        outputs: list[Any] = [tensor for tensor in tensors if tensor.requires_grad]
        for tensor in outputs:
            tensor.register_hook(self._begin_model_backward)
        self.root.go()
        if not outputs:
            self.end_and_wait()

    def _begin_model_backward(self, gradient: torch.Tensor) -> None:
        if not self.root.in_backward:
            self.root.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self.end_and_wait)  # after the last gradient

    def end_and_wait(self) -> None:
        """Call `end` and `wait`: what follows may read gradients and write weights."""
        self.end()
        self.wait()

    # Between two steps

    def in_order_of_gradients(self) -> list[Unit]:
        """Return all units, those first whose gradients came first."""
        return sorted(self.all_units, key=lambda unit: unit.arrived)

    def copy_early(self, units: Iterable[Unit]) -> None:
        """Queue copies before the next forward begins, of those units that the device has room for until then."""
        early = {self.root.number, *self._prefetcher.first()}
        self._prefetcher.bring([unit.number for unit in units if self.stays or unit.number in early])

    def close(self) -> None:
        """Take the hooks off; the parameters are at home."""
        for handle in self._handles:
            handle.remove()
        for unit in self.all_units:
            unit.close()

    def _before(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        unit.come()
        if unit.in_backward:  # a forward within the backward, which computes activations anew
            return
        if torch.is_grad_enabled():
            unit.expect_inputs((args, kwargs))
        self._prefetcher.follow(unit.number)

    def _after(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if unit.in_backward:
            return
        outputs = _differentiable(output) if torch.is_grad_enabled() else []
        for tensor in outputs:
            tensor.register_hook(partial(self._begin_backward, unit))
        if torch.is_grad_enabled():
            unit.returned(is_recorded=bool(outputs))
        unit.go()

    def _begin_backward(self, unit: Unit, gradient: torch.Tensor) -> None:
        if not unit.in_backward:
            self._gradients_out.release()  # those of the units before: the device has room for one unit's
            self._behind.append(unit)
            if len(self._behind) > _UNITS_TO_ADD:
                self._behind.popleft().add_gradients()
        unit.begin_backward()
        self._prefetcher.follow(unit.number, backward=True)
