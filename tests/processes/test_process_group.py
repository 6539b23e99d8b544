"""Processes that a launcher started go from stage to stage, quick and slow ones alike."""

from __future__ import annotations

import contextlib
import socket

import pytest
import torch

from tests.helpers.distributed import run_distributed
from trainwright.core.process import Topology
from trainwright.processes.process_group import ProcessGroup


def _exchange_on_rank(rank: int, world: int, port: int) -> dict[str, object]:
    group = ProcessGroup(Topology("torchrun", rank=rank, world_size=world, master_addr="127.0.0.1", master_port=port))
    group.open(torch.device("cpu"))
    try:
        return {
            "objects": group.gather_object({"rank": rank}),
            "integers": group.gather_integers([rank, 10 * rank]),
            "from_one": group.broadcast_object(f"rank {rank}", src=1),
            "any": group.any(rank == 1),
            "none": group.any(False),
        }
    finally:
        group.barrier()
        group.close()


def _exchange() -> dict[str, object]:
    from trainwright.core.process import detect

    place = detect()
    assert place.master_port is not None
    return _exchange_on_rank(place.rank, place.world_size, place.master_port)


@pytest.mark.distributed
def test_what_is_exchanged_on_the_host_is_the_same_on_every_rank() -> None:
    for found in run_distributed(_exchange, 2, init=False):
        assert found == {
            "objects": [{"rank": 0}, {"rank": 1}],
            "integers": [[0, 0], [1, 10]],
            "from_one": "rank 1",
            "any": True,
            "none": False,
        }


def test_a_process_that_is_alone_takes_a_port_that_is_free() -> None:
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # whoever else has the port that torchrun takes, it is not free
            other.bind(("", 29500))
            other.listen()
        group = ProcessGroup(Topology("none"))
        group.open(torch.device("cpu"))
        try:
            assert group.gather_object("x") == ["x"]
        finally:
            group.close()
