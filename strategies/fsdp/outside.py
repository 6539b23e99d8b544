"""Calls of a task's modules outside of its steps, as of hooks that sample from the model when an epoch is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from trainwright.strategies.fsdp.unit_state import parameter_groups


class OutsideSteps:
    """Gathers what lies in no unit where a module that needs it is called, and no step has gathered it.

    Without gradients: nobody would average them. Every rank has to make such a call, as it gathers.
    """

    def __init__(
        self, root: Any, units: Iterable[Any], context: Callable[[], AbstractContextManager[Any] | None]
    ) -> None:
        self._root, self._units, self._context = root, list(units), context
        self._state = root._get_fsdp_state()

    @contextmanager
    def served(self, task: nn.Module) -> Iterator[None]:
        """Serve calls of the task, and of those of its modules that hold parameters of no unit. Not collective."""
        inside = {id(module) for unit in self._units for module in unit.modules()}
        state, gather = self._state, self._gather
        groups = parameter_groups(self._root)

        # A function and no method, which a copy of the task would copy with all that is here. One call in each forward.
        def lend(module: nn.Module, _: Any) -> None:
            if state._is_root is not None:
                for group in groups:
                    if group._sharded_state is not ShardedState.UNSHARDED:
                        break
                else:
                    return
            if not torch.compiler.is_compiling():
                gather(module)

        handles = [
            module.register_forward_pre_hook(lend)
            for module in task.modules()
            if module is task or (id(module) not in inside and any(True for _ in module.parameters(recurse=False)))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _gather(self, module: nn.Module) -> None:
        """Gather until the call of a module, which has just begun, is over. Collective."""
        lent = ExitStack()
        handle = module.register_forward_hook(lambda *_: lent.close(), always_call=True)
        lent.callback(handle.remove)
        lent.enter_context(torch.no_grad())
        context = self._context()
        if context is not None:
            lent.enter_context(context)
        self._state._lazy_init()  # or the unit that is called first would be taken for the root
        lent.callback(self._free)
        self._root.unshard()

    def _free(self) -> None:
        for sharded in (self._root, *self._units):
            sharded.reshard()
