"""Caches of keys and values for the stages of a model of transformers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Caches = dict[int, Any]


class StageCaches:
    """Provides each stage of this rank with its cache of keys and values.

    Positions and masks are computed from the length of any layer in a cache. A stage's cache therefore also has the
    layers of earlier stages, with tensors on `meta`, to which skipped layers append. The first stage of a rank uses
    the cache that the model is called with. Later stages use copies, whose own layers are put into that cache, too, so
    that beam search reorders them.

    Args:
        stages: The stages of this rank, in order.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self._stages = stages
        self._copies: weakref.WeakKeyDictionary[Any, Caches] = weakref.WeakKeyDictionary()

    def of(self, cache: object) -> Caches:
        """Return the cache of each stage, for a cache that is empty at first. None: no caches."""
        if cache is None:
            return {}
        if cache not in self._copies:
            self._copies[cache] = {stage: copy.deepcopy(cache) for stage in self._stages[1:]}
        return {self._stages[0]: cache, **self._copies[cache]}

    def merge(self, caches: Caches) -> None:
        """Put the computed layers of each stage into the cache that the model was called with."""
        for stage in self._stages[1:]:
            into, layers = caches[self._stages[0]].layers, caches[stage].layers
            into += layers[len(into) :]
            for i, layer in enumerate(layers):
                if layer.is_initialized and not layer.keys.is_meta:
                    into[i] = layer


@contextmanager
def recorded_updates(cache: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Yield a list that receives the arguments of each update of a cache. The cache may be None."""
    updates: list[tuple[Any, Any]] = []
    if cache is None:
        yield updates
        return
    update = cache.update

    def record(*args: object, **kwargs: object) -> Any:
        updates.append((args, kwargs))
        return update(*args, **kwargs)

    vars(cache)["update"] = record  # hides the method
    try:
        yield updates
    finally:
        del vars(cache)["update"]
