"""What a call calls: figures of its cost that do not depend on the machine or on what else runs there."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Count torch's operators within the block, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def calls_of(function: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Return the names of the Python functions, and of the built-in ones and operations of torch, that it calls."""
    python: list[str] = []
    built_in: list[str] = []

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            python.append(frame.f_code.co_name)
        elif event == "c_call" and arg is not sys.setprofile:
            built_in.append(arg.__name__)

    gc.collect()
    gc.disable()  # what it finalizes was left by others
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return python, built_in
