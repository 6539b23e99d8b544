"""Accelerate's order of data on several processes: the last round is completed with samples from the beginning.

A round is one batch of each process. Consecutive batches belong to consecutive processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any


def rounds_of_batches(
    batches: Iterable[Sequence[Any]], world: int, size: int | None, *, drop_last: bool, completes: bool, first: int = 0
) -> Iterator[tuple[list[Sequence[Any]], int]]:
    """Yield the batches of each round, and the number of samples in the round that are not repeated.

    Args:
        batches: lists of samples.
        world: number of processes.
        size: samples of a full batch. None: unknown. Batches may then differ in size.
        drop_last: drop an incomplete last round.
        completes: complete an incomplete last round: with samples of the first round, or with its batches if `size` is
            None. False: the last round may have fewer than `world` batches, and its last batch may be short.
        first: number of batches before the first round that is yielded. Default: 0.
    """
    beginning: list[Sequence[Any]] = []  # the first `world` batches
    present: list[Sequence[Any]] = []  # of the present round
    for number, batch in enumerate(batches):
        if len(beginning) < world:
            beginning.append(batch)
        if number < first:
            continue
        if len(present) == world:  # a batch sampler of the user had a short batch here
            yield present, _number_of_samples(present)
            present = []
        present.append(batch)
        if len(present) == world and (size is None or len(batch) == size):
            yield present, _number_of_samples(present)
            present = []
    if drop_last or not present:
        return
    num_samples = _number_of_samples(present)
    if not completes:
        yield present, num_samples
    elif size is None:
        yield completed(present, beginning, world), num_samples
    else:
        samples = completed(chain.from_iterable(present), chain.from_iterable(beginning), size * world)
        yield [samples[size * index : size * (index + 1)] for index in range(world)], num_samples


def completed(found: Iterable[Any], first: Iterable[Any], size: int) -> list[Any]:
    """Return `size` entries: those of `found`, then those of `first`, which are repeated as often as needed."""
    return list(islice(chain(found, cycle(first)), size))


def real_rows(num_samples: int, batches: Sequence[Sequence[Any]], index: int) -> int:
    """Return how many samples of a process's batch in a round are not repeated.

    Args:
        num_samples: samples of the round that are not repeated.
        batches: the batches of the round.
        index: index of the process.
    """
    before = sum(map(len, batches[:index]))
    return min(len(batches[index]), max(0, num_samples - before))


def _number_of_samples(batches: Sequence[Sequence[Any]]) -> int:
    return sum(map(len, batches))
