"""Which indices of a whole a rank holds, when blocks of it are cut over ranks, and what is left over others."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.strategies.shards import _split


def indices(runs: list[tuple[int, int]]) -> list[int]:
    """Return the indices of some runs, in their order."""
    return [start + i for start, length in runs for i in range(length)]


def chunk(values: list[int], num: int, which: int) -> list[int]:
    """Return what torch.chunk gives, and nothing where it gives fewer chunks."""
    chunks = torch.tensor(values, dtype=torch.int64).chunk(num) if values else ()
    return [int(value) for value in chunks[which]] if which < len(chunks) else []


_RANKS = st.integers(1, 4)


@given(st.integers(1, 5), st.integers(1, 3), _RANKS, _RANKS)
def test_what_ranks_hold_of_blocks_is_cut_as_torch_cuts_and_covers_the_whole_once(
    width: int, blocks: int, split: int, shards: int
) -> None:
    size = width * blocks * split  # only what is divisible is split by a plan; shards may be of unequal length
    whole = list(range(size))
    seen: list[int] = []
    for rank in range(split):
        runs = _split([(0, size)], blocks, split, rank)
        expected = [i for block in range(blocks) for i in chunk(chunk(whole, blocks, block), split, rank)]
        assert indices(runs) == expected
        for shard in range(shards):
            held = indices(_split(runs, 1, shards, shard))
            assert held == chunk(expected, shards, shard)
            seen += held
    assert sorted(seen) == whole


@given(st.integers(0, 20), _RANKS)
def test_runs_of_an_uneven_cut_cover_the_whole_once(size: int, ranks: int) -> None:
    assert [i for rank in range(ranks) for i in indices(_split([(0, size)], 1, ranks, rank))] == list(range(size))
