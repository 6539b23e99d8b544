"""What torch's `fully_shard` leaves on modules, and how it is taken off again: torch 2.13 offers no way back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed._composable_state import _module_state_mapping


class ShardTraces:
    """Remembers modules as they were before `fully_shard`, whose class, attributes and hooks it changes in place.

    Args:
        root: the outermost module that will be sharded.
    """

    def __init__(self, root: nn.Module) -> None:
        self._before = [(module, type(module), set(vars(module))) for module in root.modules()]
        self._added: list[tuple[nn.Module, set[str]]] = []

    def note(self) -> None:
        """Take note of the attributes that have come; called right after sharding, before the user adds any."""
        self._added = [(module, set(vars(module)) - names) for module, _, names in self._before]

    def remove(self) -> None:
        """Put classes back and take attributes and hooks off. Parameters stay as they are. Not collective."""
        for module, cls, _ in self._before:
            module.__class__ = cls
            _module_state_mapping.pop(module, None)  # or it could not be sharded again, in the next stage
            _remove_hooks(module)
        for module, names in self._added:
            for name in names:
                vars(module).pop(name, None)


def _remove_hooks(module: nn.Module) -> None:
    tables = {name: table for name, table in vars(module).items() if "_hooks" in name and isinstance(table, dict)}
    gone = {key for table in tables.values() for key, hook in table.items() if _is_of_fsdp(hook)}
    for table in tables.values():
        for key in gone:
            table.pop(key, None)


def _is_of_fsdp(hook: Any) -> bool:
    for wrapper in ("hook", "func"):  # torch's own around hooks that take the module, and partials
        hook = getattr(hook, wrapper, hook)
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def forget_sums(modules: Iterable[Any]) -> None:
    """Drop what backward passes have added up in sharded modules without averaging it over ranks. Not collective.

    `FSDPModule.reset_iter_state` says that it does so; in torch 2.13 it leaves the gradients of whole parameters.
    """
    for module in modules:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for sharded in group.fsdp_params:
                sharded.unsharded_accumulated_grad = None
                gathered = getattr(sharded, "_unsharded_param", None)
                if gathered is not None:
                    gathered.grad = None
