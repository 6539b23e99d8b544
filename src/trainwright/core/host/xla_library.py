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
        purpose: the option that needs torch_xla, for the error message.

    Raises:
        ConfigurationError: torch_xla is not installed, or was built for another torch.
    """
    try:
        xla_version = metadata.version("torch_xla")
    except metadata.PackageNotFoundError:
        xla_version = None
    torch_version = torch.__version__.split("+")[0]
    wanted = xla_version or "2.9.0"
    # torch_xla 2.9.x is built for torch 2.9.x.
    if xla_version is None or xla_version.split(".")[:2] != torch_version.split(".")[:2]:
        installed = "no torch_xla" if xla_version is None else f"torch_xla {xla_version}"
        raise ConfigurationError(
            f"{purpose} needs torch_xla and the torch that it was built for. This environment has torch "
            f"{torch_version} and {installed}. Run, in an environment of its own: "
            f"pip install torch=={wanted} 'torch_xla[tpu]=={wanted}'"
        )


def load_xla(module: str = "") -> Any:
    """Import torch_xla, or a module of it.

    Raises:
        ConfigurationError: see `check_versions`.
    """
    check_versions()
    return require_package(f"torch_xla.{module}".rstrip("."), purpose="strategy='xla'")


def join_devices(local_rank: int, local_world_size: int) -> str:
    """Assign one XLA device to each process of this machine, and return the name of a backend of torch.distributed.

    Call this function before the first use of a device. The returned backend numbers processes by their ranks in
    torch.distributed. torch_xla's own backend numbers processes by their devices, in an undocumented order. The
    returned backend also runs each collective immediately, because all processes must run the same programs, even if
    only rank 0 reads the result.

    Args:
        local_rank: index of this process on its machine.
        local_world_size: number of processes on this machine.
    """
    # `xmp.spawn`, and `init_method="xla://"` under torchrun, call this function in each process. It has no public name.
    load_xla("_internal.pjrt").initialize_multiprocess(local_rank, local_world_size)
    xla = load_xla()
    runtime = load_xla("runtime")
    backend = load_xla("distributed.xla_backend")

    class RankedGroup(backend.ProcessGroupXla):  # type: ignore[misc, name-defined]  # torch_xla has no types
        def __init__(self, store: TCPStore, rank: int, size: int, timeout: object) -> None:
            super().__init__(store, rank, size, timeout)
            # An ordinal is torch_xla's index of a process. `_ordinals[rank]` is the ordinal of the process `rank`.
            store.set(f"ordinal/{rank}", str(runtime.global_ordinal()))
            self._ordinals = [int(store.get(f"ordinal/{other}")) for other in range(size)]

        def allreduce(self, tensors: list[torch.Tensor], options: object) -> dist.Work:
            return _run(super().allreduce(tensors, options))

        def allgather(
            self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: object = None
        ) -> dist.Work:
            # torch_xla fills the first tensor of a list from the process with ordinal 0, and so on. Sort the tensors of
            # each list, which are in the order of the ranks, by the ordinals of the ranks.
            ranks = [self._ordinals.index(ordinal) for ordinal in sorted(self._ordinals)]
            sorted_outputs = [[tensors[rank] for rank in ranks] for tensors in outputs]
            return _run(super().allgather(sorted_outputs, inputs, options))

        def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, options: object) -> dist.Work:
            return self.allgather([list(output.chunk(self.size()))], [own], options)

        def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> dist.Work:
            options.rootRank = self._ordinals[options.rootRank]
            return _run(super().broadcast(tensors, options))

    def _run(work: dist.Work) -> dist.Work:
        xla.sync()  # run the recorded operations, with the collective, now
        return work

    name = "xla_ranks"
    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, RankedGroup, devices="xla")
    return name


class XLALibrary:
    """The functions of torch_xla that an engine uses.

    Args:
        spmd: one process uses all devices of this machine. After True, False is not possible in the same process.
        num_processes: number of processes of the run.

    Raises:
        ConfigurationError: `spmd` is False, but was True in an earlier run of this process, or torch_xla's number of
            replicas differs from `num_processes`.
    """

    def __init__(self, *, spmd: bool, num_processes: int = 1) -> None:
        self._xla = load_xla()
        self._model = load_xla("core.xla_model")
        self._runtime = load_xla("runtime")
        self._metrics = load_xla("debug.metrics")
        if self._runtime.is_spmd() and not spmd:
            raise ConfigurationError(
                "an earlier run of this process used all XLA devices (spmd=…), and torch_xla cannot leave that mode. "
                "Start another process, or pass XLAStrategy(spmd='ddp')."
            )
        # With spmd, this process is one replica, which uses all devices.
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
        self.seed: int | None = None  # of the last `manual_seed_all`
        if not hasattr(torch, "xla"):  # torch.get_device_module then returns this object; see core.rng
            torch._register_device_module("xla", self)  # type: ignore[no-untyped-call]  # torch has no types here
        self.device: torch.device = self._xla.device()
        module = torch.get_device_module(self.device)  # this object, or that of an earlier run of this process
        # torch.manual_seed does not seed devices that a package adds to torch. Seed the device unless that was done.
        if module.seed != torch.initial_seed():
            module.manual_seed_all(torch.initial_seed())
        self._mesh: Any = None  # all devices along one axis, with `spmd`
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
        data = self._metrics.metric_data("CompileTime")  # its first entry is the count; None before the first
        return int(data[0]) if data else 0

    def shard(self, tensor: torch.Tensor, dim: int) -> None:
        """Divide a tensor over the devices along a dimension. Its size must be a multiple of the number of devices.

        Requires `spmd`.
        """
        axes = [None] * tensor.dim()  # the axis of the mesh for each dimension of the tensor; None does not divide it
        axes[dim] = "data"  # type: ignore[call-overload]  # the name of the mesh's axis
        self._sharding.mark_sharding(tensor, self._mesh, tuple(axes))

    # Functions that torch and `core.rng` call in the module of a device type

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
