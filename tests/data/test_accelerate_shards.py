"""Accelerate's samplers, shards and skipping loaders: the index lists are those of Accelerate 1.15."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from tests.data.sources import SizedStream
from trainwright import Accelerator, DataLoaderConfiguration, skip_first_batches
from trainwright.core.errors import ConfigurationError
from trainwright.data_loader import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler, SkipDataLoader

Batches = list[list[int]]


class Drawn(IterableDataset[int]):
    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(10, generator=self.generator).tolist())


def batches_of(n: int, size: int, drop_last: bool) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(n)), size, drop_last)


def numbers(loader: DataLoader[Any]) -> Batches:
    return [batch.tolist() for batch in loader]


def rounds(n: int, size: int, first: int) -> Batches:
    """Every other batch of `range(n)`."""
    return [list(range(i, i + size)) for i in range(first * size, n, 2 * size)]


EVEN_24 = [rounds(24, 3, 0), rounds(24, 3, 1)]
EVEN_18 = [rounds(18, 3, 0), rounds(18, 3, 1)]
SPLIT_24 = [rounds(24, 2, 0), rounds(24, 2, 1)]
SPLIT_20 = [rounds(20, 2, 0), rounds(20, 2, 1)]
NOTHING: list[Batches] = [[], []]
EVEN, SPLIT, UNEVEN, UNEVEN_SPLIT = (False, True), (True, True), (False, False), (True, False)

# (split_batches, even_batches), samples, batch size, drop_last → the batches of both processes
SHARDS: list[tuple[tuple[bool, bool], int, int, bool, list[Batches]]] = [
    *[(mode, 24, 3, drop, EVEN_24) for mode in (EVEN, UNEVEN) for drop in (False, True)],
    *[(mode, n, 3, True, EVEN_18) for mode in (EVEN, UNEVEN) for n in (18, 20, 21, 22)],
    (EVEN, 21, 3, False, [EVEN_24[0], [*EVEN_18[1], [0, 1, 2]]]),
    (EVEN, 22, 3, False, [EVEN_24[0], [*EVEN_18[1], [21, 0, 1]]]),
    (EVEN, 20, 3, False, [[*EVEN_18[0], [18, 19, 0]], [*EVEN_18[1], [1, 2, 3]]]),
    (EVEN, 2, 3, False, [[[0, 1, 0]], [[1, 0, 1]]]),
    (UNEVEN, 21, 3, False, [EVEN_24[0], EVEN_18[1]]),
    (UNEVEN, 22, 3, False, [EVEN_24[0], [*EVEN_18[1], [21]]]),
    (UNEVEN, 20, 3, False, [[*EVEN_18[0], [18, 19]], EVEN_18[1]]),
    (UNEVEN, 2, 3, False, [[[0, 1]], []]),
    *[(mode, 24, 4, drop, SPLIT_24) for mode in (SPLIT, UNEVEN_SPLIT) for drop in (False, True)],
    *[(mode, n, 4, True, SPLIT_20) for mode in (SPLIT, UNEVEN_SPLIT) for n in (20, 21, 22)],
    (SPLIT, 22, 4, False, [SPLIT_24[0], [*SPLIT_20[1], [0, 1]]]),
    (SPLIT, 21, 4, False, [[*SPLIT_20[0], [20, 0]], [*SPLIT_20[1], [1, 2]]]),
    (SPLIT, 2, 4, False, [[[0, 1]], [[0, 1]]]),
    (SPLIT, 3, 4, False, [[[0, 1]], [[2, 0]]]),
    (UNEVEN_SPLIT, 22, 4, False, [SPLIT_24[0], SPLIT_20[1]]),
    (UNEVEN_SPLIT, 21, 4, False, [[*SPLIT_20[0], [20]], SPLIT_20[1]]),
    (UNEVEN_SPLIT, 2, 4, False, [[[0, 1]], []]),
    *[(mode, 2, 4, True, NOTHING) for mode in (EVEN, SPLIT, UNEVEN, UNEVEN_SPLIT)],
    *[(mode, 0, 4, False, NOTHING) for mode in (EVEN, SPLIT, UNEVEN, UNEVEN_SPLIT)],
]


@pytest.mark.parametrize(("mode", "n", "size", "drop_last", "expected"), SHARDS)
def test_a_batch_sampler_is_divided_over_two_processes(
    mode: tuple[bool, bool], n: int, size: int, drop_last: bool, expected: list[Batches]
) -> None:
    shards = [BatchSamplerShard(batches_of(n, size, drop_last), 2, i, *mode) for i in range(2)]
    assert [list(shard) for shard in shards] == expected
    if mode != UNEVEN_SPLIT:
        assert [len(shard) for shard in shards] == [len(batches) for batches in expected]
    assert shards[0].total_length == len(batches_of(n, size, drop_last))


@pytest.mark.parametrize(
    ("even_batches", "last"), [(True, [[12, 13], [0, 1, 2]]), (False, [[12, 13]])], ids=["even", "uneven"]
)
def test_batches_of_a_list_may_differ_in_size(even_batches: bool, last: Batches) -> None:
    batches = [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10, 11], [12, 13]]
    shards = [BatchSamplerShard(batches, 2, i, even_batches=even_batches) for i in range(2)]
    assert list(shards[0]) == [[0, 1, 2], [5, 6, 7, 8], [12, 13]]
    assert list(shards[1]) == [[3, 4], [9, 10, 11], *last[1:]]
    assert [len(shard) for shard in shards] == [3, 2 + even_batches]


# split_batches, samples, drop_last → the samples of both processes, with a batch size of 4
ITERABLE: list[tuple[bool, int, bool, list[list[int]]]] = [
    *[(False, 16, drop, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]) for drop in (False, True)],
    (False, 10, False, [[0, 1, 2, 3, 8, 9, 0, 1], [4, 5, 6, 7, 2, 3, 4, 5]]),
    (False, 10, True, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    (False, 3, False, [[0, 1, 2, 0], [1, 2, 0, 1]]),
    (False, 3, True, [[], []]),
    (False, 0, False, [[], []]),
    *[(True, 8, drop, [[0, 1, 4, 5], [2, 3, 6, 7]]) for drop in (False, True)],
    (True, 9, False, [[0, 1, 4, 5, 8, 0], [2, 3, 6, 7, 1, 2]]),
    (True, 9, True, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    (True, 1, False, [[0, 0], [0, 0]]),
    (True, 1, True, [[], []]),
]


@pytest.mark.parametrize(("split", "n", "drop_last", "expected"), ITERABLE)
def test_an_iterable_is_divided_over_two_processes(
    split: bool, n: int, drop_last: bool, expected: list[list[int]]
) -> None:
    shards = [IterableDatasetShard(SizedStream(n), 4, drop_last, 2, i, split) for i in range(2)]
    assert [list(iter(shard)) for shard in shards] == expected
    assert [len(shard) for shard in shards] == [len(samples) for samples in expected]


def test_the_epoch_of_an_iterable_shard_seeds_its_generator() -> None:
    shards = [IterableDatasetShard(Drawn(), 5, num_processes=2, process_index=i) for i in range(2)]

    def drawn(epoch: int) -> list[int]:
        for shard in shards:
            shard.set_epoch(epoch)
        return [i for shard in shards for i in shard]

    assert sorted(drawn(0)) == list(range(10))
    assert drawn(1) != drawn(0) == drawn(0)


@pytest.mark.parametrize(("skipped", "expected"), [(0, [[0, 1, 2], [3, 4]]), (1, [[3, 4]]), (2, []), (3, [])])
def test_batches_of_a_sampler_are_skipped(skipped: int, expected: Batches) -> None:
    sampler = SkipBatchSampler(batches_of(5, 3, False), skipped)
    assert list(sampler) == list(sampler) == expected
    assert (len(sampler), sampler.total_length, sampler.batch_size) == (len(expected), 2, 3)
    copied = pickle.loads(pickle.dumps(sampler))
    assert list(copied) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("data", "workers"), [(torch.arange(10), 1), (SizedStream(10), 0)])
def test_a_loader_skips_batches_in_every_pass(data: Any, workers: int) -> None:
    expected = [[4, 5], [6, 7], [8, 9]]
    loader: DataLoader[Any] = DataLoader(data, batch_size=2, num_workers=workers)
    for rest in (SkipDataLoader(data, 2, batch_size=2, num_workers=workers), skip_first_batches(loader, 2)):
        assert numbers(rest) == numbers(rest) == expected
        assert len(rest) == 3
        assert numbers(skip_first_batches(rest, 1)) == expected[1:]
        assert len(skip_first_batches(rest, 9)) == 0
        assert numbers(skip_first_batches(rest, 9)) == []
    assert len(numbers(loader)) == 5


def test_a_loader_configuration_sets_the_seed_and_accepts_what_is_always_on() -> None:
    def order(**arguments: Any) -> Batches:
        loader: DataLoader[Any] = DataLoader(torch.arange(8), batch_size=4, shuffle=True)  # type: ignore[arg-type]
        return numbers(Accelerator(cpu=True, **arguments).prepare(loader))

    always = DataLoaderConfiguration(
        split_batches=True,
        dispatch_batches=False,
        use_seedable_sampler=True,
        data_seed=7,
        non_blocking=True,
        use_stateful_dataloader=True,
    )
    assert order(dataloader_config=always) == order(seed=7) == order(seed=7, dataloader_config=always)
    assert order(seed=7, dataloader_config=DataLoaderConfiguration()) == order(seed=7) != order(seed=8)
    assert Accelerator(cpu=True, dataloader_config=always).split_batches


def test_what_cannot_be_skipped_is_refused() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    with pytest.raises(ConfigurationError, match="num_batches=-1: expected a whole number"):
        skip_first_batches(DataLoader(torch.arange(4)), -1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="num_batches=True: expected a whole number"):
        skip_first_batches(DataLoader(torch.arange(4)), True)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="needs a DataLoader, not a list"):
        skip_first_batches([1, 2], 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Own has its own __iter__"):
        skip_first_batches(Own(SizedStream(4)), 1)
