"""A loader made ready for one data-parallel rank: how many rounds an epoch has, which are real, where to begin.

Ranks may hold different numbers of batches. In lock step (training, and evaluation where every forward communicates)
every rank must do as many rounds as the others, by the declared policy:

- "pad": a rank that has run out replays its last real batch, with weight 0, until all are done;
- "stop": all stop when the first has run out;
- "error": refused, before the start where the numbers are known.

Without lock step a rank simply ends when it has run out.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from trainwright.core.errors import ConfigurationError
from trainwright.core.rng import isolate_rng, rng_state, set_rng_state
from trainwright.data.loader_options import LoaderOptions
from trainwright.data.sampler import Dealer
from trainwright.data.workers import Workers

_END: Any = object()
_CYCLE_STRIDE = 1 << 32


class PreparedLoader(ABC):
    """A loader of one rank. Made by `prepare_loader`; sub-classes say how batches are come by.

    Attributes:
        raw: the user's loader, unchanged.
        options: what it was prepared with.
        epoch: the epoch that `set_epoch` chose last.
    """

    _is_dealt: bool = False

    def __init__(self, raw: Any, options: LoaderOptions, *, dealer: Dealer | None = None) -> None:
        """Store; `dealer` deals batches to all ranks, or does the arithmetic only (see the sub-classes)."""
        self.raw = raw
        self.options = options
        self.epoch = 0
        self._dealer = dealer
        self._counts: list[int] | None = None
        self._fewest = 0
        self._ended_at: int | None = None
        self._state_source: Any = None
        self._restored = False
        self._held_state: dict[str, Any] | None = None
        self._rng_ahead: dict[str, Any] | None = None
        self._has_run_out = False
        self._workers = Workers(options.workers)
        self._loader: Any = None

    # What the loop asks

    @property
    def num_batches(self) -> int | None:
        """Rounds in this epoch, the same number on every rank; None when it cannot be known before the end."""
        if self._counts is None:
            return None
        return self._fewest if self.options.in_lockstep and self.options.uneven == "stop" else max(self._counts)

    @property
    def num_full_rounds(self) -> int:
        """Rounds, from the epoch's start, in which every rank has a batch of its own; 0 when unknown."""
        return self._fewest

    @property
    def batch_size(self) -> int | None:
        """Samples in one micro-batch of one rank, the last one perhaps excepted; None when unknown."""
        return None

    @property
    def stateful(self) -> bool:
        """Whether the place in the data is kept by the loader's own `state_dict` rather than by arithmetic."""
        return self._state_source is not None

    @property
    def can_seek(self) -> bool:
        """Whether an epoch can begin at any batch by arithmetic alone, without a state."""
        return False

    @property
    def counts(self) -> list[int] | None:
        """Batches of every rank in this epoch, in rank order; None when unknown."""
        return self._counts

    def has_batch(self, batch: int) -> bool:
        """Return whether this rank's batch of that round is real; False marks padding. True when not known yet."""
        if self._counts is None:
            return self._ended_at is None or batch < self._ended_at
        return batch < self._counts[self.options.rank]

    def real_ranks(self, batch: int) -> int:
        """Return how many ranks have a real batch in that round; all of them when unknown."""
        if self._counts is None or batch < self._fewest:
            return self.options.world
        return sum(batch < count for count in self._counts)

    def samples_in_round(self, batch: int) -> int | None:
        """Return the samples of that round over all ranks, or None when arithmetic does not give it."""
        return None

    def indices(self) -> Iterator[list[int]] | None:
        """Return the data set's indices of this rank's batches from the epoch's start on, by arithmetic.

        None where arithmetic does not give them.
        """
        return None

    def position(self, batch: int) -> dict[str, int]:
        """Return the place in the data after `batch` rounds of the present epoch, JSON-able, for `set_epoch`.

        It holds `batch` and, where arithmetic gives it, what all ranks have consumed (`samples` or `micro_batches`), so
        that another number of ranks goes on where these have stopped; otherwise `world`, as many as are needed again.
        The same on every rank.
        """
        return {"batch": batch, "world": self.options.world}

    def facts(self) -> dict[str, Any]:
        """Return what a place within an epoch depends on besides seed and epoch; empty where arithmetic has no part."""
        dealt = self._dealer is not None and self.can_seek and self._is_dealt
        return self._dealer.facts() if dealt and self._dealer is not None else {}

    def indices_in(self, batch: int) -> list[int | str] | None:
        """Return the data set's indices in this rank's batch of that round of the present epoch, in order.

        Empty where the batch is padding; None where the data has no indices. Of a list of batches, the batch's own.
        Found by arithmetic, or by drawing anew from a sampler of the user's; no data is touched.
        """
        return None

    def set_epoch(self, epoch: int, resume: Mapping[str, int] | None = None) -> None:
        """Turn to an epoch (0-based) before iterating over it.

        Args:
            epoch: passed on to the order, and to the user's sampler or data set where they have a `set_epoch`.
            resume: what `position` returned when this epoch was left, also under another number of ranks; then
                `iterate(resume["batch"])` is the next batch, and `num_batches` counts the rounds before it too.

        Every rank must call it: it communicates when each rank has a loader of its own making and `agree` was given.

        Raises:
            ConfigurationError: no rank has a batch; or ranks are uneven and the policy is "error"; or the place has no
                meaning for another number of ranks.
        """
        options = self.options
        if resume and resume.get("world", options.world) != options.world:
            raise ConfigurationError(
                f"{options.title} was left in the middle of an epoch by {resume['world']} ranks, whose places in it do "
                f"not tell {options.world} ranks what is left. Resume with {resume['world']} ranks, or from a "
                "checkpoint at an epoch's end. Map-style data in a DataLoader without a distributed sampler of your "
                "own goes on with any number of ranks."
            )
        self.epoch = epoch
        self._turn_to(epoch, resume)
        self.count_batches()

    def iterate(self, start_batch: int = 0) -> Iterator[Any]:
        """Return an iterator over this rank's batches of the present epoch, from round `start_batch` on.

        Nothing before `start_batch` is fetched. Where nothing needs to be added, it is the loader's own iterator. It
        communicates (`agree`, one call a round) only in evaluation in lock step over a loader without length.

        Raises:
            ConfigurationError: the loader can neither seek nor was given its state back; or it turns out to be empty.
        """
        self.release_state()
        self._ended_at = None
        options = self.options
        if self._counts is None:
            batches = self._unsized(start_batch)
            if options.in_lockstep and options.world > 1 and options.stage != "train":
                return self._agreed(batches, start_batch)
            return batches  # in training, iterate_groups agrees once a group
        own, rounds = self._counts[options.rank], self.num_batches
        assert rounds is not None  # counts are known
        if not options.in_lockstep or own == rounds:
            return self._open(start_batch)
        if own > rounds:
            return itertools.islice(self._open(start_batch), max(0, rounds - start_batch))
        return self._padded(start_batch, own, rounds)

    def cycle(self, cycle: int, start_batch: int) -> Iterator[Any]:
        """Return an iterator over one more pass of the present epoch, in an order of its own if the loader shuffles.

        Args:
            cycle: 0 for the epoch itself.
            start_batch: this rank's batch of that pass to begin with.
        """
        if cycle == 0:
            return self.iterate(start_batch)
        epoch = self.epoch
        try:
            # Pass c of epoch e visits the data in the order of epoch e + c·2³²: a place of its own, and a function of
            # both numbers.
            self.epoch = epoch + cycle * _CYCLE_STRIDE
            self._turn_to(self.epoch, None)
            return self._open(start_batch)
        finally:
            self.epoch = epoch

    # A loader that keeps its own place

    def check_resume(self, batch: int, *, has_state: bool) -> None:
        """Check that an epoch can go on at round `batch`, before anything is fetched.

        Args:
            batch: rounds that have been done.
            has_state: the loader will be given its own state back.

        Raises:
            ConfigurationError: it can neither seek nor keeps its own place; says what to implement.
        """
        if not batch or self.can_seek or (self.stateful and has_state):
            return
        why = "its state is not in the checkpoint" if self.stateful else "has no state_dict and load_state_dict"
        raise ConfigurationError(
            f"{self.options.title} cannot begin at batch {batch}: {type(self.raw).__name__} can neither seek nor be "
            f"given its place back ({why}), and replaying would fetch again what was consumed. Resume from a "
            "checkpoint at an epoch's end, or give it map-style data, a list, or state_dict and load_state_dict: on "
            "the iterable itself, or on the data set inside torchdata's StatefulDataLoader."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's own state as of the last batch that the loop has been given (see `stateful`).

        It is this rank's own. Communicates nothing.

        Raises:
            ConfigurationError: the loader keeps no state.
        """
        self._need_state()
        return self._held_state if self._held_state is not None else self._state_now()

    def load_state_dict(self, state: Mapping[str, Any], *, at_epoch_start: bool = False) -> None:
        """Give the loader its state back; the next `iterate(start_batch)` continues there.

        Args:
            state: what `state_dict` returned, on the same rank.
            at_epoch_start: the epoch in which it was taken has ended: the loader is brought to where it stood, and the
                next `iterate(0)` begins anew from there, as the uninterrupted run did.

        Raises:
            ConfigurationError: the loader keeps no state, or not one of this kind.
        """
        self._need_state()
        self._load_own(state["loader"], at_epoch_start=at_epoch_start)
        if at_epoch_start:
            return
        self._rng_ahead = state.get("rng")
        self._has_run_out = state.get("has_run_out", False)
        self._restored = True

    def hold_state(self) -> None:
        """Keep the present state for `state_dict`, because the next batch is fetched before the loop asks for it.

        The generators' state is kept too: what the batch draws, in this process, it must draw again after a resume.
        """
        if self.stateful:
            self._held_state = {**self._state_now(), "rng": rng_state()}

    def release_state(self) -> None:
        """Let `state_dict` return the present state again: nothing is fetched ahead."""
        self._held_state = None

    def freeze_state(self) -> None:
        """Keep the present state for `state_dict` from now on, because `close` will let go of what gives it."""
        if self.stateful and self._held_state is None:
            self._held_state = self._state_now()

    def end_pass(self) -> None:
        """End a pass that is over or was broken off, and its workers unless they outlive passes; within seconds."""
        if not self.stateful:  # such a loader keeps its iterator, which says where it stands
            self._workers.end_pass()

    def close(self) -> None:
        """End the workers of passes that were left in their middle, or that outlive passes; takes seconds at most."""
        self._workers.close()
        if isinstance(self._loader, DataLoader):
            vars(self._loader)["_iterator"] = None  # it would be used again

    def keep_run_out(self, state: dict[str, Any] | None) -> None:
        """Note that this rank has no batch left while others go on.

        Args:
            state: one that was held before the last batches. A resumed run fetches one of them again, to pad with.
        """
        if self.stateful and state is not None:
            self._held_state = {**state, "has_run_out": True}

    @property
    def held_state(self) -> dict[str, Any] | None:
        """What `hold_state` keeps."""
        return self._held_state

    def take_ahead(self, batches: Iterator[Any]) -> tuple[list[Any], list[Any]]:
        """Fetch the first batch of an epoch, or of what is left of it, ahead of the loop.

        Returns:
            At most one batch that comes next, and at most one that is only there to pad with.
        """
        state, self._rng_ahead = self._rng_ahead, None
        if state is None:
            return list(itertools.islice(batches, 1)), []
        # It had been fetched before the checkpoint's generators were saved.
        with isolate_rng():
            set_rng_state(state)
            ahead = list(itertools.islice(batches, 1))
            if not self._has_run_out:
                return ahead, []
            for _ in batches:  # to its end, where the loader stood
                pass
        self._has_run_out = False
        return [], ahead

    def _state_now(self) -> dict[str, Any]:
        # Its own copy: what a loader returns may go on changing with it.
        return {"loader": copy.deepcopy(self._own_state())}

    def _own_state(self) -> Any:
        return self._state_source.state_dict()

    def _load_own(self, state: Any, *, at_epoch_start: bool) -> None:
        self._state_source.load_state_dict(state)

    def count_batches(self) -> None:
        """Find out how many batches every rank has in the present epoch; see `set_epoch` for when it communicates."""
        counts = self._all_counts()
        self._counts = counts
        self._fewest = min(counts) if counts else 0
        if counts is None:
            return
        options = self.options
        if max(counts) == 0:
            raise ConfigurationError(
                f"{options.title} is empty: it has no batch. Check the data set, and drop_last with a batch size that "
                "is larger than the data set."
            )
        if not options.in_lockstep or min(counts) == max(counts):
            return
        if options.uneven == "error" or (options.uneven == "stop" and min(counts) == 0):
            raise uneven_error(options.title, counts, options.uneven)

    # What sub-classes say

    @abstractmethod
    def _turn_to(self, epoch: int, resume: Mapping[str, int] | None) -> None:
        """Tell whatever depends on the epoch."""

    @abstractmethod
    def _count(self) -> list[int] | int | None:
        """Return the batches of every rank, where arithmetic gives them; or this rank's own number; or None."""

    @abstractmethod
    def _open(self, start_batch: int) -> Iterator[Any]:
        """Return the iterator over this rank's real batches from `start_batch` on."""

    def filler(self) -> Any:
        """Return some batch for a rank that has none of its own to replay."""
        raise ConfigurationError(
            f"{self.options.title}: rank {self.options.rank} has no batch at all, and nothing to pad with. Give every "
            'rank data, or pass uneven="stop".'
        )

    # Details

    def _all_counts(self) -> list[int] | None:
        counts = self._count()
        if isinstance(counts, list):
            return counts
        options = self.options
        if options.world == 1 or options.agree is None:
            return None if counts is None else [counts] * options.world
        # Each rank has a loader of its own making. All take part, also one without a length: a collective cannot
        # depend on what one rank knows.
        told = [row[0] for row in options.agree([-1 if counts is None else counts])]
        return None if min(told) < 0 else told

    def _unsized(self, start_batch: int) -> Iterator[Any]:
        resumed = self._restored or start_batch > 0
        batches = self._open(start_batch)
        if resumed or self.options.world > 1:
            return batches  # nothing left may be right; between ranks, `iterate_groups` finds out together
        first = [next(batches, _END)]
        if first[0] is _END:
            raise ConfigurationError(
                f"{self.options.title} is empty: it gave no batch in epoch {self.epoch}. A generator gives its items "
                "once only: pass an object whose __iter__ begins anew each time."
            )
        return itertools.chain(_drain(first), batches)

    def _padded(self, start_batch: int, own: int, rounds: int) -> Iterator[Any]:
        real = own - start_batch
        last = _END
        if real > 0:
            batches = self._open(start_batch)
            yield from itertools.islice(batches, real - 1)
            last = next(batches, _END)
            if last is _END:
                return  # shorter than it said: the loop finds out by counting
            yield last
        if last is _END:
            last = self.filler()
        for _ in range(rounds - max(own, start_batch)):
            yield last

    def _agreed(self, batches: Iterator[Any], first_round: int) -> Iterator[Any]:
        options = self.options
        if options.agree is None:
            raise ConfigurationError(
                f"{options.title} has no length, and in lock step {options.world} ranks must agree where it ends: "
                "prepare it with agree=."
            )
        for index in itertools.count(first_round):
            batch = next(batches, _END) if self._ended_at is None else _END
            if batch is _END and self._ended_at is None:
                self._ended_at = index
            have = [row[0] for row in options.agree([int(batch is not _END)])]
            if not any(have) or (options.uneven == "stop" and not all(have)):
                return
            if options.uneven == "error" and not all(have):
                raise uneven_error(options.title, [index + has for has in have], "error")
            if batch is not _END:
                last = batch
            elif index == first_round:
                last = self.filler()
            del batch
            yield last

    def _begin(self, start_batch: int) -> None:
        """Check that the epoch can begin at `start_batch`, and use up a state that was given back."""
        restored, self._restored = self._restored, False
        self.check_resume(start_batch, has_state=restored)

    def _need_state(self) -> None:
        if not self.stateful:
            raise ConfigurationError(f"{self.options.title} keeps no state of its own; its place is `position(batch)`.")


def uneven_error(name: str, counts: list[int], policy: str) -> ConfigurationError:
    """Return the error for ranks with different numbers of batches, naming the numbers and the ways out."""
    return ConfigurationError(
        f"{name}: the ranks have different numbers of batches, {counts}, which uneven={policy!r} does not allow. "
        'Pass uneven="pad" (ranks that have run out replay a batch with weight 0), or uneven="stop" with at least one '
        "batch on every rank, or make the number of batches divisible by the number of ranks."
    )


def _drain(items: list[Any]) -> Iterator[Any]:
    """Yield the items without keeping them."""
    while items:
        yield items.pop(0)
