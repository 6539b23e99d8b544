"""Activation checkpointing: parts of a model whose activations are computed anew in backward instead of kept."""

from __future__ import annotations

from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule
from trainwright.strategies.shard_units import WrapPolicy, matching, replace_module


class Recomputed:
    """Wraps parts of a task so that their activations are computed anew, and takes the wrappers off again.

    Args:
        choice: which: see `FSDPStrategy`.
    """

    def __init__(self, choice: bool | WrapPolicy) -> None:
        self._choice = choice
        self._task: TaskModule | None = None
        self._wrapped: list[tuple[nn.Module, nn.Module]] = []

    def wrap(self, task: TaskModule, units: list[nn.Module]) -> list[nn.Module]:
        """Return the units with the wrappers in the places of those that are wrapped. Not collective.

        Raises:
            ConfigurationError: a class that no module has; or all units are to be computed anew and there is none.
        """
        choice = self._choice
        if choice is False:
            return units
        if choice is True and not units:
            raise ConfigurationError(
                "activation_checkpointing=True computes the activations of each unit anew, and the task has none. "
                "Define shard_units in it, or pass auto_wrap_policy or the classes to checkpoint."
            )
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        self._task = task
        chosen = units if choice is True else matching(task, choice, "activation_checkpointing")
        for module in chosen:
            wrapper = checkpoint_wrapper(module)
            replace_module(task, module, wrapper)
            self._wrapped.append((module, wrapper))
        around = {id(module): wrapper for module, wrapper in self._wrapped}
        return [around.get(id(unit), unit) for unit in units]

    def unwrap(self) -> None:
        """Put the parts back into their places. Not collective."""
        for module, wrapper in self._wrapped:
            assert self._task is not None  # what was wrapped belongs to it
            replace_module(self._task, wrapper, module)
        self._task, self._wrapped = None, []
