"""Remember where objects stand, in host memory, and put them back there as often as need be."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, MutableMapping, MutableSequence, MutableSet
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_OPENED = (nn.Module, Optimizer, LRScheduler)  # whose attributes are part of what is remembered


class Rewind:
    """The state of some objects at one moment, and the way back to it, bit for bit.

    Remembered are tensors (values, gradients, `requires_grad`), generators (torch's, NumPy's, Python's), lists, dicts,
    sets and deques with everything in them, and the attributes of modules (parameters, buffers, modes, metric objects,
    plain attributes), optimizers and learning-rate schedulers, to any depth. Objects of other classes are put back into
    their places, but not looked into. Tensors on a device are copied to the host; making one and `rewind` wait for it.

    Args:
        roots: where to begin.
    """

    def __init__(self, *roots: object) -> None:
        self._kept: dict[int, Any] = {}  # by id; holding the object keeps its id its own
        self._steps: list[Callable[[], None]] = []
        self._waiting: deque[Any] = deque(roots)
        with torch.inference_mode(False):  # what is made in that mode could not be trained on
            while self._waiting:  # not recursive: a list may be nested deeper than the stack
                self._keep(self._waiting.popleft())

    def rewind(self) -> None:
        """Put everything back."""
        with torch.inference_mode(False), torch.no_grad():
            for step in self._steps:
                step()

    def _keep(self, found: object) -> None:
        if isinstance(found, (str, bytes, int, float, type(None))) or id(found) in self._kept:
            return
        self._kept[id(found)] = found
        if isinstance(found, torch.Tensor):
            self._keep_tensor(found)
        elif isinstance(found, _OPENED):
            self._waiting.append(vars(found))
        elif isinstance(found, dict):
            items = dict(found)
            self._waiting.extend(items.values())
            self._steps.append(lambda: _refill(found, found.update, items))
        elif isinstance(found, (list, deque)):
            entries = list(found)
            self._waiting.extend(entries)
            self._steps.append(lambda: _refill(found, found.extend, entries))
        elif isinstance(found, set):
            members = set(found)
            self._steps.append(lambda: _refill(found, found.update, members))
        elif isinstance(found, tuple):
            self._waiting.extend(found)
        else:
            self._keep_generator(found)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            return
        data, gradient, needs_gradient = tensor.data, tensor.grad if tensor.is_leaf else None, tensor.requires_grad
        local = data.to_local() if hasattr(data, "to_local") else data  # a shard of it, where it is one of several
        saved = local.detach().to("cpu", copy=True)
        if gradient is not None:
            self._waiting.append(gradient)

        def put_back() -> None:
            if tensor.is_leaf:
                tensor.grad = None  # of whatever shape
            tensor.data = data  # it may have been replaced or resized
            local.copy_(saved)
            if tensor.is_leaf:
                tensor.requires_grad_(needs_gradient)
                tensor.grad = gradient

        self._steps.append(put_back)

    def _keep_generator(self, found: object) -> None:
        if isinstance(found, torch.Generator):
            of_torch = found.get_state()
            self._steps.append(lambda: _discard(found.set_state(of_torch)))
        elif isinstance(found, np.random.Generator):
            of_numpy = found.bit_generator.state
            self._steps.append(lambda: setattr(found.bit_generator, "state", of_numpy))
        elif isinstance(found, np.random.RandomState):
            legacy = found.get_state(legacy=False)
            self._steps.append(lambda: found.set_state(legacy))
        elif isinstance(found, random.Random):
            of_python = found.getstate()
            self._steps.append(lambda: found.setstate(of_python))


def _refill(
    container: MutableMapping[Any, Any] | MutableSequence[Any] | MutableSet[Any],
    fill: Callable[[Any], Any],
    content: object,
) -> None:
    container.clear()
    fill(content)


def _discard(_: object) -> None:
    return None
