"""Calls of a task's modules outside of steps, such as from a hook that samples from the model after an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from trainwright.strategies.fsdp.unit_state import parameter_groups


class OutsideSteps:
    """All-gather of the parameters that are in no unit, for calls of modules outside of steps.

    Such calls do not record gradients, because no step would average the gradients. They are collective.

    Args:
        root: The root module, sharded by `fully_shard`.
        units: The units within it, sharded by `fully_shard`. Their own hooks gather their parameters.
        context: Creates the context of a call, such as autocast. It returns None for no context.
    """

    def __init__(
        self, root: Any, units: Iterable[Any], context: Callable[[], AbstractContextManager[Any] | None]
    ) -> None:
        self._root = root
        self._units = list(units)
        self._context = context
        self._state = root._get_fsdp_state()

    @contextmanager
    def gathered(self, task: nn.Module) -> Iterator[None]:
        """Return a context in which calls of the task and of modules outside of units gather these parameters."""
        modules_in_units = {module for unit in self._units for module in unit.modules()}
        state = self._state
        gather = self._gather
        groups = parameter_groups(self._root)

        # A function: a copy of the task would copy a bound method together with its object.
        def gather_outside(module: nn.Module, _: object) -> None:
            was_called = state._is_root is not None  # torch sets it in the first forward, or `_gather` does
            if was_called and all(group._sharded_state is ShardedState.UNSHARDED for group in groups):
                return  # within a step, or within another call outside of steps
            if not torch.compiler.is_compiling():
                gather(module)

        handles = []
        for module in task.modules():
            has_parameters = next(module.parameters(recurse=False), None) is not None
            is_outside_units = has_parameters and module not in modules_in_units
            if module is task or is_outside_units:
                handles.append(module.register_forward_pre_hook(gather_outside))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _gather(self, module: nn.Module) -> None:
        """Keep the parameters gathered until the current call of a module returns. Collective."""
        call = ExitStack()  # undone in reverse order once the module's forward returns or raises
        handle = module.register_forward_hook(lambda *_: call.close(), always_call=True)
        call.callback(handle.remove)
        call.enter_context(torch.no_grad())
        context = self._context()
        if context is not None:
            call.enter_context(context)
        self._state._lazy_init()  # otherwise torch would treat the first unit that is called as the root
        call.callback(self._free)
        self._root.unshard()

    def _free(self) -> None:
        for sharded in (self._root, *self._units):
            sharded.reshard()
