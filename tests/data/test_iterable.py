from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.data.sources import NumberStream, SizedStream, flat, ids, prepared
from tests.helpers.selection import mostly_exhaustive
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.data import LoaderOptions, ShardedIterable, prepare_loader, shard_info
from trainwright.data.iterable import WorkerPlace, set_place


class OpensItsPart(NumberStream):
    """Has a method shard(index, count)."""

    def shard(self, index: int, count: int) -> Iterable[int]:
        return range(index, self.n, count)


class DividesItself(NumberStream):
    """Asks shard_info."""

    is_sharded = True

    def __iter__(self) -> Iterator[int]:
        index, count = shard_info()
        return iter(range(index, self.n, count))


class OtherWayRound(NumberStream):
    """Has a method `shard` with another meaning."""

    def shard(self, num_shards: int, index: int) -> Iterable[int]:
        raise AssertionError("must not be called")


def sharded(n: int) -> ShardedIterable:
    return ShardedIterable(NumberStream(n))


@pytest.mark.slow
@pytest.mark.parametrize("make", [sharded, OpensItsPart, DividesItself])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("workers", mostly_exhaustive([0, 1, 2], keep=[0]))
def test_each_sample_goes_to_exactly_one_rank_and_worker(make: Any, world: int, workers: int) -> None:
    seen: list[int] = []
    for rank in range(world):
        source = DataLoader(make(23), batch_size=4, num_workers=workers)
        seen += flat(prepared(source, stage="validate", rank=rank, world=world).iterate())
    assert sorted(seen) == list(range(23))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("workers", mostly_exhaustive([0, 1, 2], keep=[0, 2]))
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sharded_iterable_keeps_the_order_of_one_process(world: int, workers: int, drop_last: bool) -> None:
    whole = ids(DataLoader(NumberStream(30), 4, drop_last=drop_last))
    dealt = []
    for rank in range(world):
        source = DataLoader(sharded(30), 4, drop_last=drop_last, num_workers=workers)
        dealt.append(ids(prepared(source, stage="validate", rank=rank, world=world).iterate()))
    assert [own[i] for i in range(len(dealt[0])) for own in dealt if i < len(own)] == whole


@pytest.mark.parametrize(("world", "workers"), [(2, 0), (1, 2), (2, 2)])
@pytest.mark.parametrize("make", [NumberStream, OtherWayRound])
def test_an_undeclared_iterable_is_refused_naming_the_three_ways(make: Any, world: int, workers: int) -> None:
    with pytest.raises(ConfigurationError, match=r"ShardedIterable\(\w+.*shard\(index, count\).*is_sharded = True"):
        prepare_loader(DataLoader(make(9), num_workers=workers), LoaderOptions(world=world))


def test_an_undeclared_iterable_of_batches_is_refused_on_several_ranks() -> None:
    with pytest.raises(ConfigurationError, match="every sample would be seen 2 times"):
        prepare_loader(iter([1, 2]), LoaderOptions(world=2))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_passes_as_it_is_on_one_rank_with_one_worker(workers: int) -> None:
    loader = prepared(DataLoader(NumberStream(5), 2, num_workers=workers))
    assert ids(loader.iterate()) == [[0, 1], [2, 3], [4]]


def test_use_distributed_sampler_false_leaves_the_division_to_the_user() -> None:
    loader = prepared(DataLoader(NumberStream(3)), stage="validate", world=2, rank=1, use_distributed_sampler=False)
    assert flat(loader.iterate()) == [0, 1, 2]


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


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("make", mostly_exhaustive([sharded, DividesItself], keep=[sharded]))
def test_workers_that_inherit_nothing_are_told_their_rank(make: Any) -> None:
    source = DataLoader(make(6), num_workers=1, multiprocessing_context="spawn")
    assert flat(prepared(source, stage="validate", rank=1, world=2).iterate()) == [1, 3, 5]


def test_what_goes_to_a_worker_can_be_pickled() -> None:
    placed = sharded(6).placed(1, 2, block=2)
    assert list(pickle.loads(pickle.dumps(placed))) == [2, 3]
    pickle.loads(pickle.dumps(WorkerPlace(1, 3, None)))(0)
    assert shard_info() == (1, 3)
    set_place(0, 1)


class Shifting(IterableDataset[int]):
    """Yields numbers that depend on the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + 4))


def test_workers_that_live_on_hear_of_a_new_epoch() -> None:
    source = DataLoader(ShardedIterable(Shifting()), 2, num_workers=2, persistent_workers=True)
    loader = prepare_loader(source, LoaderOptions())
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        assert flat(loader.iterate()) == [100 * epoch + i for i in range(4)]


def test_a_bare_data_set_whose_workers_would_not_hear_of_an_epoch_gives_a_warning() -> None:
    with pytest.warns(TrainwrightWarning, match=r"Shifting\.set_epoch is not called"):
        prepare_loader(DataLoader(Shifting(), num_workers=1, persistent_workers=True), LoaderOptions())


def test_a_block_of_zero_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="block=0"):
        ShardedIterable([1], block=0)


def test_these_tests_run_outside_a_worker() -> None:
    assert get_worker_info() is None
    assert shard_info() == (0, 1)
