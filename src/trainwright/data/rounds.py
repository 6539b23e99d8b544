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
        size: samples of a full batch. None if unknown: batches may then differ in size.
        drop_last: drop an incomplete last round. A round is also incomplete if its last batch is shorter than `size`.
        completes: complete an incomplete last round: with samples of the first round, or with its batches if `size` is
            None. With False the last round may have fewer than `world` batches, and its last batch may be short.
        first: number of batches before the first round that is yielded. Default: 0.
    """
    first_round: list[Sequence[Any]] = []  # the first `world` batches, also if `first` skips them
    current_round: list[Sequence[Any]] = []
    for number, batch in enumerate(batches):
        if len(first_round) < world:
            first_round.append(batch)
        if number < first:
            continue
        if len(current_round) == world:
            # The round ended with a short batch. It is not the last round, because a batch follows: a user's batch
            # sampler yields short batches anywhere.
            yield current_round, _number_of_samples(current_round)
            current_round = []
        current_round.append(batch)
        # A round that ends with a short batch may be the last one, which is completed or dropped below.
        if len(current_round) == world and (size is None or len(batch) == size):
            yield current_round, _number_of_samples(current_round)
            current_round = []
    if drop_last or not current_round:
        return
    num_samples = _number_of_samples(current_round)
    if not completes:
        yield current_round, num_samples
    elif size is None:
        yield completed(current_round, first_round, world), num_samples
    else:
        samples = completed(chain.from_iterable(current_round), chain.from_iterable(first_round), size * world)
        yield [samples[size * index : size * (index + 1)] for index in range(world)], num_samples


def completed(entries: Iterable[Any], repeated: Iterable[Any], size: int) -> list[Any]:
    """Return the first `size` of `entries`, followed as needed by those of `repeated`, over and over again."""
    return list(islice(chain(entries, cycle(repeated)), size))


def real_rows(num_samples: int, batches: Sequence[Sequence[Any]], index: int) -> int:
    """Return how many samples of a process's batch in a round are not repeated.

    Args:
        num_samples: samples of the round that are not repeated.
        batches: the batches of the round.
        index: index of the process.
    """
    # 5 samples completed to three batches of 2, of which the last sample is repeated: the batches have 2, 2 and 1.
    num_of_earlier = _number_of_samples(batches[:index])
    return min(len(batches[index]), max(0, num_samples - num_of_earlier))


def _number_of_samples(batches: Sequence[Sequence[Any]]) -> int:
    return sum(map(len, batches))
