from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from tests.helpers.calls import calls_of
from trainwright.data.sampler import ShardedBatchSampler
from trainwright.data.user_sampler import BatchShard

SIZES = {
    "n": st.integers(0, 200),
    "size": st.integers(1, 9),
    "world": st.integers(1, 5),
    "shuffle": st.booleans(),
    "drop_last": st.booleans(),
    "epoch": st.integers(0, 3),
}


def samplers(n: int, size: int, world: int, shuffle: bool, drop_last: bool, epoch: int) -> list[ShardedBatchSampler]:
    found = [
        ShardedBatchSampler(n, size, shuffle=shuffle, seed=1, drop_last=drop_last, rank=rank, world=world)
        for rank in range(world)
    ]
    for sampler in found:
        sampler.set_epoch(epoch)
    return found


def by_round(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The batches of all ranks in the global order: round by round, rank by rank."""
    return [rank[i] for i in range(max(map(len, ranks), default=0)) for rank in ranks if i < len(rank)]


@given(**SIZES)
@settings(max_examples=50)
def test_the_global_order_does_not_depend_on_the_world_size(
    n: int, size: int, world: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    alone = samplers(n, size, 1, shuffle, drop_last, epoch)[0]
    together = [list(sampler) for sampler in samplers(n, size, world, shuffle, drop_last, epoch)]
    assert by_round(together) == list(alone)


@given(**SIZES)
@settings(max_examples=50)
def test_the_arithmetic_of_rounds_is_what_iterating_gives(
    n: int, size: int, world: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    ranks = samplers(n, size, world, shuffle, drop_last, epoch)
    batches = [list(sampler) for sampler in ranks]
    assert ranks[0].counts() == [len(own) for own in batches] == [len(sampler) for sampler in ranks]
    assert ranks[0].num_rounds == max(map(len, batches))
    for i in range(ranks[0].num_rounds + 1):
        real = [i < len(own) for own in batches]
        assert [sampler.has_batch(i) for sampler in ranks] == real
        assert ranks[0].real_ranks(i) == sum(real)
        assert ranks[0].samples_in_round(i) == sum(len(own[i]) for own in batches if i < len(own))


@given(start=st.integers(0, 60), **SIZES)
@settings(max_examples=50)
def test_starting_at_any_batch_gives_the_rest_of_the_list(
    n: int, size: int, world: int, shuffle: bool, drop_last: bool, epoch: int, start: int
) -> None:
    for sampler in samplers(n, size, world, shuffle, drop_last, epoch):
        whole = list(sampler)
        sampler.start(start)
        assert list(sampler) == whole[start:]


@given(
    n=st.integers(1, 200),
    size=st.integers(1, 6),
    worlds=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    rounds=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    shuffle=st.booleans(),
)
@settings(max_examples=50)
def test_ranks_that_change_in_number_visit_each_sample_once_in_the_same_order(
    n: int, size: int, worlds: list[int], rounds: list[int], shuffle: bool
) -> None:
    whole = list(samplers(n, size, 1, shuffle, False, 2)[0])
    seen: list[list[int]] = []
    place = None
    for world, more in zip(worlds, rounds, strict=False):
        ranks = samplers(n, size, world, shuffle, False, 2)
        for sampler in ranks:
            sampler.set_epoch(2, place)
        first = place["batch"] if place else 0
        seen += by_round([list(sampler)[:more] for sampler in ranks])
        place = ranks[-1].position(first + more)
    assert seen == whole[: len(seen)]
    remaining = samplers(n, size, 3, shuffle, False, 2)
    for sampler in remaining:
        sampler.set_epoch(2, place)
    assert seen + by_round([list(sampler) for sampler in remaining]) == whole


def test_starting_at_batch_a_million_is_immediate() -> None:
    sampler = ShardedBatchSampler(10**9, 512, shuffle=True, seed=0)
    sampler.start(10**6)
    first: list[int] = []
    python, built_in = calls_of(lambda: first.extend(next(iter(sampler))))
    assert len(python) + len(built_in) < 200
    assert first == sampler.order().slice(512 * 10**6, 512 * 10**6 + 512).tolist()


def test_a_running_iteration_does_not_hear_of_the_next_epoch() -> None:
    sampler = ShardedBatchSampler(30_000, 4, shuffle=True, seed=0)
    expected = list(sampler)
    running = iter(sampler)
    begun = [next(running)]
    sampler.set_epoch(1)
    assert begun + list(running) == expected


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_users_batches_are_dealt_as_they_are(world: int) -> None:
    whole = [[i, i] for i in range(10)]
    ranks = [list(BatchShard(whole, rank=rank, world=world)) for rank in range(world)]
    assert by_round(ranks) == whole
    assert BatchShard(whole, rank=0, world=world).counts() == [len(own) for own in ranks]
    resumed = BatchShard(BatchSampler(range(20), 5, drop_last=False))
    resumed.set_epoch(0, {"batch": 6, "samples": 10})
    assert list(resumed) == [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]
    assert resumed.first() == [0, 1, 2, 3, 4]


@given(n=st.integers(1, 60), size=st.integers(1, 7), world=st.integers(1, 4), drop_last=st.booleans())
@settings(max_examples=50)
def test_samples_are_counted_for_torchs_own_batch_sampler(n: int, size: int, world: int, drop_last: bool) -> None:
    def shard(rank: int) -> BatchShard:
        return BatchShard(BatchSampler(SequentialSampler(range(n)), size, drop_last), rank=rank, world=world)

    ranks = [list(shard(rank)) for rank in range(world)]
    for i in range((shard(0).num_rounds or 0) + 1):
        assert shard(0).samples_in_round(i) == sum(len(own[i]) for own in ranks if i < len(own))


def test_a_users_random_sampler_draws_the_same_on_every_rank_and_leaves_the_generators_alone() -> None:
    def shard(rank: int) -> BatchShard:
        random_sampler = RandomSampler(range(40), replacement=True)
        found = BatchShard(BatchSampler(random_sampler, 5, False), rank=rank, world=2, seed=3)
        found.set_epoch(1)
        return found

    before = torch.get_rng_state(), random.getstate()
    first = list(shard(0))
    torch.manual_seed(123)
    assert list(shard(0)) == first
    assert list(shard(1)) != first
    torch.set_rng_state(before[0])
    list(shard(0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Shuffling:
    """Batches in an order of its own generator."""

    def __init__(self, generator: Any) -> None:
        self.rng = generator

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(24))
        if isinstance(self.rng, torch.Generator):
            order = torch.randperm(24, generator=self.rng).tolist()
        else:
            self.rng.shuffle(order)
        return (order[i : i + 2] for i in range(0, 24, 2))


@pytest.mark.parametrize(
    "make",
    [np.random.default_rng, np.random.RandomState, random.Random, torch.Generator],
    ids=["numpy", "legacy numpy", "python", "torch"],
)
def test_a_samplers_own_generator_draws_the_same_for_a_resume_and_on_every_rank(make: Any) -> None:
    def shard(rank: int = 0, world: int = 1) -> BatchShard:
        return BatchShard(Shuffling(make()), rank=rank, world=world, seed=3)  # unseeded: another one in each process

    uninterrupted, resumed = shard(), shard()
    first = list(uninterrupted)
    for dealer in (uninterrupted, resumed):
        dealer.set_epoch(1)
    resumed.start(5)
    second = list(uninterrupted)
    assert first != second
    assert list(resumed) == second[5:]
    assert resumed.indices_in(7) == second[7]
    ranks = [shard(rank, 2) for rank in range(2)]
    assert by_round([list(dealer) for dealer in ranks]) == first
    assert shard().order_needs_seed


@pytest.mark.parametrize("ahead", [0, 5, 20])
def test_looking_up_a_batchs_indices_does_not_disturb_an_iteration_that_is_ahead(ahead: int) -> None:
    def dealer() -> BatchShard:
        generator = torch.Generator().manual_seed(1)
        sampler = RandomSampler(range(100), replacement=True, generator=generator)
        return BatchShard(BatchSampler(sampler, 1, drop_last=False), rank=1, world=2, seed=3)

    expected, disturbed = list(dealer()), dealer()
    batches = iter(disturbed)
    seen = [next(batches) for _ in range(ahead)]
    assert disturbed.indices_in(3) == expected[3]
    assert [*seen, *batches] == expected
