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
        inside = {id(module) for unit in self._units for module in unit.modules()}
        state = self._state
        gather = self._gather
        groups = parameter_groups(self._root)

        # A function: a copy of the task would copy a bound method together with its object.
        def gather_outside(module: nn.Module, _: object) -> None:
            if state._is_root is not None:
                for group in groups:
                    if group._sharded_state is not ShardedState.UNSHARDED:
                        break
                else:
                    return
            if not torch.compiler.is_compiling():
                gather(module)

        handles = [
            module.register_forward_pre_hook(gather_outside)
            for module in task.modules()
            if module is task or (id(module) not in inside and any(True for _ in module.parameters(recurse=False)))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _gather(self, module: nn.Module) -> None:
        """Keep the parameters gathered until the current call of a module returns. Collective."""
        call = ExitStack()
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
