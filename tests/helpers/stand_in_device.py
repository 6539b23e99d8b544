"""A stand-in for an accelerator on a machine without one: tensors that have a device, shapes and no values.

Under torch's FakeTensorMode, with a device type that torch knows and has no kernels for ("lazy"), a step runs as a
whole: forward, backward, optimizer.
Reading its values unawares (`float(t)`, `if t`) raises DataDependentOutputException, and mixing the device's tensors
with the host's raises a RuntimeError. `.item()` and `.tolist()`, with which values are read on purpose,
are counted instead, so that a test can say how many reads there are. Streams, speed and values are not rehearsed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.core.task import TaskModule
from trainwright.strategies.engine import Engine
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.strategy import SingleDeviceStrategy

STAND_IN = torch.device("lazy")


def is_there(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the stand-in, with whatever index."""
    return tensor.device.type == STAND_IN.type


_TO = torch.ops.aten._to_copy.default
_COPIES = (_TO, torch.ops.aten.copy_.default)


class Reads(TorchDispatchMode):
    """What was fetched from the device on purpose.

    Attributes:
        values: calls of `.item()` and `.tolist()` on a tensor of the device.
        copies: tensors that were copied from the device to the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values = self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _COPIES and is_there(args[0 if func is _TO else 1]) and not is_there(result):
            self.copies += 1
        return result

    def item(self, tensor: FakeTensor) -> float:
        """Stand in for `Tensor.item`: 0, which as a flag says that nothing is wrong."""
        self.values += is_there(tensor)
        return float(not is_there(tensor))  # an optimizer divides by what it has counted on the host

    def tolist(self, tensor: FakeTensor) -> Any:
        """Stand in for `Tensor.tolist`: ones, so that what was counted can be divided by."""
        self.values += is_there(tensor)
        return _ones(list(tensor.shape))


def _ones(shape: list[int]) -> Any:
    return [_ones(shape[1:]) for _ in range(shape[0])] if shape else 1.0


def _host_only(name: str) -> Callable[[FakeTensor], Any]:
    """Return a conversion that gives 1 for a tensor of the host, and raises for one of the device."""
    convert = {"__float__": float, "__int__": int, "__bool__": bool}[name]

    def of(tensor: FakeTensor) -> Any:
        if is_there(tensor):
            raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
        return convert(1)

    return of


class _Generators:
    """What `torch.get_device_module` finds for the device: the state of its generator, which lies on the host."""

    @staticmethod
    def get_rng_state(device: Any) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any) -> None:
        assert state.device.type == "cpu"


@contextmanager
def stand_in_device() -> Iterator[Reads]:
    """Rehearse an accelerator within the block, and count what is fetched from it."""
    reads, lock, dispatch = Reads(), threading.RLock(), FakeTensorMode.dispatch

    def one_thread_at_a_time(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        with lock:  # the mode belongs to all tensors, also to those that another thread brings to the device
            return dispatch(mode, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTensorMode, "dispatch", one_thread_at_a_time)
        patch.setattr(FakeTensor, "item", lambda tensor: reads.item(tensor), raising=False)
        patch.setattr(FakeTensor, "tolist", lambda tensor: reads.tolist(tensor))
        for name in ("__float__", "__int__", "__bool__"):
            patch.setattr(FakeTensor, name, _host_only(name), raising=False)
        patch.setattr(torch, STAND_IN.type, _Generators, raising=False)
        with FakeTensorMode(allow_non_fake_inputs=True), reads:
            yield reads


class StandInStrategy(SingleDeviceStrategy):
    """Trains on the stand-in: the model is built there, for a fake module cannot be moved (torch 2.13)."""

    def engine(self, settings: EngineSettings) -> Engine:
        return StandInEngine(self, settings)


class StandInEngine(Engine):
    def start(self, topology: Any) -> None:
        super().start(topology)
        self.device = STAND_IN

    def _build(self, task: TaskModule) -> None:
        with self.device:
            super()._build(task)

    def _place(self, task: TaskModule) -> None:
        assert all(is_there(tensor) for tensor in task.parameters())
