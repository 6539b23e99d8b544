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

_OPENED = (nn.Module, Optimizer, LRScheduler)  # their attributes are part of the snapshot


class StateSnapshot:
    """A snapshot of objects that can be restored exactly.

    It covers, to any depth, tensors (values, gradients, `requires_grad`), generators of torch, NumPy and Python, lists,
    dicts, sets and deques, and the attributes of modules, optimizers and learning-rate schedulers. References to
    objects of other classes are restored, but not the state of those objects. Tensors on a device are copied to the
    host. Creating a snapshot and `restore` wait for the device.

    Args:
        roots: the objects.
    """

    def __init__(self, *roots: object) -> None:
        self._kept: dict[int, Any] = {}  # by id; a reference to the object keeps its id unique
        self._steps: list[Callable[[], Any]] = []
        self._waiting: deque[Any] = deque(roots)
        with torch.inference_mode(False):  # inference tensors could not be trained on
            while self._waiting:  # not recursive: a list may be nested deeper than the stack
                self._keep(self._waiting.popleft())

    def restore(self) -> None:
        """Restore the state of all objects."""
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
            self._keep_content(found, dict(found), found.update, found.values())
        elif isinstance(found, (list, deque)):
            self._keep_content(found, list(found), found.extend, found)
        elif isinstance(found, set):
            self._keep_content(
                found, set(found), found.update, ()
            )  # members are hashable, so their values do not change
        elif isinstance(found, tuple):
            self._waiting.extend(found)
        else:
            self._keep_generator(found)

    def _keep_content(self, found: Any, content: object, fill: Callable[[Any], Any], members: Iterable[Any]) -> None:
        self._waiting.extend(members)
        self._steps += [found.clear, partial(fill, content)]

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            return
        data = tensor.data
        gradient = tensor.grad if tensor.is_leaf else None
        needs_gradient = tensor.requires_grad
        local = data.to_local() if hasattr(data, "to_local") else data  # this rank's shard
        saved = local.detach().to("cpu", copy=True)
        if gradient is not None:
            self._waiting.append(gradient)

        def restore() -> None:
            if tensor.is_leaf:
                tensor.grad = None  # its shape may differ
            tensor.data = data  # it may have been replaced or resized
            local.copy_(saved)
            if tensor.is_leaf:
                tensor.requires_grad_(needs_gradient)
                tensor.grad = gradient

        self._steps.append(restore)

    def _keep_generator(self, found: object) -> None:
        if isinstance(found, torch.Generator):
            self._steps.append(partial(found.set_state, found.get_state()))
        elif isinstance(found, np.random.Generator):
            self._steps.append(partial(setattr, found.bit_generator, "state", found.bit_generator.state))
        elif isinstance(found, np.random.RandomState):
            self._steps.append(partial(found.set_state, found.get_state(legacy=False)))
        elif isinstance(found, random.Random):
            self._steps.append(partial(found.setstate, found.getstate()))
