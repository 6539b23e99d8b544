"""Where ranks are along named axes, and which of them see different data."""

from __future__ import annotations

import pytest

from tests.helpers.distributed import run_distributed
from trainwright.core.process import Topology
from trainwright.processes.process_group import Processes
from trainwright.strategies.mesh import MeshShape, data_axes, data_group


@pytest.mark.parametrize(
    ("shape", "of_ranks", "members"),
    [
        (MeshShape(dp_shard=4), [0, 1, 2, 3], [0, 1, 2, 3]),
        (MeshShape(dp_replicate=2, dp_shard=2), [0, 1, 2, 3], [0, 1, 2, 3]),
        (MeshShape(dp_shard=2, tp=2), [0, 0, 1, 1], [0, 2]),  # neighbours work on one batch
        (MeshShape(pp=2, dp_shard=2), [0, 1, 0, 1], [0, 1]),  # stages of one batch are not neighbours
        (MeshShape(pp=2, dp_replicate=2, tp=2), [0, 0, 1, 1, 0, 0, 1, 1], [0, 2]),
        (MeshShape(dp_shard=2, cp=2, tp=2), [0, 0, 1, 1, 2, 2, 3, 3], [0, 2, 4, 6]),
        (MeshShape(tp=2), [0, 0], [0]),
    ],
)
def test_ranks_along_the_data_axes_see_different_data(
    shape: MeshShape, of_ranks: list[int], members: list[int]
) -> None:
    found = [
        shape.data_ranks(Processes(Topology("torchrun", rank=rank, world_size=shape.size)))
        for rank in range(shape.size)
    ]
    assert [ranks.rank for ranks in found] == of_ranks
    assert all(list(ranks.members) == members for ranks in found)


def _groups() -> tuple[tuple[str, ...], list[int], list[int]]:
    import torch.distributed as dist

    shape = MeshShape(pp=2, dp_replicate=2)
    mesh = shape.device_mesh("cpu")
    return (
        mesh.mesh_dim_names or (),
        dist.get_process_group_ranks(data_group(mesh)),
        list(data_axes(mesh).shape),
    )


@pytest.mark.distributed
def test_torchs_mesh_has_the_same_ranks() -> None:
    found = run_distributed(_groups, 4)
    for rank, (names, group, lengths) in enumerate(found):
        assert names == ("pp", "dp_replicate", "dp_shard")
        assert group == ([0, 1] if rank < 2 else [2, 3])
        assert lengths == [2, 1]
