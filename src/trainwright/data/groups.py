"""Split a loader's batches into groups: the micro-batches of one optimizer step, with their weights.

A group's gradient is the mean over the group's real micro-batches on all ranks. Ranks average their gradients. A real
micro-batch therefore has weight `world / (real micro-batches of all ranks in the group)`, and padding has weight 0.
Without padding and with equal numbers on all ranks, the weights are None: each micro-batch has weight `1 /
len(batches)`.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.state import Group
from trainwright.core.tree import copy_containers
from trainwright.data.loader_options import Agree, Uneven
from trainwright.data.prepared import PreparedLoader, uneven_error

_END: Any = object()


def resolve_limit(limit: int | float | None, num_batches: int | None, name: str) -> int | None:
    """Return the number of batches of an epoch that a limit allows; None if unknown.

    Args:
        limit: maximum number of batches (an int), or a fraction of the epoch (a float up to 1.0), rounded down. A float
            above 1.0 is a number of batches. None and infinity mean no limit.
        num_batches: number of batches of the epoch; None if unknown.
        name: name of the argument for messages, such as "limit_train_batches".

    Raises:
        ConfigurationError: the limit is negative or not a number; a float above 1.0 is not an integer; a fraction other
            than 0.0 and 1.0 is requested of a loader without length; or a fraction above 0.0 gives less than one batch.
    """
    if limit is None:
        return num_batches
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit >= 0:
        raise ConfigurationError(
            f"{name}={limit!r}: expected an int ≥ 0 (batches), a float from 0.0 to 1.0 (a fraction), or None (all)."
        )
    if isinstance(limit, int):
        return limit if num_batches is None else min(limit, num_batches)
    if limit > 1.0:
        if not limit.is_integer() and limit != float("inf"):
            raise ConfigurationError(
                f"{name}={limit!r}: a fraction is at most 1.0, and a number of batches is an integer."
            )
        if num_batches is not None and limit >= num_batches:
            return num_batches
        return None if limit == float("inf") else int(limit)
    if limit == 0.0:
        return 0
    if num_batches is None:
        if limit == 1.0:
            return None
        raise ConfigurationError(
            f"{name}={limit!r} is a fraction of an epoch, but the loader has no length. Pass an int, or 1.0 for all."
        )
    batches = int(limit * num_batches)
    if batches == 0 and num_batches > 0:
        # The smallest fraction that gives one batch, rounded up to a few digits: 0.334 (334 / 1000) for 3 batches.
        scale = 100 * 10 ** len(str(num_batches))
        least = math.ceil(scale / num_batches) / scale
        raise ConfigurationError(
            f"{name}={limit!r} of {num_batches} batches is less than one. Use at least {least:g}, or a number of "
            "batches such as 1; 0 skips all of them."
        )
    return batches


def iterate_groups(
    loader: PreparedLoader,
    *,
    accumulate: int = 1,
    limit: int | None = None,
    start_batch: int = 0,
    rank: int | None = None,
    world: int | None = None,
    uneven: Uneven | None = None,
    agree: Agree | None = None,
) -> Iterator[Group]:
    """Return an iterator over the groups of the loader's current epoch.

    `is_last` is True exactly for the last group, unless a loader on one rank ends before its declared length. For this,
    one batch is fetched ahead if the number of batches is unknown. When the next group is requested, the iterator
    releases the batches of the earlier group.

    Args:
        loader: the prepared loader, after `set_epoch`. With several ranks, its `options.in_lockstep` must be True.
        accumulate: micro-batches of one rank in a group. The last group may have fewer. Default: 1.
        limit: maximum number of batches of one rank, counted from the epoch's start. Default: None, no limit.
        start_batch: this rank's first batch in this epoch. Default: 0.
        rank: Accepted without effect: the loader is prepared for its rank. Default: None.
        world, uneven, agree: replace the loader's options if it has no length; see `LoaderOptions`. Default: None.

    If several ranks read a loader without length, every rank must iterate, and each group calls `agree` once, unless
    `ends_together` is set. Otherwise only the loader's own iterator communicates; see `PreparedLoader.iterate`.

    Raises:
        ConfigurationError: `accumulate` is less than 1, the loader is empty or ends before its declared length while
            other ranks continue, ranks are uneven with the policy "error", a rank needs padding and never had a batch,
            or `agree` is needed but missing.

    Warns:
        TrainwrightWarning: on one rank, the loader ends before its declared length.
    """
    if accumulate < 1:
        raise ConfigurationError(f"accumulate={accumulate} is not at least 1.")
    options = loader.options
    rounds = loader.num_batches
    if rounds is not None:
        return _counted(loader, accumulate, rounds if limit is None else min(limit, rounds), start_batch)
    world = options.world if world is None else world
    if world == 1 or loader.ends_together:
        return _looking_ahead(loader, accumulate, limit, start_batch)
    agree = agree or options.agree
    if agree is None:
        raise ConfigurationError(
            f"{options.title} has no length, so {world} ranks must agree where it ends: pass agree=."
        )
    agreement = _Agreement(world, uneven or options.uneven, agree)
    return _agreeing(loader, accumulate, limit, start_batch, agreement)


def _counted(loader: PreparedLoader, accumulate: int, rounds: int, start_batch: int) -> Iterator[Group]:
    """Yield the groups of a loader whose number of rounds is known."""
    if start_batch >= rounds:
        return
    batches = loader.iterate(start_batch)
    first = start_batch
    if accumulate == 1:
        # Rounds in which every rank has a full batch need no weights and have equal numbers of samples. The last round
        # with real batches of all ranks is excluded, because its batches may be short.
        num_equal_rounds = min(rounds, loader.num_full_rounds) - 1
        samples = loader.samples_in_round(first)
        draw = batches.__next__
        last = rounds - 1
        try:
            while first < num_equal_rounds:
                # The group is not stored: its batch is freed when the loop drops it, before the next one is drawn.
                yield Group([draw()], first, False, samples)
                first += 1
            while first <= last:
                group = _group(loader, [draw()], first, first + 1, is_last=first == last)
                if group.is_last:
                    _finish(loader, batches, rounds)
                yield group
                del group
                first += 1
        except StopIteration:
            _report_early_end(loader, first, rounds)
        return
    while first < rounds:
        stop = min(first + accumulate, rounds)
        taken = list(itertools.islice(batches, stop - first))
        is_short = len(taken) < stop - first
        if is_short:
            stop = first + len(taken)
            _report_early_end(loader, stop, rounds)
            if not taken:
                return
        is_last = is_short or stop == rounds
        group = _group(loader, taken, first, stop, is_last=is_last)
        del taken
        if is_last:
            _finish(loader, batches, rounds)
        yield group
        if is_last:
            return
        first = stop
        del group


def _finish(loader: PreparedLoader, batches: Iterator[Any], rounds: int) -> None:
    """Read a stateful loader to the end of its data, because many stateful loaders reset their position there.

    Nothing is read if a limit ends the epoch before the data.
    """
    if loader.stateful and rounds == loader.num_batches:
        next(batches, None)


def check_end(loader: PreparedLoader, batch: int, limit: int | None) -> None:
    """Check after `batch` rounds of an evaluation that the loader returned as many batches as its length.

    Raises:
        ConfigurationError: the loader returned fewer batches, with several ranks in lock step.

    Warns:
        TrainwrightWarning: the loader returned fewer batches, in all other cases.
    """
    counts = loader.counts
    if counts is None:
        return
    rounds = loader.num_batches if loader.options.in_lockstep else counts[loader.options.rank]
    if rounds is None:
        return
    expected = rounds if limit is None else min(rounds, limit)
    if batch < expected:
        _report_early_end(loader, batch, rounds)


def _group(loader: PreparedLoader, batches: list[Any], first: int, stop: int, *, is_last: bool) -> Group:
    """Return the group of the rounds `first <= i < stop`. Weights and sizes are computed without communication."""
    group = Group(batches, first, is_last)
    group.num_samples = _samples_in_rounds(loader, first, stop)
    if stop > loader.num_full_rounds:
        real = [loader.has_batch(i) for i in range(first, stop)]
        total = sum(loader.real_ranks(i) for i in range(first, stop))
        _weigh(group, real, total, loader.options.world)
    return group


def _samples_in_rounds(loader: PreparedLoader, first: int, stop: int) -> int | None:
    total = 0
    for i in range(first, stop):
        samples = loader.samples_in_round(i)
        if samples is None:
            return None
        total += samples
    return total


def _weigh(group: Group, real: list[bool], num_real: int, world: int) -> None:
    """Set the weights of a group if some rank has padding in it.

    `real` is False for each of this rank's batches that is padding. `num_real` is the number of real batches of all
    ranks.
    """
    # Two ranks with 2 and 1 real micro-batches: each of these three has weight 2/3. Ranks average their gradients, so
    # it contributes 1/3 to the mean.
    if num_real < len(real) * world:
        group.num_real = num_real
        group.weights = [world / num_real if is_real else 0.0 for is_real in real]


def _report_early_end(loader: PreparedLoader, batch: int, rounds: int) -> None:
    """Warn that a loader ended after `batch` of its declared `rounds`, or raise the error if other ranks wait."""
    options = loader.options
    message = f"{options.title} ended after {batch} of the {rounds} batches of its declared length."
    if options.world > 1 and options.in_lockstep:
        raise ConfigurationError(
            f"{message} The other ranks wait for the rest. Return the true length in __len__, or define no __len__."
        )
    warnings.warn(f"{message} Return the true length in __len__.", TrainwrightWarning, stacklevel=3)


def _looking_ahead(loader: PreparedLoader, accumulate: int, limit: int | None, start_batch: int) -> Iterator[Group]:
    """Yield the groups of a loader without length, on one rank or if `ends_together` is set."""
    if limit is not None and start_batch >= limit:
        return
    batches = loader.iterate(start_batch)
    # `ahead` is [batch] for the batch that is fetched ahead, or [] at the end of the data or the limit. The second
    # result is padding, which is only needed if several ranks agree.
    ahead, _ = loader.take_ahead(batches)
    first = start_batch
    while ahead:
        size = accumulate if limit is None else min(accumulate, limit - first)
        taken = [ahead.pop(), *itertools.islice(batches, size - 1)]
        group = _group(loader, taken, first, first + len(taken), is_last=False)
        first += len(taken)
        del taken
        loader.release_state()
        if first != limit:
            # A checkpoint of this step must not count the next batch as consumed.
            loader.hold_state()
            ahead.extend(itertools.islice(batches, 1))
        group.is_last = not ahead
        if group.is_last:
            loader.release_state()
        yield group
        del group


class _AgreedGroup(NamedTuple):
    """Size of a group, equal on every rank.

    Attributes:
        rounds: micro-batches of each rank, including padding. 0 if the epoch has no further group.
        num_real: micro-batches of all ranks that are not padding.
        has_next: True if another group follows.
    """

    rounds: int
    num_real: int
    has_next: bool


@dataclass(frozen=True)
class _Agreement:
    """Exchange of the number of micro-batches of a group between ranks whose loaders have no length."""

    world: int
    uneven: Uneven
    agree: Agree

    def reach(self, name: str, first: int, have: int, *, has_more: bool, can_replay: bool) -> _AgreedGroup:
        """Exchange the sizes of the group that begins at round `first`. Collective. Errors are raised on every rank.

        `have` is this rank's number of batches for the group. `has_more` is True if a further batch of this rank
        follows, and `can_replay` is True if this rank has a batch to pad with.
        """
        of_ranks = self.agree([have, int(has_more), int(can_replay)])
        counts = [row[0] for row in of_ranks]
        more = [bool(row[1]) for row in of_ranks]
        all_can_replay = all(row[2] for row in of_ranks)
        if first == 0 and max(counts) == 0:
            raise ConfigurationError(f"{name} is empty: no rank got a batch. Check the data set.")
        if self.uneven == "stop":
            rounds = min(counts)
            return _AgreedGroup(rounds, num_real=rounds * self.world, has_next=all(more))
        if max(counts) > 0 and not all_can_replay:
            raise uneven_error(name, [first + count for count in counts], self.uneven)
        is_uneven = min(counts) < max(counts) or any(more) != all(more)
        if self.uneven == "error" and is_uneven:
            # Lower bounds: a rank with further batches has fetched only one of them ahead.
            batches = [first + count + more_of_rank for count, more_of_rank in zip(counts, more, strict=True)]
            raise uneven_error(name, batches, "error")
        return _AgreedGroup(max(counts), num_real=sum(counts), has_next=any(more))


def _agreeing(
    loader: PreparedLoader, accumulate: int, limit: int | None, start_batch: int, agreement: _Agreement
) -> Iterator[Group]:
    """Yield the groups of a loader without length, on several ranks."""
    if limit is not None and start_batch >= limit:
        return
    name = loader.options.title
    batches = loader.iterate(start_batch)
    # Before the first batch is fetched ahead. `held_state` is always the state before the batch in `ahead`.
    loader.hold_state()
    start_state = loader.held_state
    # `ahead` is [batch] for the batch that is fetched ahead, or [] at the end of this rank's data or the limit. `spare`
    # is [batch] with a real batch to pad with, set only after this rank has no more batches.
    ahead, spare = loader.take_ahead(batches)
    if spare:
        loader.keep_run_out(start_state)
    first = start_batch
    while True:
        size = accumulate if limit is None else min(accumulate, limit - first)
        taken: list[Any] = []
        if ahead:
            taken = [*ahead, *itertools.islice(batches, size - 1)]
            ahead.clear()
        have = len(taken)
        state_before_group = loader.held_state
        if have > 0:
            loader.release_state()
        # A group that is not full has read this rank's data to its end.
        if have == size and first + have != limit:
            loader.hold_state()
            ahead.extend(itertools.islice(batches, 1))
        if have > 0 and not ahead:
            # This rank's last group. Other ranks may continue, with padding here.
            loader.keep_run_out(state_before_group)
            spare = [copy_containers(taken[-1])]  # the step may change its batch
        agreed = agreement.reach(name, first, have, has_more=bool(ahead), can_replay=bool(taken or spare))
        if agreed.rounds == 0:
            return
        # Other ranks may have more batches than this one, or with the policy "stop" fewer.
        padding = [copy_containers(spare[0]) for _ in range(agreed.rounds - have)]
        group = Group([*taken[: agreed.rounds], *padding], first, not agreed.has_next)
        del taken
        del padding
        if not agreed.has_next:
            loader.release_state()
        _weigh(group, [i < have for i in range(agreed.rounds)], agreed.num_real, agreement.world)
        first += agreed.rounds
        yield group
        if not agreed.has_next:
            return
        del group
