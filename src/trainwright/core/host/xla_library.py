"""The library torch_xla: the only file that imports it."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch

from trainwright.core.errors import ConfigurationError, require_package


def check_versions(purpose: str = "strategy='xla'") -> None:
    """Check that torch_xla is installed and fits torch. Imports nothing.

    Args:
        purpose: The option that needs it.

    Raises:
        ConfigurationError: It is not, or was built for another torch.
    """
    try:
        theirs = metadata.version("torch_xla")
    except metadata.PackageNotFoundError:
        theirs = None
    ours = torch.__version__.split("+")[0]
    wanted = theirs or "2.9.0"
    if theirs is None or theirs.split(".")[:2] != ours.split(".")[:2]:
        raise ConfigurationError(
            f"{purpose} needs torch_xla and the torch that it was built for. This environment has torch {ours} "
            f"and {'no torch_xla' if theirs is None else f'torch_xla {theirs}'}. Run, in an environment of its own: "
            f"pip install torch=={wanted} 'torch_xla[tpu]=={wanted}'"
        )


def load_xla(module: str = "") -> Any:
    """Import torch_xla, or a module of it.

    Raises:
        ConfigurationError: See `check_versions`.
    """
    check_versions()
    return require_package(f"torch_xla.{module}".rstrip("."), purpose="strategy='xla'")


class XLALibrary:
    """The functions of torch_xla that an engine uses.

    Args:
        spmd: One process uses all devices of this machine; chosen once in a process.

    Raises:
        ConfigurationError: An earlier run of this process has chosen otherwise, or torch_xla has started replicas.
    """

    def __init__(self, *, spmd: bool) -> None:
        self._xla = load_xla()
        self._model, self._runtime = load_xla("core.xla_model"), load_xla("runtime")
        self._metrics = load_xla("debug.metrics")
        if self._runtime.is_spmd() and not spmd:
            raise ConfigurationError(
                "an earlier run of this process used all XLA devices (spmd=…), and torch_xla cannot leave that mode. "
                "Start another process, or pass XLAStrategy(spmd='ddp')."
            )
        if not self._runtime.is_spmd() and self._runtime.world_size() > 1:
            raise ConfigurationError(
                f"torch_xla.launch or xmp.spawn has started {self._runtime.world_size()} replicas. Call the script "
                "without it, in one process: XLAStrategy(spmd='ddp') or XLAStrategy(spmd='fsdp') uses all XLA devices."
            )
        if spmd:
            self._runtime.use_spmd()
        self.seed: int | None = None
        if not hasattr(torch, "xla"):
            torch._register_device_module("xla", self)  # type: ignore[no-untyped-call]  # untyped; for core.rng
        self.device: torch.device = self._xla.device()
        module = torch.get_device_module(self.device)
        if module.seed != torch.initial_seed():  # torch.manual_seed does not seed added devices
            module.manual_seed_all(torch.initial_seed())
        self._mesh: Any = None
        if spmd:
            self._sharding = load_xla("distributed.spmd")
            self.num_devices = int(self._runtime.global_runtime_device_count())
            numbers = list(range(self.num_devices))
            self._mesh = self._sharding.Mesh(numbers, (self.num_devices,), ("data",))

    def sync(self) -> None:
        """Compile, if it is new, and start what has been recorded. Does not wait for the device."""
        self._xla.sync()

    def num_compilations(self) -> int:
        """Return how many graphs have been compiled in this process."""
        found = self._metrics.metric_data("CompileTime")
        return int(found[0]) if found else 0

    def shard(self, tensor: torch.Tensor, dim: int) -> None:
        """Divide a tensor over the devices along a dimension whose size is a multiple of their number."""
        places = [None] * tensor.dim()
        places[dim] = "data"  # type: ignore[call-overload]  # the name of the mesh's axis
        self._sharding.mark_sharding(tensor, self._mesh, tuple(places))

    # What torch asks a device's module for

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        """Return the state of the device's generator as eight bytes."""
        state = int(self._model.get_rng_state()) & (2**64 - 1)
        return torch.tensor(list(state.to_bytes(8, "little")), dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """Restore what `get_rng_state` returned."""
        self._model.set_rng_state(int.from_bytes(bytes(state.tolist()), "little"))

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device's generator."""
        self.seed = seed
        self._model.set_rng_state(seed & (2**63 - 1))
