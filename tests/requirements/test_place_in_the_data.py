"""Stopped after any step and resumed, the samples before and after are the uninterrupted list."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.helpers.distributed import run_distributed
from tests.helpers.selection import mostly_exhaustive
from tests.requirements.resumable import BATCH, make_loader, resume_after_every_step

_N = 7  # four steps an epoch on one rank, the last one short; two on two ranks, the last of them uneven
_CASES = [("plain", True), ("stateful", True), ("stream", False)]
_STREAMS = ["stream that keeps its place", "stream read whole"]
_EPOCH = -(-_N // BATCH)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("workers", mostly_exhaustive([0, 2], keep=[0]))
@pytest.mark.parametrize(("kind", "shuffle"), _CASES)
def test_one_rank_goes_on_exactly_after_every_step(kind: str, shuffle: bool, workers: int, tmp_path: Path) -> None:
    # The first epoch, its end, and into the second one.
    whole = resume_after_every_step(
        lambda: make_loader(kind, _N, workers, shuffle=shuffle), tmp_path, range(1, _EPOCH + 3)
    )
    for epoch in (whole.steps[:_EPOCH], whole.steps[_EPOCH:]):
        assert sorted(itertools.chain.from_iterable(epoch)) == list(range(_N))


@pytest.mark.parametrize("workers", mostly_exhaustive([0, 2], keep=[0]))
@pytest.mark.parametrize("kind", _STREAMS)
def test_a_stream_that_keeps_its_own_place_goes_on_exactly_after_every_step(
    kind: str, workers: int, tmp_path: Path
) -> None:
    # One worker ends before the other, and sets its place back.
    whole = resume_after_every_step(lambda: make_loader(kind, 10, workers), tmp_path, range(1, 9))
    assert sorted(itertools.chain.from_iterable(whole.steps)) == sorted([*range(10)] * 2)


@pytest.mark.parametrize("workers", mostly_exhaustive([0, 2], keep=[0, 2]))
def test_the_state_belongs_to_the_last_group_and_not_to_the_batch_fetched_ahead(workers: int, tmp_path: Path) -> None:
    make = lambda: make_loader("stream", 11, workers)  # noqa: E731
    resume_after_every_step(make, tmp_path, range(1, 6), accumulate_grad_batches=2)


def test_an_epoch_ended_by_a_limit_is_followed_by_the_same_epoch_as_without_a_stop(tmp_path: Path) -> None:
    for kind in ("plain", "stream", "own"):
        make = lambda kind=kind: make_loader(kind, 9, 0)  # noqa: E731
        resume_after_every_step(make, tmp_path / kind, range(1, 6), limit_train_batches=3)


def _on_rank(folder: Path, workers: int) -> list[list[list[int]]]:
    return [
        resume_after_every_step(
            lambda kind=kind, shuffle=shuffle: make_loader(kind, _N, workers, shuffle=shuffle),
            folder / f"{kind}-{shuffle}",
            range(1, 4, 2),
        ).steps
        for kind, shuffle in [*_CASES, *((kind, False) for kind in _STREAMS)]
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("workers", mostly_exhaustive([0, 2], keep=[0]))
def test_two_ranks_go_on_exactly_after_every_step(workers: int, tmp_path: Path) -> None:
    for of_ranks in zip(*run_distributed(_on_rank, 2, tmp_path, workers, init=False, timeout=200), strict=True):
        steps = len(of_ranks[0]) // 2
        for epoch in (slice(0, steps), slice(steps, None)):
            assert sorted(i for steps in of_ranks for step in steps[epoch] for i in step) == list(range(_N))
