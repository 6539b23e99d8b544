"""Random number generators of several processes, under the names of Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.constants import RNGType
from trainwright.core.rng import seed_everything
from trainwright.processes.partial_state import PartialState


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and torch's generators on all devices. Not collective.

    Args:
        seed: 0 ≤ seed < 2³².
        device_specific: Add the process index to the seed, so that processes draw different numbers. Default: False.
        deterministic: Use only deterministic algorithms of torch, from now on. Default: False.
    """
    seed_everything(seed + PartialState().process_index if device_specific else seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType] | None = None, generator: torch.Generator | None = None
) -> None:
    """Set generators of all processes to the state of the first process. Collective.

    Args:
        rng_types: `"torch"` for the CPU, `"generator"`, or the kind of this process's device (`"cuda"`, …). Default:
            None, which is torch's on the CPU and on the device.
        generator: The generator that `"generator"` refers to. Default: None, which ignores `"generator"`.

    Raises:
        ConfigurationError: A type is the kind of another device.
        ValueError: A type is unknown.
    """
    device = PartialState().device
    kinds = ["torch", device.type] if rng_types is None else [str(RNGType(kind)) for kind in rng_types]
    for kind in dict.fromkeys(kinds):
        if kind != "cpu":  # of `device.type`: "torch" is the generator of the CPU
            synchronize_rng_state(kind, generator)


def synchronize_rng_state(rng_type: str | RNGType | None = None, generator: torch.Generator | None = None) -> None:
    """Call `synchronize_rng_states` for one generator. Collective. Default: torch's generator on the CPU."""
    state = PartialState()
    kind = "torch" if rng_type is None else str(rng_type)
    if kind == "generator":
        if generator is not None:
            generator.set_state(state.joined().broadcast_object(generator.get_state()))
    elif kind == "torch":
        torch.set_rng_state(state.joined().broadcast_object(torch.get_rng_state()))
    elif kind == state.device.type:
        module = torch.get_device_module(state.device)
        module.set_rng_state(state.joined().broadcast_object(module.get_rng_state(state.device)), state.device)
    else:
        raise ConfigurationError(f"rng_type={kind!r}: expected 'torch', 'generator' or {state.device.type!r}.")
