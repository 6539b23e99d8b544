"""Functions of the library torch_xla, which only this file imports."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not re-exported

from trainwright.core.errors import ConfigurationError, require_package


def check_versions(purpose: str = "strategy='xla'") -> None:
    """Check that torch_xla is installed and fits torch. Imports nothing.

    Args:
        purpose: The option that needs torch_xla, for the error message.

    Raises:
        ConfigurationError: torch_xla is not installed, or was built for another torch.
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


def join_devices(local_rank: int, local_world_size: int) -> str:
    """Give each process of this machine one XLA device, and return the backend of torch.distributed for them.

    Call this function before the first use of a device. The returned backend numbers processes by their ranks in
    torch.distributed. torch_xla's own backend numbers processes by their devices, in an undocumented order. The
    returned backend also runs each collective immediately, because all processes must run the same programs, even if
    only rank 0 reads the result.

    Args:
        local_rank: Index of this process on its machine.
        local_world_size: Number of processes on this machine.
    """
    # What `xmp.spawn` and torchrun with `init_method="xla://"` call in each process; it has no public name.
    load_xla("_internal.pjrt").initialize_multiprocess(local_rank, local_world_size)
    xla = load_xla()
    runtime = load_xla("runtime")
    backend = load_xla("distributed.xla_backend")

    class RankedGroup(backend.ProcessGroupXla):  # type: ignore[misc, name-defined]  # torch_xla has no types
        def __init__(self, store: TCPStore, rank: int, size: int, timeout: object) -> None:
            super().__init__(store, rank, size, timeout)
            store.set(f"ordinal/{rank}", str(runtime.global_ordinal()))
            self._ordinals = [int(store.get(f"ordinal/{other}")) for other in range(size)]

        def allreduce(self, tensors: list[torch.Tensor], options: object) -> dist.Work:
            return _run(super().allreduce(tensors, options))

        def allgather(
            self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: object = None
        ) -> dist.Work:
            places = [self._ordinals.index(ordinal) for ordinal in sorted(self._ordinals)]
            return _run(super().allgather([[one[place] for place in places] for one in outputs], inputs, options))

        def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, options: object) -> dist.Work:
            return self.allgather([list(output.chunk(self.size()))], [own], options)

        def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> dist.Work:
            options.rootRank = self._ordinals[options.rootRank]
            return _run(super().broadcast(tensors, options))

    def _run(work: dist.Work) -> dist.Work:
        xla.sync()
        return work

    name = "xla_ranks"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, RankedGroup, devices="xla")
    return name


class XLALibrary:
    """The functions of torch_xla that an engine uses.

    Args:
        spmd: One process uses all devices of this machine. Within a process, True cannot change to False.
        num_processes: Number of processes of the run.

    Raises:
        ConfigurationError: `spmd` is False, but was True in an earlier run of this process, or torch_xla's number of
            replicas differs from `num_processes`.
    """

    def __init__(self, *, spmd: bool, num_processes: int = 1) -> None:
        self._xla = load_xla()
        self._model, self._runtime = load_xla("core.xla_model"), load_xla("runtime")
        self._metrics = load_xla("debug.metrics")
        if self._runtime.is_spmd() and not spmd:
            raise ConfigurationError(
                "an earlier run of this process used all XLA devices (spmd=…), and torch_xla cannot leave that mode. "
                "Start another process, or pass XLAStrategy(spmd='ddp')."
            )
        self._num_replicas = 1 if self._runtime.is_spmd() else int(self._runtime.world_size())
        if num_processes == 1 and self._num_replicas > 1:
            raise ConfigurationError(
                f"torch_xla.launch or xmp.spawn has started {self._num_replicas} replicas. Call the script without it: "
                f"Trainer(devices={self._num_replicas}), or `trainwright launch --tpu --num_processes "
                f"{self._num_replicas}`. In one process, XLAStrategy(spmd='ddp') or XLAStrategy(spmd='fsdp') uses all "
                "XLA devices."
            )
        if self._num_replicas != num_processes:
            raise ConfigurationError(
                f"{num_processes} processes were started, but torch_xla has {self._num_replicas} device(s) for them. "
                "Start one process for each device, or use XLAStrategy(spmd='ddp') in one process."
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
        """Start the recorded graph, and compile it if it is new. Does not wait for the device."""
        self._xla.sync()

    def average(self, gradients: list[torch.Tensor]) -> None:
        """Average tensors over the processes, in place. The operation is added to the recorded graph. Collective."""
        self._model.all_reduce(self._model.REDUCE_SUM, gradients, scale=1 / self._num_replicas, pin_layout=False)

    def num_compilations(self) -> int:
        """Return how many graphs have been compiled in this process."""
        found = self._metrics.metric_data("CompileTime")
        return int(found[0]) if found else 0

    def shard(self, tensor: torch.Tensor, dim: int) -> None:
        """Divide a tensor over the devices along a dimension. Its size must be a multiple of the number of devices."""
        places = [None] * tensor.dim()
        places[dim] = "data"  # type: ignore[call-overload]  # the name of the mesh's axis
        self._sharding.mark_sharding(tensor, self._mesh, tuple(places))

    # What torch asks a device's module for

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        """Return the state of the device's generator as eight bytes."""
        state = int(self._model.get_rng_state()) & (2**64 - 1)
        return torch.tensor(list(state.to_bytes(8, "little")), dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        """Restore the result of `get_rng_state`."""
        self._model.set_rng_state(int.from_bytes(bytes(state.tolist()), "little"))

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device's generator."""
        self.seed = seed
        self._model.set_rng_state(seed & (2**63 - 1))
