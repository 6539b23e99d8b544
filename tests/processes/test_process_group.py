"""Processes that a launcher started go from stage to stage, quick and slow ones alike."""

from __future__ import annotations

import contextlib
import socket

import torch

from trainwright.core.process import Topology
from trainwright.processes.process_group import ProcessGroup


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
