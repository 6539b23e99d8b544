"""Caches of keys and values in generation with a pipeline."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class StageCaches:
    """Caches of keys and values for the stages of this rank.

    The model may compute positions and masks from the length of any layer in a cache. A stage's cache therefore also
    has the layers of earlier stages, as tensors on `meta`. They become longer when the model skips these layers. The
    first stage of a rank uses the cache that the model is called with. Later stages use copies of it. The layers that a
    later stage computes are also put into the original cache, so that beam search reorders them.

    Args:
        stages: The stages of this rank, in order.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self._stages = stages
        self._copies: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()

    def of(self, cache: object) -> dict[int, Any]:
        """Return {stage: cache} for the cache that the model is called with, or {} for None.

        The first call creates the copies for later stages. The cache must be empty then.
        """
        if cache is None:
            return {}
        if cache not in self._copies:
            self._copies[cache] = {stage: copy.deepcopy(cache) for stage in self._stages[1:]}
        return {self._stages[0]: cache, **self._copies[cache]}

    def merge(self, caches: dict[int, Any]) -> None:
        """Put the layers that each stage computes into the cache that the model was called with."""
        for stage in self._stages[1:]:
            into = caches[self._stages[0]].layers
            layers = caches[stage].layers
            into += layers[len(into) :]
            for i, layer in enumerate(layers):
                if layer.is_initialized and not layer.keys.is_meta:
                    into[i] = layer


@contextmanager
def recorded_updates(cache: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Yield a list that records the arguments of each update of a cache. The cache may be None."""
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
