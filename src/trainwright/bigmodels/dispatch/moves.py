"""Record of a model's weights that are only on disk, and errors if a model is moved while its weights are offloaded."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from trainwright.bigmodels.weights.stored_weights import StoredWeights
from trainwright.core.errors import ConfigurationError

_MOVES = ("to", "cuda", "xpu", "cpu", "to_empty")

_LEFT_ON_DISK: weakref.WeakKeyDictionary[nn.Module, StoredWeights] = weakref.WeakKeyDictionary()


def left_on_disk(model: nn.Module) -> StoredWeights:
    """Return the weights that `add_left_on_disk` recorded for a model."""
    return _LEFT_ON_DISK.get(model, StoredWeights())


def add_left_on_disk(model: nn.Module, weights: StoredWeights) -> None:
    """Add names to the record of weights that a model has only on disk, and make moves of the model raise an error."""
    both = StoredWeights()
    both.update(left_on_disk(model))
    both.update(weights)
    _LEFT_ON_DISK[model] = both
    refuse_moves(model)


def refuse_moves(model: nn.Module) -> None:
    """Make `model.to(device)`, `cuda()` and similar raise ConfigurationError while weights are offloaded or on disk."""
    for name in _MOVES:
        if hasattr(type(model), name) and name not in model.__dict__:
            model.__dict__[name] = _Move(name, model)


def allow_moves(module: nn.Module) -> None:
    """Undo `refuse_moves`, unless weights of the module are only on disk."""
    if module not in _LEFT_ON_DISK:
        for name in _MOVES:
            if isinstance(module.__dict__.get(name), _Move):
                del module.__dict__[name]


class _Move:
    """Replacement of a method that moves a model."""

    def __init__(self, name: str, model: nn.Module | None) -> None:
        self._name = name
        self._model = None if model is None else weakref.ref(model)  # a reference would be a cycle

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self._name, "model": None if self._model is None else self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["name"], state["model"])  # type: ignore[misc]  # for the copied model

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = None if self._model is None else self._model()
        twin = memo.get(id(model))
        if model is not None and model in _LEFT_ON_DISK and twin is not None and twin not in _LEFT_ON_DISK:
            _LEFT_ON_DISK[twin] = _LEFT_ON_DISK[model]
        return _Move(self._name, twin)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the model's class; raise ConfigurationError if weights are missing."""
        model = None if self._model is None else self._model()
        if model is None:
            raise ConfigurationError(
                f"the model of this {self._name}() no longer exists. Keep a reference to the model while you "
                "use its method."
            )
        if self._name != "to" or torch._C._nn._parse_to(*args, **kwargs)[0] is not None:
            _check_has_weights(model)
        return getattr(type(model), self._name)(model, *args, **kwargs)


def _check_has_weights(model: nn.Module) -> None:
    stored, is_hooked = left_on_disk(model), "_hf_hook" in model.__dict__
    lost = [name for name, tensor in model.state_dict().items() if tensor.is_meta and (is_hooked or name in stored)]
    if lost:
        raise ConfigurationError(
            f"{len(lost)} weights of this model are offloaded, {lost[0]!r} first: it cannot be moved without them. "
            'dispatch_model(model, {"": "cpu"}), or with another device, loads them there and removes the hooks; '
            "remove_hook_from_submodules(model) restores the model as it was."
        )
