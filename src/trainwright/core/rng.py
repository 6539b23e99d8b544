"""Random number generators: seeding, saving and restoring."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from trainwright.core.errors import ConfigurationError

_MAX_SEED = 2**32 - 1


def seed_everything(seed: int | None = None, workers: bool = True, verbose: bool = False) -> int:
    """Seed Python's, NumPy's and torch's generators (all devices) and return the seed.

    Args:
        seed: 0 ≤ seed < 2³². Default: None, which is 0.
        workers: Accepted without effect: loader workers are always seeded from torch's generator.
            Default: True.
        verbose: Accepted without effect: nothing is printed. Default: False.

    Call this function on every rank with the same seed, so that models are initialized equally.

    Raises:
        ConfigurationError: the seed is outside of this range.
    """
    del workers, verbose
    seed = 0 if seed is None else int(seed)
    if not 0 <= seed <= _MAX_SEED:
        raise ConfigurationError(f"seed={seed} is not between 0 and {_MAX_SEED}.")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if hasattr(torch, "xla"):  # an XLALibrary has registered it; torch.manual_seed seeds only torch's own devices
        torch.xla.manual_seed_all(seed)
    return seed


def rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of every generator of this process, without changing it.

    Keys: `python` (tuple), `numpy` (the legacy generator's state as a dict), `torch` (uint8 tensor on the CPU) and,
    when `device` is an accelerator, `device` (uint8 tensor on the CPU; reading it may wait for the device).
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Restore the result of `rng_state`. The generator of `device` is restored if `state` contains its state."""
    # A checkpoint restores the inner tuple as a list, which `random.setstate` refuses.
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device is not None and device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


def begin_alike() -> Callable[[], None]:
    """Return a picklable function, which another process calls to have the same generators as this process.

    Generators on the CPU are set to this process's state. Those of accelerators are seeded with torch's initial seed.
    """
    return partial(_begin_with, torch.initial_seed(), rng_state())


def _begin_with(seed: int, state: dict[str, Any]) -> None:
    torch.manual_seed(seed)  # also of accelerators
    set_rng_state(state)


@contextlib.contextmanager
def isolate_rng(device: torch.device | None = None) -> Iterator[None]:
    """Return a context that restores the generators at its end: those on the CPU, and that of `device` if passed."""
    saved = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(saved, device)
