"""Ranks that use different parameters raise an error on every rank."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.core.errors import TaskError
from trainwright.processes.process_group import Processes
from trainwright.strategies.fsdp.parallelize import Usage


class _Threads(Processes):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self._rank, self._board, self._barrier = rank, board, barrier

    def gather_object(self, value: object) -> list[Any]:
        self._board[self._rank] = value
        self._barrier.wait()
        found = list(self._board)
        self._barrier.wait()
        return found

    def gather_integers(self, values: list[int]) -> list[list[int]]:
        return self.gather_object(values)


def test_different_parameters_in_one_pipeline_stage_are_an_error_on_all_ranks() -> None:
    board, barrier = [None] * 4, threading.Barrier(4, timeout=5)

    def work(rank: int) -> str:
        model = nn.ModuleDict({"first": nn.Linear(1, 1, bias=False), "second": nn.Linear(1, 1, bias=False)})
        stage = ("first", "second")[rank % 2]
        if rank != 1:
            parameter = model[stage].weight
            parameter.grad = torch.zeros_like(parameter)
        peers = [rank % 2, rank % 2 + 2]
        with pytest.raises(TaskError) as failed:
            Usage(model, _Threads(rank, board, barrier), peers).record()
        return str(failed.value)

    with ThreadPoolExecutor(4) as pool:
        for message in pool.map(work, range(4)):
            assert "rank 3 used second.weight, and rank 1 did not" in message
