"""Data sets that remember what was asked of them, and what tests do with several ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from trainwright.data import LoaderOptions, prepare_loader
from trainwright.data.prepared import PreparedLoader


class Numbers(Dataset[torch.Tensor]):
    """Sample i is the tensor i; `fetched` holds the indices fetched in this process."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched.append(index)
        return torch.tensor(index)


class NumberStream(IterableDataset[int]):
    """Yields 0 .. n - 1; without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class SizedStream(NumberStream):
    def __len__(self) -> int:
        return self.n


class Resumable:
    """An iterable of numbers that keeps its own place and sets it back at its end."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        start, self.place = self.place, 0
        for i in range(start, self.n):
            self.place = i + 1
            yield i
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Meeting:
    """`agree` for ranks that are threads: each call waits for all and gives everybody what all have said."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.calls = 0
        self._said: list[list[int]] = [[] for _ in range(world)]
        self._barrier = threading.Barrier(world)

    def agree_as(self, rank: int) -> Callable[[list[int]], list[list[int]]]:
        def agree(values: list[int]) -> list[list[int]]:
            self._said[rank] = list(values)
            self._barrier.wait(timeout=20)
            told = [list(row) for row in self._said]
            self._barrier.wait(timeout=20)
            if rank == 0:
                self.calls += 1
            return told

        return agree


def on_ranks(world: int, work: Callable[[int, Callable[[list[int]], list[list[int]]]], Any]) -> list[Any]:
    """Run `work(rank, agree)` on `world` threads and return the results, or raise the first error by rank."""
    meeting = Meeting(world)
    with ThreadPoolExecutor(world) as pool:
        running = [pool.submit(work, rank, meeting.agree_as(rank)) for rank in range(world)]
        return [future.result(timeout=30) for future in running]


def prepared(loader: Any, epoch: int = 0, **settings: Any) -> PreparedLoader:
    """Prepare a training loader and turn it to `epoch`."""
    ready = prepare_loader(loader, LoaderOptions(**{"stage": "train", **settings}))
    ready.set_epoch(epoch)
    return ready


def ids(batches: Any) -> list[list[int]]:
    return [batch.reshape(-1).tolist() for batch in batches]


def flat(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.reshape(-1).tolist()]
