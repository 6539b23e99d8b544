"""The named axes over which a model is cut and replicated."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainwright.core.errors import ConfigurationError


def mesh_shape(
    sharding_strategy: str, device_mesh: tuple[int, int] | None, *, num_nodes: int, devices_per_node: int
) -> tuple[int, int]:
    """Return the number of replicas of the model, and of pieces of each; not collective.

    Args:
        sharding_strategy, device_mesh: see `FSDPStrategy`.
        num_nodes: machines in the run.
        devices_per_node: processes on each.

    Raises:
        ConfigurationError: they are not as many as the processes, or nothing says how many there are.
    """
    world = devices_per_node * num_nodes
    if device_mesh is not None:
        replicas, pieces = device_mesh
        if replicas * pieces != world:
            best = (replicas, world // replicas) if world % replicas == 0 else (1, world)
            raise ConfigurationError(
                f"device_mesh={(replicas, pieces)} has {replicas * pieces} places, and the run has {world} "
                f"process(es). Use device_mesh={best}, or as many processes."
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
        return num_nodes, devices_per_node
    return 1, world


def make_mesh(device_type: str, replicas: int, pieces: int) -> DeviceMesh:
    """Return the mesh with the axes `dp_replicate` (left out with one replica) and `dp_shard`. Collective."""
    if replicas == 1:
        return init_device_mesh(device_type, (pieces,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(device_type, (replicas, pieces), mesh_dim_names=("dp_replicate", "dp_shard"))
