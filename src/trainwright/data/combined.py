"""Combination of several loaders, in parallel or in sequence."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeGuard, get_args

from torch.utils.data import Dataset

from trainwright.core.errors import ConfigurationError, TrainwrightWarning, nearest
from trainwright.data.loader_options import LoaderOptions
from trainwright.data.prepared import PreparedLoader

Mode = Literal["min_size", "max_size", "max_size_cycle", "sequential"]

_END: Any = object()


class CombinedLoader:
    """Loader that combines several loaders. Iterating over it yields `(batch, batch_idx, dataloader_idx)`.

    A batch is a tree of the loaders' batches, with the structure of `iterables`.

    Modes, for members of 64 and 16 batches:

    - "min_size": ends with the shortest loader: 16 batches.
    - "max_size": ends with the longest loader. Ended loaders return None: 64 batches.
    - "max_size_cycle": ends with the longest loader. Ended loaders restart, in a new order if they shuffle: 64 batches.
    - "sequential": one loader after the other. A batch is that of a single loader: 80 batches.

    Args:
        iterables: loaders in a list, tuple or dict, nested arbitrarily. Wrap a list of batches in a DataLoader, because
            a list counts as a list of loaders.
        mode: see above. Default: `"min_size"`.

    Raises:
        ConfigurationError: the mode is unknown, no member is given, or a member cannot be iterated over.
    """

    def __init__(self, iterables: object, mode: Mode = "min_size") -> None:
        if mode not in get_args(Mode):
            raise ConfigurationError(
                f"mode={mode!r} is not one of {', '.join(get_args(Mode))}.{nearest(mode, get_args(Mode))}"
            )
        members = leaves_of(iterables)
        if not members:
            raise ConfigurationError("CombinedLoader has no member. Pass at least one loader.")
        for member in members:
            if not hasattr(member, "__iter__"):
                raise ConfigurationError(
                    f"CombinedLoader: {type(member).__name__} cannot be iterated over. Use a loader."
                )
        self.iterables = iterables
        self.mode: Mode = mode

    @property
    def flattened(self) -> list[Any]:
        """The members, in the order of the tree."""
        return leaves_of(self.iterables)

    def __len__(self) -> int:
        """Return the number of batches. Raises TypeError if a member has no length."""
        counts = [len(member) for member in self.flattened]
        return combined_count(self.mode, counts)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        """Yield `(batch, batch_idx, dataloader_idx)`. A training step only receives the batch.

        In `"sequential"` mode `batch_idx` counts within a loader. In other modes `dataloader_idx` is 0.
        """
        if self.mode == "sequential":
            return self._one_after_another()
        return ((batch, batch_idx, 0) for batch_idx, batch in enumerate(self._batches()))

    def _one_after_another(self) -> Iterator[tuple[Any, int, int]]:
        for dataloader_idx, member in enumerate(self.flattened):
            for batch_idx, batch in enumerate(_batches_of(member)):
                yield batch, batch_idx, dataloader_idx

    def _batches(self) -> Iterator[Any]:
        members = self.flattened
        if self.mode == "sequential":
            return itertools.chain.from_iterable(_batches_of(member) for member in members)
        batches = [_batches_of(member) for member in members]
        return _Rounds(self.iterables, self.mode, batches, lambda index, cycle: _batches_of(members[index]))


def _batches_of(member: Iterable[Any]) -> Iterator[Any]:
    # As a member, a CombinedLoader gives its batches without their indices.
    return member._batches() if isinstance(member, CombinedLoader) else iter(member)


class PreparedCombined(PreparedLoader):
    """Prepared CombinedLoader. A rank that has ended repeats its last combined batch; members do not pad."""

    raw: CombinedLoader

    def __init__(self, raw: CombinedLoader, members: object, options: LoaderOptions) -> None:
        """Store the arguments. `members` is the tree of prepared loaders, which have `lockstep=False`."""
        super().__init__(raw, options)
        self._tree = members
        self._members: list[PreparedLoader] = leaves_of(members)
        # The iterator of the last pass, whose progress is in the state. None before a pass, and in "sequential" mode.
        self._rounds: _Rounds | None = None
        # The state of `_own_state` for the next pass, set by `load_state_dict`. None if the next pass is not resumed.
        self._resumed_at: Mapping[str, list[Any]] | None = None
        self._has_warned = False  # of members with different numbers of batches on the ranks

    def use(self, options: LoaderOptions) -> None:
        for member in self._members:
            member.use(replace(options, lockstep=False))
        super().use(options)
        # Fields of the base class, which needs the options of all members for them.
        self._counts = self._count()
        self._fewest = min(self._counts or [0])

    def samples_in_round(self, batch: int) -> int | None:
        # In the other modes, the members do not read their batch number `batch` in this round: "sequential" reads a
        # single member, and "max_size_cycle" may be in a later pass of one.
        if self.raw.mode not in ("min_size", "max_size"):
            return None
        total = 0
        for member in self._members:
            samples = member.samples_in_round(batch)
            if samples is None:
                return None
            total += samples
        return total

    @property
    def stateful(self) -> bool:
        return self.raw.mode != "sequential" and any(member.stateful for member in self._members)

    @property
    def order_needs_seed(self) -> bool:
        return any(member.order_needs_seed for member in self._members)

    @property
    def can_seek(self) -> bool:
        return all(member.can_seek for member in self._members)

    def check_resume(self, batch: int, *, has_state: bool) -> None:
        for member in self._members:
            member.check_resume(batch, has_state=has_state and self.stateful)

    def _own_state(self) -> dict[str, list[Any]]:
        # Two members, of which the second one is stateful and in its second pass:
        # {"members": [None, {"loader": …}], "ended": [False, True], "cycles": [0, 1]}. See `_Rounds`.
        num_members = len(self._members)
        rounds = self._rounds
        return {
            "members": [member.state_dict() if member.stateful else None for member in self._members],
            "ended": [False] * num_members if rounds is None else list(rounds.ended),
            "cycles": [0] * num_members if rounds is None else list(rounds.cycles),
        }

    def _load_own(self, state: Mapping[str, list[Any]], *, at_epoch_start: bool) -> None:
        for member, member_state in zip(self._members, state["members"], strict=True):
            if member_state is not None:
                member.load_state_dict(member_state, at_epoch_start=at_epoch_start)
        # A new epoch starts with the first pass of every member.
        self._resumed_at = None if at_epoch_start else state

    def position(self, batch: int) -> dict[str, int]:
        if self.raw.mode in ("max_size_cycle", "sequential"):
            # Ranks reach a member's end in different rounds, so the position is not valid for another number of ranks.
            return super().position(batch)
        # Two members: {"batch": 3, "0.batch": 3, "0.samples": 24, "1.batch": 3, "1.samples": 12}.
        place = {"batch": batch}
        for index, member in enumerate(self._members):
            for key, value in member.position(batch).items():
                place[f"{index}.{key}"] = value
        return place

    def facts(self) -> dict[str, Any]:
        facts = {}
        for index, member in enumerate(self._members):
            for key, value in member.facts().items():
                facts[f"{index}.{key}"] = value
        return facts

    def _turn_to(self, epoch: int, resume: Mapping[str, int] | None) -> None:
        for index, member in enumerate(self._members):
            prefix = f"{index}."
            of_member = {}
            for key, value in (resume or {}).items():
                if key.startswith(prefix):
                    of_member[key.removeprefix(prefix)] = value
            # Empty in the modes whose position has no parts: members then begin the epoch, and `_open` seeks.
            member.set_epoch(epoch, of_member or None)

    def count_batches(self) -> None:
        for member in self._members:
            member.count_batches()
        super().count_batches()

    def end_pass(self) -> None:
        for member in self._members:
            member.end_pass()

    def close(self) -> None:
        for member in self._members:
            member.close()

    def _count(self) -> list[int] | None:
        by_member: list[list[int]] = []
        for member in self._members:
            if member.counts is None:
                return None
            by_member.append(member.counts)
        # Only "max_size" returns None for an ended member, and only training needs gradients of all parameters.
        needs_equal_members = self.raw.mode == "max_size" and self.options.stage == "train"
        if needs_equal_members and not self._has_warned:
            for index, counts in enumerate(by_member):
                if min(counts) != max(counts):
                    self._warn_of_uneven_ranks(index, counts)
        return [combined_count(self.raw.mode, list(of_rank)) for of_rank in zip(*by_member, strict=True)]

    def _warn_of_uneven_ranks(self, index: int, counts: list[int]) -> None:
        self._has_warned = True
        if self.options.rank == 0:
            warnings.warn(
                f"{self.options.title}: member {index} has {min(counts)} to {max(counts)} batches on the ranks. When a "
                "rank has no more batches of this member, it gets None, and parameters that only this member uses are "
                "unused. Pass strategy='ddp_find_unused_parameters_true', or mode='max_size_cycle'.",
                TrainwrightWarning,
                stacklevel=2,
            )

    def _open(self, start_batch: int) -> Iterator[Any]:
        mode = self.raw.mode
        if mode == "sequential":
            return self._sequence(start_batch)
        resumed = self._resumed_at
        self._resumed_at = None
        ended = list(resumed["ended"]) if resumed else [False] * len(self._members)
        cycles = [0] * len(self._members)
        batches: list[Iterator[Any]] = []
        for index, member in enumerate(self._members):
            if mode == "max_size_cycle":
                if resumed and member.stateful:
                    # The restored state already contains the position. `start_batch` only tells `cycle` that the pass
                    # is resumed, so any number except 0 would do.
                    cycles[index] = resumed["cycles"][index]
                    place = start_batch
                else:
                    cycles[index], place = member.place_in_cycles(start_batch)
                batches.append(member.cycle(cycles[index], place))
            elif ended[index] and member.stateful:
                batches.append(iter(()))  # after its end, an iterable with a state would start from its beginning
            else:
                batches.append(member.iterate(start_batch))
        # Resumed members that seek have no record of their end: members of 4 and 3 batches continue after 3 rounds with
        # the last batch of one and the second pass of the other. The number of rounds is therefore a limit, if known.
        limit = None
        if mode == "max_size_cycle" and self.counts is not None:
            limit = self.counts[self.options.rank] - start_batch
        self._rounds = _Rounds(
            self._tree,
            mode,
            batches,
            lambda index, cycle: self._members[index].cycle(cycle, 0),
            ended=ended,
            cycles=cycles,
            limit=limit,
            most_empty=self.options.world,
        )
        return self._rounds

    def _sequence(self, start_batch: int) -> Iterator[Any]:
        # Members of 3 and 5 batches from batch 4 on: the first one is skipped, and the second begins at its batch 1.
        starts: list[tuple[PreparedLoader, int]] = []
        num_to_skip = start_batch
        for member in self._members:
            if member.counts is None:
                starts.append((member, num_to_skip))
                num_to_skip = 0
                continue
            count = member.counts[self.options.rank]
            if num_to_skip < count:
                starts.append((member, num_to_skip))
            num_to_skip = max(0, num_to_skip - count)
        # Opened one by one: workers of a later member start only when it is read.
        return itertools.chain.from_iterable(member.iterate(start) for member, start in starts)

    def filler(self) -> Any:
        if self.raw.mode == "sequential":
            return self._members[0].filler()
        return map_leaves(lambda member: member.filler(), self._tree)


class _Rounds:
    """Iterator over trees with one batch of each member. It keeps no reference to a returned batch."""

    def __init__(
        self,
        tree: object,
        mode: Mode,
        batches: list[Iterator[Any]],
        reopen: Callable[[int, int], Iterator[Any]],
        *,
        ended: list[bool] | None = None,
        cycles: list[int] | None = None,
        limit: int | None = None,
        most_empty: int = 1,
    ) -> None:
        """Store the arguments.

        Args:
            tree: the structure of the members. Only the number and places of its leaves matter.
            mode: any mode except "sequential".
            batches: the opened iterator of each member, in the order of the leaves.
            reopen: `reopen(index, cycle)` opens member `index` for its pass `cycle`, in "max_size_cycle".
            ended: True for each member that has ended at least once. Default: None, no member.
            cycles: number of the current pass of each member, 0-based. Default: None, 0 for each.
            limit: maximum number of trees. Default: None, no limit.
            most_empty: number of successive passes without a batch after which a member is an error. Default: 1.
        """
        self._tree = tree
        self._mode = mode
        self._batches = batches
        self._reopen = reopen
        self.ended = ended or [False] * len(batches)
        self.cycles = cycles or [0] * len(batches)
        self._limit = limit
        self._most_empty = most_empty

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._limit is not None:
            if self._limit <= 0:
                raise StopIteration
            self._limit -= 1
        # In "min_size", `_draw` raises StopIteration at the end of the first member.
        batches = iter([self._draw(index) for index in range(len(self._batches))])
        # The last of the members has ended for the first time in this round: the round has no batch of a first pass.
        if self._mode != "min_size" and all(self.ended):
            raise StopIteration
        # The leaves are visited in the order of `batches`.
        return map_leaves(lambda _: next(batches), self._tree)

    def _draw(self, index: int) -> Any:
        """Return the next batch of a member, from a new pass if its pass has ended. None if it has no further batch."""
        batch = next(self._batches[index], _END)
        if batch is not _END:
            return batch
        self.ended[index] = True
        if self._mode == "min_size":
            raise StopIteration
        if self._mode == "max_size" or all(self.ended):
            return None
        # A member of 1 batch on 3 ranks: its passes go to the ranks in turn, so a rank has no batch in two of three.
        for _ in range(self._most_empty):
            self.cycles[index] += 1
            self._batches[index] = self._reopen(index, self.cycles[index])
            batch = next(self._batches[index], _END)
            if batch is not _END:
                return batch
        raise ConfigurationError(f"CombinedLoader: member {index} is empty and cannot be cycled. Remove it.")


def combined_count(mode: Mode, counts: list[int]) -> int:
    """Return the number of batches of a combination in `mode`, from the numbers of its members."""
    if mode == "min_size":
        return min(counts)
    if mode == "sequential":
        return sum(counts)
    return max(counts)


def map_leaves(fn: Callable[[Any], Any], tree: object) -> Any:
    """Return `tree` with `fn` applied to its leaves.

    Leaves are objects that are not a tree (see `is_tree`), and entries that are a list of values (see
    `is_list_of_values`).
    """

    def map_entry(entry: object) -> Any:
        return fn(entry) if is_list_of_values(entry) else map_leaves(fn, entry)

    if not is_tree(tree):
        return fn(tree)
    if isinstance(tree, Mapping):
        return {key: map_entry(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*map(map_entry, tree))
    if isinstance(tree, tuple):
        return type(tree)(map(map_entry, tree))
    return list(map(map_entry, tree))


def is_tree(tree: object) -> TypeGuard[Sequence[Any] | Mapping[Any, Any]]:
    """Return whether `map_leaves` visits the entries of an object: a tuple, mutable sequence or mapping.

    Data sets are never trees. Other sequences, such as a range, are loaders or data sets themselves.
    """
    return isinstance(tree, (tuple, MutableSequence, Mapping)) and not isinstance(tree, Dataset)


def members_of(tree: Sequence[Any] | Mapping[Any, Any]) -> list[Any]:
    """Return the entries of a sequence, or the values of a mapping."""
    return list(tree.values() if isinstance(tree, Mapping) else tree)


def is_list_of_values(value: object) -> bool:
    """Return whether a list has entries, all of which are numbers or texts.

    Such a list in a tree is a loader whose batches are these values. It is a leaf, although lists are trees otherwise.
    """
    if not isinstance(value, list) or len(value) == 0:
        return False
    return all(isinstance(entry, (int, float, str)) for entry in value)


def leaves_of(tree: object) -> list[Any]:
    """Return the leaves that `map_leaves` visits, in its order."""
    leaves: list[Any] = []
    map_leaves(leaves.append, tree)
    return leaves
