"""Loaders whose batch size is that of all processes: each gets its part of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.distributed import run_distributed
from trainwright import Accelerator, DataLoaderConfiguration, ShardedIterable
from trainwright.core.errors import ConfigurationError

Batches = list[list[int]]


class Numbers(IterableDataset[int]):
    """The numbers below n, without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


def plain(n: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(n), batch_size=4, **options)  # type: ignore[arg-type]


def custom(batches: Batches) -> DataLoader[Any]:
    return DataLoader(range(20), batch_sampler=batches)  # type: ignore[arg-type]


def iterable(n: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(ShardedIterable(Numbers(n)), batch_size=4, **options)


FULL = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
# name → loader, the batches of both ranks without padding, what gather_for_metrics returns, batches of a rank
CASES: dict[str, tuple[Callable[[], DataLoader[Any]], list[Batches], Batches, int]] = {
    "full": (lambda: plain(8), FULL, [[0, 1, 2, 3], [4, 5, 6, 7]], 2),
    "short": (lambda: plain(7), [[[0, 1], [4, 5]], [[2, 3], [6]]], [[0, 1, 2, 3], [4, 5, 6]], 2),
    "one rank": (lambda: plain(6), [[[0, 1], [4, 5]], [[2, 3]]], [[0, 1, 2, 3], [4, 5]], 2),
    "drop_last": (lambda: plain(7, drop_last=True), [[[0, 1]], [[2, 3]]], [[0, 1, 2, 3]], 1),
    "workers": (lambda: plain(8, num_workers=1), FULL, [[0, 1, 2, 3], [4, 5, 6, 7]], 2),
    "custom": (
        lambda: custom([[9, 8, 7], [1, 2], [5]]),
        [[[9, 8], [1], [5]], [[7], [2]]],
        [[9, 8, 7], [1, 2], [5]],
        3,
    ),
    "iterable": (lambda: iterable(7), [[[0, 1], [4, 5]], [[2, 3], [6]]], [[0, 1, 2, 3], [4, 5, 6]], 2),
    "iterable, drop_last": (lambda: iterable(7, drop_last=True), [[[0, 1]], [[2, 3]]], [[0, 1, 2, 3]], 1),
}


def _read(accelerator: Accelerator, loader: Any) -> tuple[Batches, Batches, int]:
    own, gathered, rounds = [], [], 0
    for batch in loader:
        rounds += 1
        place = accelerator.gradient_state._accumulation.place
        if place is None or place.weight != 0:
            own.append(batch.tolist())
        gathered.append(accelerator.gather_for_metrics(batch).tolist())
    return own, gathered, rounds


def _every_case() -> dict[str, Any]:
    found: dict[str, Any] = {}
    accelerator = Accelerator(split_batches=True)
    for name, (make, *_) in CASES.items():
        loader = accelerator.prepare_data_loader(make())
        found[name] = [_read(accelerator, loader) for _ in range(2)]
    loader = accelerator.prepare_data_loader(plain(10))
    found["numbers"] = (loader.total_batch_size, loader.remainder, len(loader), loader.batch_size)
    found["skipped"] = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)]
    found["skipped custom"] = [
        batch.tolist()
        for batch in accelerator.skip_first_batches(custom([[0, 1], [2, 3], [4, 5]]), 1)  # type: ignore[arg-type]
    ]
    for i, _ in enumerate(loader):
        if i == 0:
            break
    resumed = accelerator.prepare_data_loader(plain(10))
    resumed.load_state_dict({"epoch": 0, "position": loader.prepared.position(1), "loader": None})
    found["resumed"] = [batch.tolist() for batch in resumed]
    wrong: dict[str, Any] = {"uneven": DataLoader(range(6), batch_size=3), "list": [torch.ones(4)]}  # type: ignore[arg-type]
    for name, given in wrong.items():
        with pytest.raises(ConfigurationError) as caught:
            accelerator.prepare_data_loader(given)
        found[name] = str(caught.value)
    config = DataLoaderConfiguration(split_batches=True, data_seed=3)
    shuffled = Accelerator(dataloader_config=config).prepare_data_loader(plain(16, shuffle=True))
    found["shuffled"] = [batch.tolist() for batch in shuffled]
    return found


def test_two_ranks_get_the_parts_of_each_batch() -> None:
    ranks = run_distributed(_every_case, 2, init=False, timeout=240)
    for name, (_, expected, gathered, rounds) in CASES.items():
        for rank, found in enumerate(ranks):
            assert found[name] == [(expected[rank], gathered, rounds)] * 2, name
    for rank, found in enumerate(ranks):
        assert found["numbers"] == (4, 2, 3, 4)
        assert found["skipped"] == [[[8, 9]], [[0, 1]]][rank]  # rank 1 has padding
        assert found["skipped custom"] == [[[2], [4]], [[3], [5]]][rank]
        assert found["resumed"][0] == [[4, 5], [6, 7]][rank]
        assert "batch_size=3 is not divisible by num_processes=2" in found["uneven"]
        assert "a list without a batch size" in found["list"]
    one = Accelerator(cpu=True, seed=3, split_batches=True).prepare_data_loader(plain(16, shuffle=True))
    assert [a + b for a, b in zip(*(found["shuffled"] for found in ranks), strict=True)] == [b.tolist() for b in one]
