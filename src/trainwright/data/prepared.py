"""Loaders that are prepared for one data-parallel rank: rounds of an epoch, padding, and resuming.

Ranks may have different numbers of batches. In lock step (training, and evaluation if every forward communicates) every
rank must run the same number of rounds. With the policy "pad", a rank without further batches repeats its last batch
with weight 0 until all ranks have finished. With "stop", all ranks stop when the first rank has no further batch.
"error" raises an error, before the start if the numbers are known. Without lock step each rank ends after its own
batches.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from trainwright.core.errors import ConfigurationError
from trainwright.core.rng import isolate_rng, rng_state, set_rng_state
from trainwright.core.tree import copy_containers
from trainwright.data.dealer import Dealer
from trainwright.data.loader_options import LoaderOptions
from trainwright.data.workers import Workers

_END: Any = object()
_CYCLE_STRIDE = 1 << 32  # between the epoch numbers of an epoch's passes, see `cycle`; more than any run has epochs


class PreparedLoader(ABC):
    """Loader of one rank, created by `prepare_loader`. Sub-classes define how batches are read.

    A round is the batches with the same index on all ranks.

    Attributes:
        raw: the user's loader, unchanged.
        options: the options of its preparation, or of the last `use`.
        epoch: the epoch of the last `set_epoch`.
        held_state: the state that `state_dict` returns instead of the current one, stored by `hold_state`,
            `freeze_state` or `keep_run_out` and removed by `release_state`. None if `state_dict` returns the current
            state. A dict `{"loader": state}`, also with `"rng"` (see `hold_state`) and `"has_run_out"` (see
            `keep_run_out`).
        ends_together: the iterators of all ranks end after the same round, also if the number of rounds is unknown.
    """

    _is_dealt: bool = False  # `_dealer` divides the batches over all ranks
    ends_together: ClassVar[bool] = False

    def __init__(self, raw: Any, options: LoaderOptions, *, dealer: Dealer | None = None) -> None:
        """Store the arguments. `dealer` divides batches over all ranks, or only computes positions and counts."""
        self.raw = raw
        self.options = options
        self.epoch = 0
        self._dealer = dealer
        # Batches of each rank in the epoch, set by `count_batches`. None if a rank's number is unknown.
        self._counts: list[int] | None = None
        self._fewest = 0  # the smallest of `_counts`; 0 if they are unknown
        # This rank's number of batches, set by `_agreed` when its data has ended. None before, and if counts are known.
        self._ended_at: int | None = None
        # Object with the user's state_dict and load_state_dict, set by sub-classes. None if the loader is not stateful.
        self._state_source: Any = None
        self.held_state: dict[str, Any] | None = None
        # `load_state_dict` sets these three for the next pass:
        self._is_restored = False
        self._rng_ahead: dict[str, Any] | None = None  # states of generators before the batch that is fetched ahead
        self._has_run_out = False  # this rank had no further batch when the checkpoint was saved
        self._workers = Workers(options.workers)
        self._loader: Any = None  # the copy of `raw` that is iterated over, set by sub-classes

    def use(self, options: LoaderOptions) -> None:
        """Replace the options for the next passes. Rank and world must be the same as before. Not collective."""
        self.options = options
        if self._dealer is not None:
            self._dealer.seed = options.seed

    # For the loop

    @property
    def num_batches(self) -> int | None:
        """Number of rounds in this epoch, the same on every rank; None if unknown."""
        if self._counts is None:
            return None
        if self.options.in_lockstep and self.options.uneven == "stop":
            return self._fewest
        return max(self._counts)

    @property
    def num_full_rounds(self) -> int:
        """Number of rounds, from the epoch's start, in which every rank has a real batch; 0 if unknown."""
        return self._fewest

    @property
    def batch_size(self) -> int | None:
        """Samples in one micro-batch of one rank. The last micro-batch may have fewer. None if unknown."""
        return None

    @property
    def stateful(self) -> bool:
        """True if the loader's own `state_dict` defines the position in the data."""
        return self._state_source is not None

    @property
    def order_needs_seed(self) -> bool:
        """True if the order of the data depends on the seed of the options. May start a copy of the user's sampler."""
        return self._dealer is not None and self._dealer.order_needs_seed

    @property
    def can_seek(self) -> bool:
        """True if an epoch can begin at any batch by arithmetic alone, without a state."""
        return False

    @property
    def counts(self) -> list[int] | None:
        """Batches of every rank in this epoch, in rank order; None if unknown."""
        return self._counts

    def has_batch(self, batch: int) -> bool:
        """Return whether this rank's batch in round `batch` is real rather than padding. True if unknown."""
        if self._counts is None:
            return self._ended_at is None or batch < self._ended_at
        return batch < self._counts[self.options.rank]

    def real_ranks(self, batch: int) -> int:
        """Return the number of ranks with a real batch in round `batch`. If unknown, return the number of all ranks."""
        if self._counts is None or batch < self._fewest:
            return self.options.world
        return sum(batch < count for count in self._counts)

    def samples_in_round(self, batch: int) -> int | None:
        """Return the number of samples of all ranks in round `batch`, or None if it cannot be computed."""
        return None

    def real_rows(self, batch: int) -> int | None:
        """Return the number of samples in this rank's batch that are not repeated to complete the round.

        None if no sample is repeated, or if the number is unknown.
        """
        return None

    def indices(self) -> Iterator[list[int]] | None:
        """Return the indices of this rank's batches from the epoch's start on, or None if they cannot be computed."""
        return None

    def position(self, batch: int) -> dict[str, int]:
        """Return the position in the data after `batch` rounds of the current epoch, for `set_epoch`.

        The position is a JSON-compatible dict with the key `batch`, the same on every rank. It also contains the number
        of `samples` or `micro_batches` that all ranks have consumed, if this number can be computed. Any number of
        ranks can then resume. Otherwise it contains `world`, the required number of ranks.
        """
        return {"batch": batch, "world": self.options.world}

    def facts(self) -> dict[str, Any]:
        """Return values, such as the number of samples, that must be equal for a saved `position` to be valid."""
        if self._dealer is None or not self.can_seek or not self._is_dealt:
            return {}
        return self._dealer.facts()

    def indices_in(self, batch: int) -> list[int | str] | None:
        """Return the data set's indices in this rank's batch of a round of the current epoch, in order.

        For a list of batches, return the batch's own index. Empty for padding; None if the data has no indices. Indices
        are computed, or drawn again from a user's sampler. No data is fetched.
        """
        return None

    def set_epoch(self, epoch: int, resume: Mapping[str, int] | None = None) -> None:
        """Set the epoch (0-based) before iterating over it.

        Args:
            epoch: the epoch. It is also passed to `set_epoch` of the user's sampler or data set, if it exists.
            resume: the result of `position` at the interruption of this epoch, possibly with another number of ranks.
                `iterate(resume["batch"])` then begins with the next batch, and `num_batches` includes earlier rounds.
                Default: None.

        Call this method on every rank, because it communicates if the option `agree` is set.

        Raises:
            ConfigurationError: the data has no batch; ranks in lock step have different numbers of batches with the
                policy "error", or none on one rank with the policy "stop"; the data that is divided over the ranks has
                another length on some of them; or `resume` requires another number of ranks.
        """
        options = self.options
        if resume and resume.get("world", options.world) != options.world:
            raise ConfigurationError(
                f"{options.title} was interrupted in the middle of an epoch on {resume['world']} ranks, whose "
                f"positions are not valid for {options.world} ranks. Resume with {resume['world']} ranks, or from a "
                "checkpoint at an epoch's end. Map-style data in a DataLoader without a distributed sampler can be "
                "resumed on any number of ranks."
            )
        self.epoch = epoch
        self._turn_to(epoch, resume)
        self.count_batches()

    def iterate(self, start_batch: int = 0) -> Iterator[Any]:
        """Return an iterator over this rank's batches of the current epoch, from round `start_batch` on.

        No earlier batch is fetched. If this rank has a batch in every round, the loader's own iterator is returned.

        The iterator only communicates in lock step. In evaluations over a loader without length, it calls `agree` once
        per round. If the option `lend` is set and a rank has no batch of its own, it calls `lend` once.
        """
        self.release_state()
        self._ended_at = None
        options = self.options
        if self._counts is None:
            batches = self._unsized(start_batch)
            if options.in_lockstep and options.world > 1 and options.stage != "train":
                return self._agreed(batches, start_batch)
            return batches  # in training, iterate_groups agrees once per group
        own_count = self._counts[options.rank]
        rounds = self.num_batches
        assert rounds is not None  # counts are known
        some_rank_is_empty = min(self._counts) == 0
        if options.in_lockstep and some_rank_is_empty and not self._is_dealt and options.lend is not None:
            return self._with_loan(start_batch, own_count, rounds, options.lend)
        if not options.in_lockstep or own_count == rounds:
            return self._open(start_batch)
        if own_count > rounds:  # with the policy "stop"
            return itertools.islice(self._open(start_batch), max(0, rounds - start_batch))
        return self._padded(start_batch, own_count, rounds)

    def cycle(self, cycle: int, start_batch: int) -> Iterator[Any]:
        """Return an iterator over one more pass of the current epoch, in another order if the loader shuffles.

        `cycle` 0 is the epoch itself. The pass begins with this rank's batch `start_batch`.
        """
        if cycle == 0:
            return self.iterate(start_batch)
        epoch = self.epoch
        try:
            # Pass c of epoch e visits the data in the order of epoch e + c·2³², a function of both numbers.
            self.epoch = epoch + cycle * _CYCLE_STRIDE
            self._turn_to(self.epoch, None)
            return self._open(start_batch)
        finally:
            self.epoch = epoch

    def place_in_cycles(self, start_batch: int) -> tuple[int, int]:
        """Return the pass to which this rank's batch `start_batch` belongs, and the batch's number in it for `cycle`.

        The passes follow one another, and batches are counted over all of them.
        """
        count = 0 if self._counts is None else self._counts[self.options.rank]
        if count == 0:
            return 0, start_batch
        return divmod(start_batch, count)  # in passes of 3 batches, batch 7 is batch 1 of pass 2

    # A loader that keeps its own position

    def check_resume(self, batch: int, *, has_state: bool) -> None:
        """Raise a ConfigurationError if an epoch cannot continue at round `batch`. Fetches nothing.

        Rounds after the first one need `can_seek`, or a stateful loader whose state was restored (`has_state`).
        """
        if batch == 0 or self.can_seek:
            return
        if self.stateful and has_state:
            return
        why = "its state is not in the checkpoint" if self.stateful else "has no state_dict and load_state_dict"
        raise ConfigurationError(
            f"{self.options.title} cannot begin at batch {batch}: {type(self.raw).__name__} can neither seek nor "
            f"restore its position ({why}), and replaying would fetch consumed data again. Resume from a checkpoint at "
            "an epoch's end, or give it map-style data, a list, or state_dict and load_state_dict: on the iterable "
            "itself, or on the data set inside torchdata's StatefulDataLoader."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state of the loader after the last batch that the loop has received. Not collective.

        Raises a ConfigurationError if the loader is not `stateful`.
        """
        self._check_stateful()
        if self.held_state is not None:
            return self.held_state
        return self._state_now()

    def load_state_dict(self, state: Mapping[str, Any], *, at_epoch_start: bool = False) -> None:
        """Restore the loader's state. The next `iterate(start_batch)` continues from it.

        Args:
            state: the result of `state_dict` on the same rank.
            at_epoch_start: the epoch of `state` has ended. The loader is advanced to the end of that epoch, and the
                next `iterate(0)` starts from there, as in an uninterrupted run. Default: False.

        Raises a ConfigurationError if the loader is not `stateful`.
        """
        self._check_stateful()
        self._load_own(state["loader"], at_epoch_start=at_epoch_start)
        if at_epoch_start:
            return
        self._rng_ahead = state.get("rng")
        self._has_run_out = state.get("has_run_out", False)
        self._is_restored = True

    def hold_state(self) -> None:
        """Store the current state for `state_dict`, because the next batch is fetched before the loop requests it.

        The states of generators are stored too, so that the batch has the same random numbers after a resume.
        """
        if self.stateful:
            self.held_state = {**self._state_now(), "rng": rng_state()}

    def release_state(self) -> None:
        """Discard the stored state, so that `state_dict` returns the current state again."""
        self.held_state = None

    def freeze_state(self) -> None:
        """Store the current state for `state_dict`, because `close` releases the loader's iterator."""
        if self.stateful and self.held_state is None:
            self.held_state = self._state_now()

    def end_pass(self) -> None:
        """End a finished or interrupted pass, and its workers unless they are persistent. Takes seconds at most."""
        if not self.stateful:  # such a loader keeps its iterator, which holds the position
            self._workers.end_pass()

    def close(self) -> None:
        """End persistent workers, and the workers of interrupted passes. Takes seconds at most."""
        self._workers.close()
        if isinstance(self._loader, DataLoader):
            # torch keeps the iterator of persistent workers here, and the next pass would use the ended workers.
            vars(self._loader)["_iterator"] = None

    def keep_run_out(self, state: dict[str, Any] | None) -> None:
        """Record in `held_state` that this rank has no further batch while other ranks continue.

        `state` is the `held_state` before the rank's last group: a resumed run fetches the first batch of this group
        again, as padding. None for a loader that is not stateful.
        """
        if self.stateful and state is not None:
            self.held_state = {**state, "has_run_out": True}

    def take_ahead(self, batches: Iterator[Any]) -> tuple[list[Any], list[Any]]:
        """Fetch the first of `batches` before the loop requests it. Return ([batch], []), or ([], []) without a batch.

        After a resume, return ([], [batch]) if this rank had no further batch when the checkpoint was saved. The batch
        is then only used as padding.
        """
        generator_states = self._rng_ahead
        self._rng_ahead = None
        if generator_states is None:
            return list(itertools.islice(batches, 1)), []
        # The interrupted run fetched this batch before the checkpoint's generators were saved.
        with isolate_rng():
            set_rng_state(generator_states)
            ahead = list(itertools.islice(batches, 1))
            if not self._has_run_out:
                return ahead, []
            # The interrupted run had read the loader to its end. The next epoch begins from the state after the end.
            for _ in batches:
                pass
        self._has_run_out = False
        return [], ahead

    def _state_now(self) -> dict[str, Any]:
        # A copy: the returned state may change with the loader.
        return {"loader": copy.deepcopy(self._own_state())}

    def _own_state(self) -> Any:
        return self._state_source.state_dict()

    def _load_own(self, state: Any, *, at_epoch_start: bool) -> None:
        self._state_source.load_state_dict(state)

    def count_batches(self) -> None:
        """Determine each rank's number of batches in the current epoch. Collective if the option `agree` is set.

        Raises a ConfigurationError as `set_epoch` does.
        """
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

    # For sub-classes

    @abstractmethod
    def _turn_to(self, epoch: int, resume: Mapping[str, int] | None) -> None:
        """Set the epoch of the loader, its sampler and its data set."""

    @abstractmethod
    def _count(self) -> list[int] | int | None:
        """Return a list with the number of batches of every rank, this rank's number alone, or None if unknown."""

    @abstractmethod
    def _open(self, start_batch: int) -> Iterator[Any]:
        """Return the iterator over this rank's real batches from `start_batch` on. Implementations call `_begin`."""

    def filler(self) -> Any:
        """Return a padding batch for a rank that has no batch of its own.

        Raises a ConfigurationError if the rank has no data for it.
        """
        raise ConfigurationError(
            f"{self.options.title}: rank {self.options.rank} has no batches, and nothing to pad with. Give every "
            'rank data, or pass uneven="stop".'
        )

    # Details

    def _all_counts(self) -> list[int] | None:
        """Return the number of batches of every rank, or None if one is unknown. Collective with `agree`."""
        counts = self._count()
        options = self.options
        if options.world == 1 or options.agree is None:
            if isinstance(counts, int):
                return [counts] * options.world
            return counts
        if isinstance(counts, list):
            # Equal numbers of batches may hide different numbers of samples, and so different orders.
            lengths = {"batches": sum(counts), **self.facts()}
            of_ranks = [tuple(row) for row in options.agree([int(length) for length in lengths.values()])]
            if len(set(of_ranks)) > 1:
                raise _different_lengths(options.title, [name.removeprefix("num_") for name in lengths], of_ranks)
            return counts
        # Each rank has its own loader. Ranks without a length (-1) must call `agree`, too: other ranks may have one,
        # and every rank must take part in a collective.
        count = -1 if counts is None else counts
        by_rank = [row[0] for row in options.agree([count])]
        return None if min(by_rank) < 0 else by_rank

    def _unsized(self, start_batch: int) -> Iterator[Any]:
        """Return the iterator of a loader without length, after the check that a new epoch has a first batch."""
        resumed = self._is_restored or start_batch > 0
        batches = self._open(start_batch)
        if resumed or self.options.world > 1:
            # A resumed epoch may have no further batch. On several ranks, `iterate_groups` checks for an empty epoch.
            return batches
        first = list(itertools.islice(batches, 1))
        if not first:
            raise ConfigurationError(
                f"{self.options.title} is empty: it gave no batch in epoch {self.epoch}. A generator yields its items "
                "only once: pass an object whose __iter__ restarts each time."
            )
        # A generator of one batch: the list itself would reference the batch as long as the epoch lasts.
        first_batch = (first.pop() for _ in range(1))
        return itertools.chain(first_batch, batches)

    def _padded(self, start_batch: int, own_count: int, rounds: int) -> Iterator[Any]:
        """Yield this rank's `own_count` batches, and then the last one until all `rounds` are over.

        3 own batches in 5 rounds, from round 1 on: batches 1 and 2, and twice a copy of batch 2. From round 4 on: one
        `filler`.
        """
        num_left = own_count - start_batch
        padding = _END  # no batch yet
        if num_left > 0:
            batches = self._open(start_batch)
            yield from itertools.islice(batches, num_left - 1)
            padding = next(batches, _END)
            if padding is _END:
                return  # the loader is shorter than its length: the loop counts batches and reports it
            # Each time a copy: the step may change its batch, for example by `batch.pop("labels")`.
            yield copy_containers(padding)
        if padding is _END:
            padding = self.filler()
        for _ in range(rounds - max(own_count, start_batch)):
            yield copy_containers(padding)

    def _with_loan(
        self, start_batch: int, own_count: int, rounds: int, lend: Callable[[Any], list[Any]]
    ) -> Iterator[Any]:
        """Yield the batches of `_padded`. Ranks without a batch repeat the first one of another rank. Collective.

        The lender is the first of the ranks with the most batches.
        """
        assert self._counts is not None  # checked by the caller
        lender = self._counts.index(rounds)
        batches = self._padded(start_batch, own_count, rounds) if own_count > 0 else iter(())
        first = list(itertools.islice(batches, 1))
        loan = lend(first[0] if self.options.rank == lender else None)[lender]
        yield from first
        del first  # the loop then holds the only reference to the batch
        yield from batches
        if own_count == 0:
            for _ in range(rounds - start_batch):
                yield copy_containers(loan)

    def _agreed(self, batches: Iterator[Any], first_round: int) -> Iterator[Any]:
        """Yield batches, then padding until the last rank has ended. Each round exchanges which ranks have a batch."""
        options = self.options
        if options.agree is None:
            raise ConfigurationError(
                f"{options.title} has no length, and in lock step {options.world} ranks must agree where it ends: "
                "prepare it with agree=."
            )
        for round_index in itertools.count(first_round):
            batch = _END
            if self._ended_at is None:
                batch = next(batches, _END)
                if batch is _END:
                    self._ended_at = round_index
            have_batch = [row[0] for row in options.agree([int(batch is not _END)])]  # 1 or 0 for each rank
            if not any(have_batch):
                return
            if not all(have_batch):
                if options.uneven == "stop":
                    return
                if options.uneven == "error":
                    raise uneven_error(options.title, [round_index + has for has in have_batch], "error")
            # A rank that ends in a later round pads with its own last batch, which is then in `delivered`.
            if round_index == first_round and not all(have_batch):
                if options.lend is not None:
                    lender = have_batch.index(1)
                    delivered = options.lend(batch if options.rank == lender else None)[lender]
                elif batch is _END:
                    delivered = self.filler()
            if batch is not _END:
                delivered = batch
            del batch
            yield copy_containers(delivered)

    def _begin(self, start_batch: int) -> None:
        """Check that the epoch can begin at `start_batch`. A restored state is valid for one pass only."""
        is_restored = self._is_restored
        self._is_restored = False
        self.check_resume(start_batch, has_state=is_restored)

    def _check_stateful(self) -> None:
        if not self.stateful:
            raise ConfigurationError(
                f"{self.options.title} keeps no state of its own; its position is `position(batch)`."
            )


def uneven_error(name: str, counts: list[int], policy: str) -> ConfigurationError:
    """Return the error for ranks with different numbers of batches."""
    return ConfigurationError(
        f"{name}: the ranks have different numbers of batches, {counts}, which uneven={policy!r} does not allow. "
        'Pass uneven="pad" (ranks without further batches replay one with weight 0), or uneven="stop" with at least '
        "one batch on every rank, or make the number of batches divisible by the number of ranks."
    )


def _different_lengths(title: str, names: list[str], of_ranks: list[tuple[int, ...]]) -> ConfigurationError:
    """Return the error for ranks whose values of `names` differ, such as `names=["batches", "samples"]`.

    `of_ranks` contains the values of each rank. The message names the values that differ, and the first rank with each:
    "10 samples on rank 0, 12 samples on rank 3".
    """
    differing = [i for i in range(len(names)) if len({values[i] for values in of_ranks}) > 1]
    lengths = []
    for values in dict.fromkeys(of_ranks):
        of_rank = " and ".join(f"{values[i]} {names[i]}" for i in differing)
        lengths.append(f"{of_rank} on rank {of_ranks.index(values)}")
    return ConfigurationError(
        f"{title} has another length on some ranks ({', '.join(lengths)}), although it is divided over them. Build the "
        "same data set on every rank; if each rank has its own data, pass use_distributed_sampler=False."
    )
