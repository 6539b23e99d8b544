"""The device mesh of a run: named axes, and the number of ranks along each axis.

Ranks along `dp_replicate` and `dp_shard` see different data. `dp_replicate` ranks hold replicas of the model, and
`dp_shard` ranks hold shards. Ranks along `cp` read the same batch, see different parts of its sequences, and hold
shards, too. Ranks along `tp` hold parts of layers, and ranks along `pp` hold stages of the model. Ranks along `tp` and
`pp` process one batch together.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainwright.processes.process_group import Processes
from trainwright.strategies.data_ranks import DataRanks

DATA_AXES = ("dp_replicate", "dp_shard", "cp")
"""The axes along which ranks see different data: other batches, or other parts of their sequences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """The number of ranks along each axis.

    The fields are in the order of ranks, outermost first. Ranks that split layers are adjacent, and pipeline stages are
    farthest apart.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def lengths(self) -> dict[str, int]:
        """The length of each axis, outermost first."""
        return asdict(self)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.lengths.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a global rank along each axis.

        Example: with dp_shard=2 and tp=4, rank 6 has `dp_shard` 1 and `tp` 2. Its other coordinates are 0.
        """
        along_axes: dict[str, int] = {}
        rest = rank
        for name, length in reversed(self.lengths.items()):  # the innermost axis counts fastest
            along_axes[name] = rest % length
            rest //= length
        return along_axes

    def data_ranks(self, processes: Processes, group: ProcessGroup | None = None) -> DataRanks:
        """Return the data-parallel ranks. Not collective.

        Args:
            processes: The processes of the run, whose number is `size`.
            group: See `DataRanks`.
        """
        # Of the ranks with the same data, the one that is first along `pp` and `tp`.
        members: list[int] = []
        for rank in range(self.size):
            coordinates = self.coordinates(rank)
            if coordinates["pp"] == 0 and coordinates["tp"] == 0:
                members.append(rank)
        here = self.coordinates(processes.rank)
        # The index of this rank's data in the order of `members`.
        data_rank = (here["dp_replicate"] * self.dp_shard + here["dp_shard"]) * self.cp + here["cp"]
        return DataRanks(processes, data_rank, members, group, parts=self.cp)

    def device_mesh(self, device_type: str, *, shards: bool = False) -> DeviceMesh:
        """Return torch's mesh with the axes that have more than one rank. Collective.

        Ranks that split sequences also shard parameters, so the axis `dp_shard` includes `cp`. A mesh of one rank, or
        with replicas, has the axis `dp_shard` even if this axis has one rank, because torch 2.13 requires it.

        Args:
            device_type: Device type of the ranks.
            shards: Parameters are sharded. The mesh then has the axis `dp_shard` even if the axis has one rank.
        """
        lengths = {**self.lengths, "dp_shard": self.dp_shard * self.cp, "cp": 1}
        needs_dp_shard = shards or self.dp_replicate > 1 or self.size == 1
        names = []
        for name, length in lengths.items():  # outermost first, as in `coordinates`
            if length > 1 or (name == "dp_shard" and needs_dp_shard):
                names.append(name)
        shape = tuple(lengths[name] for name in names)
        return init_device_mesh(device_type, shape, mesh_dim_names=tuple(names))

    def sequence_group(self) -> ProcessGroup:
        """Return the process group of the ranks that split the same sequences as this rank. Collective."""
        groups: dict[tuple[int, ...], list[int]] = {}  # coordinates along the other axes → ranks
        for rank in range(self.size):
            coordinates = self.coordinates(rank)
            del coordinates["cp"]
            groups.setdefault(tuple(coordinates.values()), []).append(rank)
        # Every rank creates all groups, in the same order.
        in_order = [groups[other_coordinates] for other_coordinates in sorted(groups)]
        mine: ProcessGroup
        mine, _ = dist.new_subgroups_by_enumeration(in_order)  # type: ignore[no-untyped-call]  # torch has no types here
        return mine


def nearest_meshes(world: int, pp: int, tp: int, cp_sp: tuple[int, int], dp_replicate: int, dp_shard: int) -> list[str]:
    """Return the meshes of `world` ranks that are most similar to the given sizes, such as `"tp=2, dp_shard=4"`.

    Axes of size 1 are omitted in the result, except that a mesh of one rank is `"pp=1"`.

    Args:
        world: Number of ranks.
        pp, tp, dp_replicate, dp_shard: The given sizes.
        cp_sp: The sizes of `cp` and `sp`, of which at least one is 1.

    Returns:
        Up to two meshes, the most similar one first.
    """
    cp, sp = cp_sp
    num_parts = cp * sp  # of each sequence
    requested = (pp, tp, num_parts, dp_replicate, dp_shard)
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    splits = divisors if num_parts > 1 else [1]  # sequences are split only if the user splits them
    meshes: list[tuple[int, ...]] = []  # in the order of `requested`
    for sizes in itertools.product(divisors, divisors, splits, divisors):
        if world % math.prod(sizes) == 0:
            meshes.append((*sizes, world // math.prod(sizes)))

    def difference(mesh: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        # The numbers of doublings or halvings. Those of `dp_shard` weigh less, so that it is changed before the other
        # sizes.
        changes = [abs(math.log2(new / old)) for new, old in zip(mesh, requested, strict=True)]
        return 4 * sum(changes[:-1]) + changes[-1], mesh  # the mesh itself makes the order of equal ones definite

    names = ("pp", "tp", "sp" if sp > 1 else "cp", "dp_replicate", "dp_shard")
    texts = []
    for mesh in sorted(meshes, key=difference)[:2]:
        longer = [f"{name}={size}" for name, size in zip(names, mesh, strict=True) if size > 1]
        texts.append(", ".join(longer) or "pp=1")
    return texts


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of a mesh with the axes along which ranks see different data. Not collective."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name in DATA_AXES)
    return mesh if names == mesh.mesh_dim_names else mesh[names]


def data_group(mesh: DeviceMesh) -> ProcessGroup:
    """Return the process group of the ranks that see different data but hold the same part of the model. Collective."""
    axes = data_axes(mesh)
    return axes.get_group() if axes.ndim == 1 else axes._flatten("dp").get_group()


def forget_groups(mesh: DeviceMesh) -> None:
    """Remove a mesh and its process groups from torch's caches. Not collective.

    A cache that holds the last reference to a process group frees the group too late, which can crash or hang. Also,
    torch 2.13 would use cached results for an equal mesh of a later run, whose groups have other names.
    """
    vars(mesh).get("_pg_registry", {}).clear()
    _clear_sharding_cache()


def _clear_sharding_cache() -> None:
    """Clear torch's cache of how DTensor operations shard their results. Its name differs between versions."""
    from torch.distributed.tensor import DTensor, debug  # takes longer than the rest of a small run's start

    was_cleared = False
    for name in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        if hasattr(debug, name):
            getattr(debug, name)()
            was_cleared = True
    if not was_cleared:  # torch 2.9
        dispatcher: Any = DTensor._op_dispatcher
        dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
