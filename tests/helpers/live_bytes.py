"""The bytes of all tensors that are alive, operation by operation."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Adds up the storages that are alive on the CPU; `peak` is the most there were.

    Attributes:
        left_out: storages that do not count, by `_cdata`.
        watched: storages whose size somebody changes between operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.live = self.peak = 0
        self.left_out: set[int] = set()
        self.watched: list[torch.UntypedStorage] = []
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in self.watched:
            self._note(storage)
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.see(tensor)
        return result

    def see(self, tensor: torch.Tensor) -> None:
        """Count a tensor's memory from now on, once."""
        self._note(getattr(tensor, "_local_tensor", tensor).untyped_storage())
        self.peak = max(self.peak, self.live)

    def see_all(self) -> None:
        """Count every tensor of this process that a Python object holds."""
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of attributes that torch has renamed, which a look at them calls
            tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.layout is torch.strided:
                self.see(tensor)

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.left_out or storage.device.type != "cpu":
            return
        if key not in self._known:
            weakref.finalize(storage, self._forget, key)
        self.live += size - self._known.get(key, 0)  # sharding frees and fills the same storage
        self._known[key] = size

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)
