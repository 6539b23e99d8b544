"""Activation checkpointing: recompute the activations of modules in backward instead of storing them.

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). Selection by operator: torch's
`create_selective_checkpoint_contexts`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.hooks import RemovableHandle

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.units import WrapPolicy, matching, replace_module

SavePolicy = Collection[Any] | Callable[..., CheckpointPolicy]
"""Operators whose results are stored and not recomputed, as objects (`torch.ops.aten.mm`) or names (`"aten.mm"`); or a
function `(context, operator, *args, **kwargs) -> CheckpointPolicy`."""


class Recomputed:
    """The modules of a task that are wrapped in torch's checkpoint wrappers.

    Args:
        choice: The modules; see `activation_checkpointing` of `FSDPStrategy`.
        save: See `SavePolicy`. None stores no results within these modules.

    Raises:
        ConfigurationError: A number is less than 1, `save` is given without modules, or an operator is unknown.
    """

    def __init__(self, choice: bool | int | WrapPolicy, save: SavePolicy | None = None) -> None:
        if isinstance(choice, int) and not isinstance(choice, bool) and choice < 1:
            raise ConfigurationError(
                f"activation_checkpointing={choice!r}: use True, False, a number n for every n-th unit, or classes."
            )
        if save is not None and choice is False:
            raise ConfigurationError(
                "activation_checkpointing_save has no effect without activation checkpointing. Pass "
                "activation_checkpointing=True, or remove it."
            )
        self._choice = choice
        self._policy = save if save is None or callable(save) else _operators(save)
        self._task: nn.Module | None = None  # between `wrap` and `unwrap`
        self._wrapped: list[tuple[nn.Module, nn.Module]] = []  # (module, its wrapper)
        self._hooks: list[RemovableHandle] = []  # on transformers models; see `_without_cache`

    def wrap(self, task: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
        """Wrap the selected modules. Return `units` with wrappers in place of wrapped modules. Not collective.

        Raises:
            ConfigurationError: The task has fewer than n units, or no module of a selected class.
        """
        if self._choice is False:
            return units
        options: dict[str, Any] = {}
        if self._policy is not None:
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, self._policy)
        self._task = task
        for module in self._chosen(task, units):
            wrapper = checkpoint_wrapper(module, **options)
            replace_module(task, module, wrapper)
            self._wrapped.append((module, wrapper))
        if self._wrapped:
            for model in _models_with_cache(task):
                self._hooks.append(model.register_forward_pre_hook(_without_cache, with_kwargs=True))
        wrappers = dict(self._wrapped)
        return [wrappers.get(unit, unit) for unit in units]

    def _chosen(self, task: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
        """Return the modules to wrap."""
        choice = self._choice  # True is the number 1 below: every unit
        if not isinstance(choice, int):
            modules = matching(task, choice, "activation_checkpointing")
            return list(dict.fromkeys(modules))  # a module may match several classes
        if len(units) < choice:
            each = "each unit" if choice is True else f"one in {choice} units"
            raise ConfigurationError(
                f"activation_checkpointing={choice!r} recomputes the activations of {each}, and the task has "
                f"{len(units) or 'no'} unit(s). Define shard_units in it, or pass auto_wrap_policy or the classes to "
                "checkpoint."
            )
        return units[choice - 1 :: choice]  # for n=3 the third, the sixth, …

    def unwrap(self) -> None:
        """Replace the wrappers by the original modules. Not collective."""
        for module, wrapper in self._wrapped:
            assert self._task is not None  # set by `wrap`
            replace_module(self._task, wrapper, module)
        for hook in self._hooks:
            hook.remove()
        self._task = None
        self._wrapped = []
        self._hooks = []


def _models_with_cache(task: nn.Module) -> list[nn.Module]:
    """Return the transformers models that fill a cache of keys and values unless `use_cache=False`."""
    models = []
    for module in task.modules():
        has_option = getattr(getattr(module, "config", None), "use_cache", None) is not None
        if has_option and "use_cache" in inspect.signature(module.forward).parameters:
            models.append(module)
    return models


def _without_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass `use_cache=False` if a backward follows, because recomputed layers would append to the cache again."""
    if torch.is_grad_enabled():
        kwargs = {**kwargs, "use_cache": False}
    return args, kwargs


def _operators(save: Collection[Any]) -> list[Any]:
    """Return the operator overloads, such as `aten.mm.default`, for a collection of names and objects, or one name."""
    overloads: list[Any] = []
    entries = [save] if isinstance(save, str) else save
    for entry in entries:
        operator = _named_operator(entry) if isinstance(entry, str) else entry
        if isinstance(operator, torch._ops.OpOverloadPacket):
            names = operator.overloads()  # type: ignore[no-untyped-call]  # torch has no types here
            overloads += [getattr(operator, name) for name in names]
        elif isinstance(operator, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
            overloads.append(operator)
        else:
            raise ConfigurationError(
                f"activation_checkpointing_save contains {entry!r}. Use operators such as torch.ops.aten.mm or "
                "'aten.mm', or a function that returns torch's CheckpointPolicy."
            )
    return overloads


def _named_operator(name: str) -> Any:
    """Return the operator `torch.ops.<name>`, or None if it does not exist."""
    operator: Any = torch.ops
    for part in name.split("."):
        operator = getattr(operator, part, None)
    return operator
