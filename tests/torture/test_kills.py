"""Trainings that are killed again and again, and go on from their last checkpoint each time."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.torture.runs import (
    EPOCHS,
    SAMPLES,
    SAVE_EVERY,
    STEPS_PER_EPOCH,
    Attempt,
    Case,
    Kill,
    lines_of,
    preload,
    run_attempt,
)
from trainwright.checkpoint import newest_valid, read_checkpoint
from trainwright.checkpoint.format.manifests import read_manifest

pytestmark = [pytest.mark.exhaustive, pytest.mark.distributed]


@dataclass(frozen=True)
class Whole:
    """The run without an interruption."""

    steps: list[list[str]]  # for each rank: samples and loss of every micro-batch
    ids: list[list[int]]  # for each rank: the samples in the order of their use
    weights: list[str]  # the hash of the final ones
    seconds: float
    write_points: int  # of two saves, with their entries in the index, links and deletions


def whole_run(case: Case, folder: Path) -> Whole:
    folder.mkdir()
    attempt = Attempt(folder, 0)
    begun_s = time.monotonic()
    assert not run_attempt(case, attempt, folder / "checkpoints", resume=False)
    seconds = time.monotonic() - begun_s
    steps = [lines_of(attempt.steps(rank)) for rank in range(case.world)]
    assert [len(of_rank) for of_rank in steps] == [EPOCHS * STEPS_PER_EPOCH * case.accumulate] * case.world
    ids = [[i for line in of_rank for i in ids_in(line)] for of_rank in steps]
    per_epoch = SAMPLES // case.world
    for epoch in range(EPOCHS):
        of_epoch = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        parts = [of_rank[of_epoch] for of_rank in ids]
        assert sorted(itertools.chain(*parts)) == list(range(SAMPLES))
    saves = EPOCHS * STEPS_PER_EPOCH // SAVE_EVERY
    write_points = math.ceil(2 * len(lines_of(attempt.write_points)) / saves)
    return Whole(steps, ids, lines_of(attempt.weights), seconds, write_points)


def ids_in(line: str) -> list[int]:
    return [int(number) for number in line[1 : line.index("]")].split(",")]


def saved_step(checkpoints: Path) -> int | None:
    """Return the step of the newest valid checkpoint; that one is damaged is a warning, and an error here."""
    newest = newest_valid(checkpoints)
    return None if newest is None else read_manifest(newest).step


def check_attempt(case: Case, whole: Whole, attempt: Attempt, start: int) -> int:
    """Check that an attempt did what the whole run did from step `start` on; returns the steps that it completed."""
    begin = start * case.accumulate
    for rank in range(case.world):
        noted = lines_of(attempt.steps(rank))
        assert noted == whole.steps[rank][begin : begin + len(noted)], (case, attempt)
        used = [i for line in noted for i in ids_in(line)]
        left = whole.ids[rank][begin * SAMPLES // STEPS_PER_EPOCH // case.world // case.accumulate :]
        fetched = [int(line) for line in lines_of(attempt.fetched(rank))]
        assert Counter(used) <= Counter(fetched) <= Counter(left), (case, attempt)
        if case.workers == 0:
            assert fetched == left[: len(fetched)], (case, attempt)
    begun = len(lines_of(attempt.steps(0)))
    return start + max(0, begun - 1) // case.accumulate


def survive(case: Case, folder: Path, kills: Sequence[Kill], whole: Whole) -> int:
    """Train to the end as often as it takes to be killed by every one of `kills`; returns how many of them hit."""
    left = list(kills)
    hits = 0
    for number in itertools.count():
        hits += one_training(case, folder / f"training-{number}", left, whole)
        if not left:
            return hits
    raise AssertionError("unreachable")


def one_training(case: Case, folder: Path, kills: list[Kill], whole: Whole) -> int:
    """Resume a training after each kill until it ends, and compare with the whole run; uses up `kills`."""
    folder.mkdir()
    checkpoints = folder / "checkpoints"
    hits = 0
    for number in itertools.count():
        attempt = Attempt(folder, number)
        before = saved_step(checkpoints)
        kill = kills.pop(0) if kills else None
        killed = run_attempt(case, attempt, checkpoints, resume=before is not None, kill=kill)
        completed = check_attempt(case, whole, attempt, before or 0)
        after = saved_step(checkpoints)
        assert (after or 0) >= (before or 0), (case, attempt)
        # The save of a step waits until the one before it is published, so that no more than two can be missing.
        assert (after or 0) >= completed // SAVE_EVERY * SAVE_EVERY - SAVE_EVERY, (case, attempt)
        hits += killed
        if not killed:
            break
    assert after == EPOCHS * STEPS_PER_EPOCH
    assert lines_of(attempt.weights) == whole.weights
    newest = {f"step={after}"}
    if case.keep == "newest" and not lines_of(attempt.steps(0)):
        # Without a further save nothing is deleted; the next one would take what the last save was to replace.
        (state,) = read_checkpoint(checkpoints / f"step={after}").trainer["callbacks"].values()
        newest |= set(state["replaced"]) & {path.name for path in checkpoints.iterdir()}
    left = {path.name for path in checkpoints.iterdir()} - {".index.json", "last"}
    all_of_them = {f"step={step}" for step in range(SAVE_EVERY, EPOCHS * STEPS_PER_EPOCH + 1, SAVE_EVERY)}
    assert left == {"newest": newest, "all": all_of_them, "replaced": set()}[case.keep]
    return hits


def at_write_points(source: random.Random, points: range) -> list[Kill]:
    """Return a kill at each of `points` of an attempt, in any order: so each meets what others have left."""
    return [Kill(at_event=at) for at in source.sample(points, len(points))]


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> None:
    preload()


_SHORT = [
    Case(),
    Case(keep="all", accumulate=2),
    Case(keep="replaced", workers=2),
    Case(keep="replaced", async_save=False),
    Case(world=2),
    Case(world=2, strategy="fsdp"),
    Case(world=2, strategy="fsdp", keep="replaced", async_save=False),
]


@pytest.mark.parametrize("case", _SHORT, ids=str)
def test_a_training_survives_some_kills(case: Case, tmp_path: Path) -> None:
    source = random.Random(f"short {case}")
    whole = whole_run(case, tmp_path / "whole")
    number = 8 // case.world
    kills = [Kill(at_event=at) for at in source.sample(range(whole.write_points), number)]
    kills += [Kill.at_random(source, whole.seconds, case.world) for _ in range(number)]
    if case.strategy == "fsdp":  # every rank writes; the other one has fewer points
        kills += [Kill(at_event=source.randrange(whole.write_points // 4), ranks=(1,)) for _ in range(number // 2)]
    source.shuffle(kills)
    assert survive(case, tmp_path, kills, whole) >= number // 2


@pytest.mark.torture
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(keep="all", accumulate=2),
        Case(keep="replaced"),
        Case(keep="replaced", async_save=False),
        Case(async_save=False),
    ],
    ids=str,
)
def test_a_training_survives_a_kill_at_every_write_point(case: Case, tmp_path: Path) -> None:
    source = random.Random(f"every point {case}")
    whole = whole_run(case, tmp_path / "whole")
    kills = at_write_points(source, range(whole.write_points))
    assert len(kills) > 60
    assert survive(case, tmp_path, kills, whole) >= len(kills) * 3 // 4
