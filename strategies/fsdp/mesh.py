"""The named axes over which a model is replicated, cut and split.

Their order, outermost first: `dp_replicate`, `dp_shard`, `cp`, `tp`, `pp`. Ranks along the first two see different
data; those along `tp` split layers between them and stand next to each other. `cp` and `pp` are reserved, and 1.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from trainwright.core.errors import ConfigurationError

AXES = ("dp_replicate", "dp_shard", "tp")
"""The names of the axes that there are."""


def mesh_shape(
    sharding_strategy: str, device_mesh: tuple[int, int] | None, *, tp: int = 1, num_nodes: int, devices_per_node: int
) -> tuple[int, int]:
    """Return the number of replicas of the model, and of pieces of each; not collective.

    Args:
        sharding_strategy, device_mesh, tp: see `FSDPStrategy`.
        num_nodes: machines in the run.
        devices_per_node: processes on each.

    Raises:
        ConfigurationError: they are not as many as the processes, or nothing says how many there are.
    """
    world = check_tp(tp, devices_per_node * num_nodes)
    if device_mesh is not None:
        replicas, pieces = device_mesh
        if replicas * pieces != world:
            best = (replicas, world // replicas) if world % replicas == 0 else (1, world)
            raise ConfigurationError(
                f"device_mesh={(replicas, pieces)} has {replicas * pieces} places, and the run has {world} "
                f"{'process(es)' if tp == 1 else f'group(s) of tp={tp} processes'}. Use device_mesh={best}, or as many "
                "processes."
            )
        return replicas, pieces
    if sharding_strategy == "NO_SHARD":
        return world, 1
    if sharding_strategy == "HYBRID_SHARD":
        if num_nodes == 1:
            raise ConfigurationError(
                "sharding_strategy='HYBRID_SHARD' keeps a replica on each node, and there is one node. Say how "
                f"many replicas there are and over how many ranks each is cut, such as device_mesh=(1, {world})."
            )
        return num_nodes, world // num_nodes
    return 1, world


def check_tp(tp: int, world: int) -> int:
    """Return how many groups of `tp` processes there are.

    Raises:
        ConfigurationError: they do not add up to `world` processes; says which sizes would.
    """
    if world % tp:
        fitting = [size for size in range(1, world + 1) if world % size == 0]
        raise ConfigurationError(
            f"tp={tp} does not divide the run's {world} process(es). Use tp={' or '.join(map(str, fitting))}, or "
            f"{tp * (world // tp + 1)} processes."
        )
    return world // tp


def make_mesh(device_type: str, replicas: int, pieces: int, tp: int = 1) -> DeviceMesh:
    """Return the mesh with those of the axes `dp_replicate`, `dp_shard` and `tp` that are longer than 1. Collective.

    With one process, or where all are 1, it has `dp_shard` alone.
    """
    lengths = dict(zip(AXES, (replicas, pieces, tp), strict=True))
    # What is replicated only is cut into one piece, as torch 2.13 wants it.
    names = [
        name for name, length in lengths.items() if length > 1 or (name == "dp_shard" and (replicas > 1 or tp == 1))
    ]
    return init_device_mesh(device_type, tuple(lengths[name] for name in names), mesh_dim_names=tuple(names))


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes of a mesh along which ranks see different data. Not collective."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name.startswith("dp_"))
    return mesh if names == mesh.mesh_dim_names else mesh[names]


def data_group(mesh: DeviceMesh) -> ProcessGroup:
    """Return the process group of this rank and those that see other data, of a mesh with the axis `tp`. Collective."""
    axes = data_axes(mesh)
    return axes.get_group() if axes.ndim == 1 else axes._flatten("dp").get_group()


def forget_groups(mesh: DeviceMesh) -> None:
    """Let torch's caches go of a mesh and its process groups, whose last holder they must not be: see DDPStrategy.

    Not collective. What torch 2.13 has cached for a mesh it would also use for an equal one of a later run, whose
    groups have other names.
    """
    vars(mesh).get("_pg_registry", {}).clear()
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # torch has no types here
