from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.data.sources import Numbers, Resumable, on_ranks, prepared
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.state import Group
from trainwright.data import iterate_groups, resolve_limit

N, SIZE, WORLD, ACCUMULATE = st.integers(1, 60), st.integers(1, 7), st.integers(1, 4), st.integers(1, 5)


def groups_of(n: int, size: int, world: int, accumulate: int, **more: Any) -> list[list[Group]]:
    loaders = [prepared(DataLoader(Numbers(n), size, shuffle=True), rank=r, world=world) for r in range(world)]
    return [list(iterate_groups(loader, accumulate=accumulate, **more)) for loader in loaders]


@given(n=N, size=SIZE, world=WORLD, accumulate=ACCUMULATE)
@settings(max_examples=40)
def test_each_group_weighs_its_real_micro_batches_alike_over_all_ranks(
    n: int, size: int, world: int, accumulate: int
) -> None:
    for together in zip(*groups_of(n, size, world, accumulate), strict=True):
        weights = [group.weights or [1 / len(group.batches)] * len(group.batches) for group in together]
        real = [w for rank in weights for w in rank if w > 0]
        assert real == pytest.approx([world / len(real)] * len(real))


@given(n=N, size=SIZE, world=WORLD, accumulate=ACCUMULATE)
@settings(max_examples=40)
def test_ranks_do_equal_rounds_and_real_micro_batches_are_each_sample_once(
    n: int, size: int, world: int, accumulate: int
) -> None:
    ranks = groups_of(n, size, world, accumulate)
    shapes = [[(g.first_idx, len(g.batches), g.is_last, g.num_samples) for g in rank] for rank in ranks]
    assert shapes == [shapes[0]] * world
    seen = [
        number
        for rank in ranks
        for group in rank
        for batch, weight in zip(group.batches, group.weights or itertools.repeat(1.0), strict=False)
        if weight
        for number in batch.tolist()
    ]
    assert sorted(seen) == list(range(n))
    assert sum(group.num_samples or 0 for group in ranks[0]) == n


@given(n=st.integers(1, 20), accumulate=ACCUMULATE, limit=st.none() | st.integers(1, 25), start=st.integers(0, 4))
@settings(max_examples=50)
def test_a_loader_without_length_gives_the_groups_of_one_with(
    n: int, accumulate: int, limit: int | None, start: int
) -> None:
    start = min(start, n - 1, (limit or n) - 1)
    sized = prepared(list(range(n)))
    unsized = prepared(Resumable(n))
    if start:
        earlier = prepared(Resumable(n))
        list(itertools.islice(earlier.iterate(), start))
        unsized.load_state_dict(earlier.state_dict())
    kwargs: dict[str, Any] = {"accumulate": accumulate, "limit": limit, "start_batch": start}
    assert list(map(shape, iterate_groups(unsized, **kwargs))) == list(map(shape, iterate_groups(sized, **kwargs)))


def shape(group: Group) -> tuple[Any, ...]:
    return group.batches, group.first_idx, group.is_last, group.weights


def test_a_limit_on_a_loader_without_length_needs_no_batch_ahead() -> None:
    fetched: list[int] = []

    class Source:
        def __iter__(self) -> Iterator[int]:
            for i in range(100):
                fetched.append(i)
                yield i

    groups = list(iterate_groups(prepared(Source()), accumulate=2, limit=5))
    assert [group.is_last for group in groups] == [False, False, True]
    assert fetched == [0, 1, 2, 3, 4]


def test_a_loader_shorter_than_it_says_ends_with_a_warning_on_one_rank() -> None:
    class Liar:
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.warns(TrainwrightWarning, match="ended after 3 of the 5 batches"):
        groups = list(iterate_groups(prepared(Liar()), accumulate=2))
    assert [group.batches for group in groups] == [[0, 1], [2]]
    assert groups[-1].is_last
    with pytest.warns(TrainwrightWarning, match="ended after 3 of the 5 batches"):
        assert [group.batches for group in iterate_groups(prepared(Liar()))] == [[0], [1], [2]]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loader_with_a_state_and_a_length_begins_each_epoch_anew(accumulate: int) -> None:
    loader = prepared(type("Sized", (Resumable,), {"__len__": lambda self: self.n})(5))
    for _ in range(2):
        groups = iterate_groups(loader, accumulate=accumulate)
        assert [batch for group in groups for batch in group.batches] == [0, 1, 2, 3, 4]


# Ranks that cannot count


def agreed(counts: list[int], accumulate: int, make: Any = int, **more: Any) -> list[list[Group]]:
    def work(rank: int, agree: Any) -> list[Group]:
        loader = prepared(
            (make(i) for i in range(counts[rank])),
            rank=rank,
            world=len(counts),
            use_distributed_sampler=False,
            agree=agree,
        )
        return list(iterate_groups(loader, accumulate=accumulate, **more))

    return on_ranks(len(counts), work)


def test_the_weights_of_agreed_groups_are_the_mean_over_real_micro_batches() -> None:
    three, five = agreed([3, 5], 2)
    assert [group.weights for group in three] == [None, [2 / 3, 0.0], [0.0]]
    assert [group.weights for group in five] == [None, [2 / 3, 2 / 3], [2.0]]


def test_ranks_without_length_stop_with_the_shortest() -> None:
    for rank in agreed([3, 5], 2, uneven="stop"):
        assert [group.batches for group in rank] == [[0, 1], [2]]
        assert [(group.is_last, group.weights) for group in rank] == [(False, None), (True, None)]


def test_ranks_without_length_are_refused_when_told_to() -> None:
    with pytest.raises(ConfigurationError, match=r"different numbers of batches, \[3, 4\]"):
        agreed([3, 5], 1, uneven="error")


# Limits


@pytest.mark.parametrize(
    ("limit", "batches", "expected"),
    [
        (0.2, 64, 12),
        (0.0, 64, 0),
        (1, 64, 1),
        (100, 64, 64),
        (float("inf"), 64, 64),
        (None, 64, 64),
        (10, None, 10),
        (10.0, None, 10),
        (float("inf"), None, None),
        (1.0, None, None),
        (None, None, None),
    ],
)
def test_a_limit_is_a_fraction_up_to_one_and_a_number_above(
    limit: int | float | None, batches: int | None, expected: int | None
) -> None:
    assert resolve_limit(limit, batches, "limit_train_batches") == expected


@given(counts=st.lists(st.integers(1, 7), min_size=2, max_size=3), accumulate=ACCUMULATE, steps=st.integers(0, 5))
@settings(max_examples=40)
def test_ranks_of_uneven_streams_go_on_where_each_of_them_stood(counts: list[int], accumulate: int, steps: int) -> None:
    def work(rank: int, agree: Any) -> tuple[list[Any], list[Any]]:
        def loader() -> Any:
            settings = {"rank": rank, "world": len(counts), "use_distributed_sampler": False, "agree": agree}
            return prepared(Resumable(counts[rank]), **settings)

        def real(groups: Any) -> list[Any]:
            weighed = ((g.batches, g.weights or [1.0] * len(g.batches)) for g in groups)
            return [[b for b, weight in zip(*pair, strict=True) if weight] for pair in weighed]

        begun = loader()
        groups = iterate_groups(begun, accumulate=accumulate)
        before = real(itertools.islice(groups, steps))
        state = begun.state_dict()
        whole = before + real(groups)
        if len(before) == len(whole):
            return whole, whole
        resumed = loader()
        resumed.load_state_dict(state)
        start = len(before) * accumulate
        return whole, before + real(iterate_groups(resumed, accumulate=accumulate, start_batch=start))

    for whole, resumed in on_ranks(len(counts), work):
        assert resumed == whole


@pytest.mark.parametrize("limit", [-1, -0.5, float("nan"), True, "3", 2.5])
def test_a_limit_that_means_nothing_is_refused_by_name(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match="limit_val_batches="):
        resolve_limit(limit, 10, "limit_val_batches")
