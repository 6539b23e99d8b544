"""A metric's value on the host: a float with the methods of a tensor with one element."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch


class MetricValue(float):
    """Float with the methods of a 0-dim tensor.

    Formatting, JSON, comparison and arithmetic treat the value as a float. `item()` returns a plain float. `cpu()`,
    `detach()` and `clone()` return the value itself. `numpy()` returns a 0-dim array. Other tensor attributes and
    torch's functions treat the value as `torch.tensor(value)`.
    """

    __slots__ = ()

    def item(self) -> float:
        """Return the plain float."""
        return float(self)

    tolist = item

    def cpu(self) -> Self:
        """Return the value itself, which is on the host, has no graph and is immutable."""
        return self

    detach = clone = cpu

    def numpy(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return a 0-dim array."""
        return np.array(float(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that a float does not have
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(torch.tensor(float(self)), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with plain floats. If that is a TypeError, call it with tensors."""
        kwargs = kwargs or {}
        try:
            return func(*_plain(args, float), **_plain(kwargs, float))
        except TypeError:
            return func(*_plain(args, _tensor), **_plain(kwargs, _tensor))


def _tensor(value: float) -> torch.Tensor:
    return torch.tensor(float(value))


def _plain(tree: Any, make: Callable[[float], Any]) -> Any:
    """Return nested arguments with `make` applied to every `MetricValue`."""
    if isinstance(tree, MetricValue):
        return make(tree)
    if type(tree) in (list, tuple):
        return type(tree)(_plain(value, make) for value in tree)
    if type(tree) is dict:
        return {key: _plain(value, make) for key, value in tree.items()}
    return tree


def as_values(metrics: Mapping[str, float]) -> dict[str, MetricValue]:
    """Return metrics with their values as `MetricValue`s."""
    return {name: MetricValue(value) for name, value in metrics.items()}
