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

    Example: layers 0 to 3 in four stages, and this rank has the stages 0 and 2. The original cache has layer 0 on the
    device. The copy of stage 2 has layers 0 and 1 on `meta`, and layer 2 on the device, which `merge` puts into the
    original.

    Args:
        stages: The stages of this rank, in order.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self._stages = stages
        # Cache that the model is called with → copies for the later stages. An entry lives as long as its cache.
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
        """Put the layers that each stage computes into the cache that the model was called with.

        Args:
            caches: The result of `of`.
        """
        for stage in self._stages[1:]:
            original_layers = caches[self._stages[0]].layers
            layers = caches[stage].layers
            # Some caches create a layer at its first update. The later stage then has more layers.
            original_layers.extend(layers[len(original_layers) :])
            for i, layer in enumerate(layers):
                was_computed_here = layer.is_initialized and not layer.keys.is_meta
                if was_computed_here:
                    original_layers[i] = layer


@contextmanager
def recorded_updates(cache: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Yield a list that receives `(args, kwargs)` of each `cache.update` within the context.

    If the cache is None, the list stays empty.
    """
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
