"""Overlapping shards are found by sorting: the work is counted, not timed."""

from __future__ import annotations

import itertools
import random

import pytest

from trainwright.checkpoint import Box, Region, Span
from trainwright.checkpoint.format import regions as module
from trainwright.checkpoint.format.regions import overlap
from trainwright.core.errors import CheckpointError

NUM = 20_000


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of all groups that are sorted, and 1 for each comparison of two boxes."""
    done: list[int] = []
    divide, common = module._divide, module._common

    def counted_divide(boxes: list[Box], dim: int) -> list[list[Box]]:
        done.append(len(boxes))
        return divide(boxes, dim)

    def counted_common(one: Box, other: Box) -> Box | None:
        done.append(1)
        return common(one, other)

    monkeypatch.setattr(module, "_divide", counted_divide)
    monkeypatch.setattr(module, "_common", counted_common)
    return done


def columns(num: int) -> list[Region]:
    """Return blocks that lie side by side in the second dimension: each spans all of the first."""
    return [Box((0, index), (4, 1)) for index in range(num)]


LAYOUTS: dict[str, tuple[list[Region], tuple[int, ...]]] = {
    "rows": ([Box((index, 0), (1, 4)) for index in range(NUM)], (NUM, 4)),
    "columns": (columns(NUM), (4, NUM)),
    "grid": ([Box((a, 0, b), (1, 7, 1)) for a in range(100) for b in range(200)], (100, 7, 200)),
    "third": ([Box((0, 0, index), (3, 5, 1)) for index in range(NUM)], (3, 5, NUM)),
    "spans": ([Span(index * 3, index * 3 + 3) for index in range(NUM)], (NUM // 5, 15)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_20000_shards_take_a_few_passes(work: list[int], name: str) -> None:
    regions, shape = LAYOUTS[name]
    order = random.Random(0).sample(range(len(regions)), len(regions))
    assert not overlap([regions[index] for index in order], shape)
    assert sum(work) <= 8 * NUM


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_shard_twice_among_20000_is_found(work: list[int], name: str) -> None:
    regions, shape = LAYOUTS[name]
    assert overlap([*regions, regions[777]], shape)
    assert sum(work) <= 8 * NUM


def test_blocks_that_no_cut_divides_are_told_apart() -> None:
    pinwheel: list[Region] = [
        Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1)),
    ]  # fmt: skip
    assert not overlap(pinwheel, (3, 3))
    assert overlap([*pinwheel, Box((1, 0), (1, 2))], (3, 3))


def test_a_layout_that_would_take_too_long_is_refused() -> None:
    # A lattice of crossing bars: every one shares an index of every dimension with another.
    size = 1500
    bars = [Box((index, 0), (1, size)) for index in range(size)] + [
        Box((0, index), (size, 1)) for index in range(size)
    ]  # fmt: skip
    with pytest.raises(CheckpointError, match="layout that no number of ranks produces"):
        overlap([*bars], (size, size))


def test_the_answer_is_that_of_comparing_all_pairs() -> None:
    numbers = random.Random(3)
    for _ in range(300):
        boxes: list[Region] = []
        for _ in range(numbers.randrange(2, 6)):
            ends = [sorted(numbers.sample(range(5), 2)) for _ in range(2)]
            boxes.append(Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
        expected = any(
            module._common(one, other) is not None  # type: ignore[arg-type]  # all are boxes
            for one, other in itertools.combinations(boxes, 2)
        )
        assert overlap(boxes, (5, 5)) is expected
