"""Where the weights of a model lie that were left on the disk, and of which the model has nothing but shapes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from trainwright.bigmodels.dispatch.model_hooks import MOVES, hook_of
from trainwright.bigmodels.weights.stored_weights import StoredWeights
from trainwright.core.errors import ConfigurationError

_LEFT_ON_DISK: weakref.WeakKeyDictionary[nn.Module, StoredWeights] = weakref.WeakKeyDictionary()


def left_on_disk(model: nn.Module) -> StoredWeights:
    """Return what `add_left_on_disk` was told about a model; nothing unless it was."""
    return _LEFT_ON_DISK.get(model, StoredWeights())


def add_left_on_disk(model: nn.Module, weights: StoredWeights) -> None:
    """Remember where weights of a model lie, beside what is known already, and have it refuse to be moved meanwhile.

    Args:
        model: is changed: its `to` and the like raise ConfigurationError while such weights are on the meta device.
        weights: by their names in the model.
    """
    both = StoredWeights()
    for stored in (left_on_disk(model), weights):
        for name in stored:
            both.add(name, stored[name], stored.locate(name))
    _LEFT_ON_DISK[model] = both
    for name in ("to", *MOVES):
        if hasattr(type(model), name) and name not in model.__dict__:
            model.__dict__[name] = _Move(name, model)


class _Move:
    """Stands in the place of a method that moves a model, until its weights are no longer on the disk alone."""

    def __init__(self, name: str, model: nn.Module | None) -> None:
        self._name = name
        self._model = None if model is None else weakref.ref(model)  # the two would keep each other

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self._name, "model": None if self._model is None else self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["name"], state["model"])  # type: ignore[misc]  # as if made for the copied model

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = None if self._model is None else self._model()
        twin = memo.get(id(model))
        if model is not None and twin is not None and twin not in _LEFT_ON_DISK and model in _LEFT_ON_DISK:
            _LEFT_ON_DISK[twin] = _LEFT_ON_DISK[model]
        return _Move(self._name, twin)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Move the model as its class does; raise ConfigurationError where it has weights on the disk."""
        model = None if self._model is None else self._model()
        if model is None:
            raise ConfigurationError("the model that this was made for is gone.")
        if self._name != "to" or torch._C._nn._parse_to(*args, **kwargs)[0] is not None:
            _check_at_hand(model)
        return getattr(type(model), self._name)(model, *args, **kwargs)


def _check_at_hand(model: nn.Module) -> None:
    stored, is_hooked = left_on_disk(model), hook_of(model) is not None
    lost = [name for name, tensor in model.state_dict().items() if tensor.is_meta and (is_hooked or name in stored)]
    if lost:
        raise ConfigurationError(
            f"{len(lost)} weights of this model are offloaded, {lost[0]!r} first: it cannot be moved without them. "
            'dispatch_model(model, {"": "cpu"}), or with another device, brings them there and takes hooks off.'
        )
