"""Snapshots of objects in host memory, which can be restored several times."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_WITH_ATTRIBUTES = (nn.Module, Optimizer, LRScheduler)  # classes of objects whose attributes are saved too


class StateSnapshot:
    """A snapshot of objects that can be restored exactly.

    It covers, to any depth, tensors (values, gradients, `requires_grad`), generators of torch, NumPy and Python (not
    the global ones), lists, sets and deques with their members, dicts with their values, and the attributes of modules,
    optimizers and learning-rate schedulers. References to objects of other classes are restored, but not the state of
    those objects. Tensors on a device are copied to the host. Creating a snapshot and `restore` wait for the device.

    Args:
        roots: the objects.
    """

    def __init__(self, *roots: object) -> None:
        self._visited: dict[int, Any] = {}  # by id; a reference to the object keeps its id unique
        self._restore_steps: list[Callable[[], Any]] = []  # called in order by `restore`
        self._to_visit: deque[Any] = deque(roots)
        with torch.inference_mode(False):  # inference tensors could not be trained on
            while self._to_visit:  # not recursive: a list may be nested deeper than the stack
                self._save(self._to_visit.popleft())

    def restore(self) -> None:
        """Restore the state of all objects."""
        with torch.inference_mode(False), torch.no_grad():
            for restore_step in self._restore_steps:
                restore_step()

    def _save(self, value: object) -> None:
        """Save the state of one object, and visit the objects that it refers to later."""
        if isinstance(value, (str, bytes, int, float, type(None))) or id(value) in self._visited:
            return
        self._visited[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._save_tensor(value)
        elif isinstance(value, _WITH_ATTRIBUTES):
            self._to_visit.append(vars(value))
        elif isinstance(value, dict):
            self._save_content(value, dict(value), value.update, value.values())
        elif isinstance(value, (list, deque)):
            self._save_content(value, list(value), value.extend, value)
        elif isinstance(value, set):
            self._save_content(value, set(value), value.update, value)
        elif isinstance(value, (tuple, frozenset)):
            self._to_visit.extend(value)
        else:
            self._save_generator(value)

    def _save_content(
        self, container: Any, content: object, fill: Callable[[Any], Any], members: Iterable[Any]
    ) -> None:
        """Save a container. `fill(content)` fills it again once it is cleared; `members` are visited later."""
        self._to_visit.extend(members)
        self._restore_steps.append(container.clear)
        self._restore_steps.append(partial(fill, content))

    def _save_tensor(self, tensor: torch.Tensor) -> None:
        """Copy the values of a tensor to the host. Its gradient is visited later, as another tensor."""
        if tensor.is_meta:  # without values
            return
        data = tensor.data
        gradient = tensor.grad if tensor.is_leaf else None
        needs_gradient = tensor.requires_grad
        local = data.to_local() if hasattr(data, "to_local") else data  # this rank's shard
        saved = local.detach().to("cpu", copy=True)
        if gradient is not None:
            self._to_visit.append(gradient)

        def restore() -> None:
            if tensor.is_leaf:
                tensor.grad = None  # its shape may differ
            tensor.data = data  # it may have been replaced or resized
            local.copy_(saved)
            if tensor.is_leaf:
                tensor.requires_grad_(needs_gradient)
                tensor.grad = gradient

        self._restore_steps.append(restore)

    def _save_generator(self, value: object) -> None:
        """Save the state of a random number generator. Objects of other classes are not saved."""
        if isinstance(value, torch.Generator):
            self._restore_steps.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._restore_steps.append(partial(setattr, bits, "state", bits.state))
        elif isinstance(value, np.random.RandomState):
            self._restore_steps.append(partial(value.set_state, value.get_state(legacy=False)))
        elif isinstance(value, random.Random):
            self._restore_steps.append(partial(value.setstate, value.getstate()))
