"""Errors if a model is moved while its weights are offloaded."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from trainwright.bigmodels.weights.placeholders import in_files
from trainwright.core.errors import ConfigurationError

_MOVES = ("to", "cuda", "xpu", "cpu", "to_empty")  # methods of modules


def refuse_moves(model: nn.Module) -> None:
    """Make `model.to(device)`, `cuda()` and similar raise ConfigurationError while weights are offloaded or on disk."""
    # The replacements are stored in the model's `__dict__`, where they hide the methods of its class.
    for name in _MOVES:
        if hasattr(type(model), name) and name not in model.__dict__:
            model.__dict__[name] = _Move(name, model)


def allow_moves(module: nn.Module) -> None:
    """Undo `refuse_moves`, unless weights of the module are only on disk."""
    names = [name for name in _MOVES if isinstance(module.__dict__.get(name), _Move)]
    if names and not in_files(module):
        for name in names:
            del module.__dict__[name]


class _Move:
    """Replacement of a method that moves a model.

    `_model` is None in a copy without its model. Calling it then raises an error.
    """

    def __init__(self, name: str, model: nn.Module | None) -> None:
        self._name = name
        self._model = None if model is None else weakref.ref(model)  # a reference would be a cycle

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self._name, "model": None if self._model is None else self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["name"], state["model"])  # type: ignore[misc]  # the model of the same pickle

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = None if self._model is None else self._model()
        # The copied model. `Module` has no `__deepcopy__`, so copy adds it to `memo` before its attributes are copied.
        return _Move(self._name, memo.get(id(model)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the model's class; raise ConfigurationError if weights are missing."""
        model = None if self._model is None else self._model()
        if model is None:
            raise ConfigurationError(
                f"the model of this {self._name}() no longer exists. Keep a reference to the model while you "
                "use its method."
            )
        # `to` also converts dtypes, which placeholders support. The parsed device is then None.
        has_device = self._name != "to" or torch._C._nn._parse_to(*args, **kwargs)[0] is not None
        if has_device:
            _check_has_weights(model)
        return getattr(type(model), self._name)(model, *args, **kwargs)


def _check_has_weights(model: nn.Module) -> None:
    """Raise ConfigurationError if weights are offloaded by hooks or only in files."""
    stored = in_files(model)
    # Without hooks, other meta tensors have no values anywhere, and a move loses nothing.
    is_hooked = "_hf_hook" in model.__dict__
    lost = [name for name, tensor in model.state_dict().items() if tensor.is_meta and (is_hooked or name in stored)]
    if lost:
        raise ConfigurationError(
            f"{len(lost)} weights of this model are offloaded, {lost[0]!r} first: it cannot be moved without them. "
            'dispatch_model(model, {"": "cpu"}), or with another device, loads them there and removes the hooks; '
            "remove_hook_from_submodules(model) restores the model as it was."
        )
