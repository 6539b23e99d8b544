from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from tests.data.sources import NumberStream, SizedStream, flat, ids, prepared
from trainwright.core.errors import ConfigurationError
from trainwright.data import LoaderOptions, ShardedIterable, prepare_loader, shard_info
from trainwright.data.iterable import WorkerPlace, set_place


class DividesItself(NumberStream):
    is_sharded = True

    def __iter__(self) -> Iterator[int]:
        index, count = shard_info()
        return iter(range(index, self.n, count))


@pytest.mark.parametrize(("world", "workers"), [(2, 0), (1, 2), (2, 2)])
def test_an_undeclared_iterable_is_refused_naming_the_three_ways(world: int, workers: int) -> None:
    with pytest.raises(ConfigurationError, match=r"ShardedIterable\(\w+.*shard\(index, count\).*is_sharded = True"):
        prepare_loader(DataLoader(NumberStream(9), num_workers=workers), LoaderOptions(world=world))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_passes_as_it_is_on_one_rank_with_one_worker(workers: int) -> None:
    loader = prepared(DataLoader(NumberStream(5), 2, num_workers=workers))
    assert ids(loader.iterate()) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_sharded_iterable_with_a_length_is_counted_for_every_rank(world: int) -> None:
    for rank in range(world):
        source = DataLoader(ShardedIterable(SizedStream(22)), batch_size=4)
        loader = prepared(source, stage="validate", rank=rank, world=world)
        assert loader.counts is not None
        assert loader.counts[rank] == len(list(loader.iterate()))
    assert sum(loader.samples_in_round(i) or 0 for i in range(loader.num_batches or 0)) == 22


def test_the_users_own_worker_init_runs_too(tmp_path: Any) -> None:
    class Init:
        def __call__(self, worker_id: int) -> None:
            (tmp_path / str(worker_id)).touch()

    source = DataLoader(DividesItself(8), num_workers=2, worker_init_fn=Init())
    list(prepared(source).iterate())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_what_goes_to_a_worker_can_be_pickled() -> None:
    placed = ShardedIterable(NumberStream(6)).placed(1, 2, block=2)
    assert list(pickle.loads(pickle.dumps(placed))) == [2, 3]
    pickle.loads(pickle.dumps(WorkerPlace(1, 3, None)))(0)
    assert shard_info() == (1, 3)
    set_place(0, 1)


class Shifting(IterableDataset[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + 4))


class ShiftingParts(Shifting):
    def shard(self, index: int, count: int) -> list[int]:
        return list(self)


@pytest.mark.parametrize(
    ("data", "workers"),
    [(ShardedIterable(Shifting()), 2), (ShardedIterable(Shifting()), 0), (ShiftingParts(), 0)],
)
def test_streams_hear_of_a_new_epoch_and_so_do_workers_that_live_on(data: Any, workers: int) -> None:
    source = DataLoader(data, 2, num_workers=workers, persistent_workers=workers > 0)
    loader = prepare_loader(source, LoaderOptions())
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        assert flat(loader.iterate()) == [100 * epoch + i for i in range(4)]
