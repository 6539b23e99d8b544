"""What DeepSpeed leaves on modules and parameters, and how it is taken off again: it offers no way back."""

from __future__ import annotations

from typing import Any

from torch import nn

_MARK = "ds_id"  # what tells that a parameter's memory is not its own
_COME_IN_STEPS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining", "pre_bwd_fn", "post_bwd_fn")


class Traces:
    """Remembers modules and parameters as they were before an engine took them.

    Args:
        root: the outermost module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._before = [(module, type(module), set(vars(module)), _hooks(module)) for module in root.modules()]
        self._of_parameters = [(parameter, set(vars(parameter))) for parameter in root.parameters()]
        self._added: list[tuple[nn.Module, set[str]]] = []
        self._hooked: list[tuple[nn.Module, list[tuple[str, int]]]] = []

    def note(self) -> None:
        """Take note of attributes and hooks that have come; called once the engine stands, before the user adds any."""
        self._added = [(module, set(vars(module)) - names) for module, _, names, _ in self._before]
        self._hooked = [(module, sorted(_hooks(module) - hooks)) for module, _, _, hooks in self._before]

    def remove(self) -> None:
        """Put classes back, and take attributes and hooks off. Not collective.

        Parameters keep the memory that they have; those that lie in pieces stay recognizable as such.
        """
        for module, cls, _, _ in self._before:
            module.__class__ = cls
            if type(module._parameters) is not dict:  # stage 3 puts dicts of its own there
                vars(module)["_parameters"] = dict(module._parameters)
        for module, names in self._added:
            for name in (*names, *_COME_IN_STEPS):
                vars(module).pop(name, None)
        for module, keys in self._hooked:
            for table, key in keys:
                vars(module)[table].pop(key, None)
        for parameter, names in self._of_parameters:
            for name in set(vars(parameter)) - names - {_MARK}:
                delattr(parameter, name)


def _hooks(module: nn.Module) -> set[tuple[str, int]]:
    tables: dict[str, Any] = {name: table for name, table in vars(module).items() if "_hooks" in name}
    return {(name, key) for name, table in tables.items() if isinstance(table, dict) for key in table}
