"""Preparation of a user's loader for one rank. Only the samplers, or the iterable data set, are replaced."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, TypeGuard, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.rng import isolate_rng
from trainwright.data.combined import CombinedLoader, PreparedCombined, is_list_of_values, is_tree, map_leaves
from trainwright.data.dealer import Dealer
from trainwright.data.dealer_choice import dealer_for, is_distributed
from trainwright.data.iterable import (
    ByShardMethod,
    KeptStream,
    ShardedIterable,
    WorkerPlace,
    keeps_state,
    place_iterable,
    set_place,
    sets_epoch,
)
from trainwright.data.loader_options import LoaderOptions, check_divisible
from trainwright.data.order import epoch_key
from trainwright.data.prepared import PreparedLoader
from trainwright.data.sampler import ShardedBatchSampler
from trainwright.data.seeding import (
    Indexed,
    IsolatedFetches,
    OneByOne,
    SeededTurns,
    batch_key,
    fetch_seeded,
    sample_key,
)
from trainwright.data.user_sampler import BatchShard, SplitBatchShard, mix_seeds


def prepare_loader(loader: object, options: LoaderOptions) -> PreparedLoader:
    """Prepare `loader` for one data-parallel rank. The user's object is not changed.

    - A `DataLoader` (or a sub-class) keeps its workers, collation, pinning and type. Its default sampler is replaced:
      by a `ShardedBatchSampler`, in a `ShuffledOrder` if it shuffles, else in the order of the data. Evaluations on
      several ranks do not shuffle. Samples are divided over the ranks without repetition. The batches of a user's own
      sampler or batch sampler are divided. A distributed sampler (with `set_epoch` and `num_replicas`) is not changed.
      With the option `shuffle=False`, the order of the data also replaces these samplers, but not a user's own batch
      sampler.
    - A list of batches, or another object with a length and `[index]`, is divided by index.
    - An iterable data set, or an iterable of batches, must declare how it is divided (see `trainwright.data.iterable`)
      if there are several ranks or loader workers.
    - Each member of a `CombinedLoader`, or of a list or dict of loaders (see `holds_loaders`), is prepared separately.

    Call this function on every rank, because it may communicate through `agree`.

    Args:
        loader: the user's loader.
        options: stage, rank, and how data is divided.

    Raises:
        ConfigurationError: the object is not a loader or is already prepared, the loader is empty, an iterable does not
            declare how it is divided, ranks are uneven with the policy "error" (or one has no batch, with "stop"),
            `per_sample_rng` is used with an iterable, or the batches cannot be divided for `split_batches`.

    Warns:
        TrainwrightWarning: the object is a data set, an evaluation shuffles, or persistent workers would keep the first
            epoch of a data set with `set_epoch`.
    """
    prepared = _prepare(loader, options)
    prepared.count_batches()
    return prepared


def _prepare(loader: object, options: LoaderOptions) -> PreparedLoader:
    if isinstance(loader, PreparedLoader):
        raise ConfigurationError(f"{options.title} is already prepared. Pass the original loader, its attribute raw.")
    if holds_loaders(loader):
        loader = CombinedLoader(loader, "max_size_cycle" if options.stage == "train" else "sequential")
    if isinstance(loader, CombinedLoader):
        # Members do not pad: each yields this rank's own batches, and the combination is padded as one loader.
        of_member = replace(options, lockstep=False)
        members = map_leaves(lambda member: _prepare(member, of_member), loader.iterables)
        return PreparedCombined(loader, members, options)
    if options.split_batches and options.world > 1:
        options = _check_split(loader, options)
    if isinstance(loader, DataLoader):
        if isinstance(loader.dataset, IterableDataset):
            return PreparedIterable(loader, options)
        return PreparedDataLoader(loader, options)
    if isinstance(loader, Dataset):
        warnings.warn(
            f"{options.title}: a {type(loader).__name__} is a data set, not a loader: each of its samples is used as "
            "a batch, in their order. Write DataLoader(data, batch_size=…, shuffle=…), or batch_size=None if it "
            "holds batches.",
            TrainwrightWarning,
            stacklevel=2,
        )
    is_refused = isinstance(loader, (Mapping, str))  # iterating gives keys or letters, not batches
    has_indices = isinstance(loader, Sized) and hasattr(loader, "__getitem__")
    if has_indices and not is_refused:
        return PreparedSequence(cast("Indexed", loader), options)
    if is_refused or not hasattr(loader, "__iter__"):
        raise ConfigurationError(
            f"{options.title}: {type(loader).__name__} is not a loader. Expected a DataLoader, a list of batches, "
            "another iterable of batches, or a CombinedLoader."
        )
    return PreparedIterable(loader, options)


def _check_split(loader: object, options: LoaderOptions) -> LoaderOptions:
    """Check that each batch of a loader can be divided over the ranks. Return the options for this division.

    If the loader drops incomplete batches, the policy becomes "stop": all ranks drop the last one together.

    Raises:
        ConfigurationError: the loader has no batch size, the batch size is not divisible by the number of ranks, or the
            sampler already divides the data.
    """
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        raise ConfigurationError(
            f"split_batches=True divides each batch of a DataLoader over {options.world} processes. {options.title} is "
            f"a {type(loader).__name__} without a batch size. Give the DataLoader one, or pass split_batches=False."
        )
    if is_distributed(loader):
        raise ConfigurationError(
            "split_batches=True divides each batch of a DataLoader, and its sampler divides the data already. Remove "
            "the distributed sampler, or pass split_batches=False."
        )
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size is not None:
        check_divisible(size, options.world)
    if loader.drop_last:
        return replace(options, uneven="stop")
    return options


class _PreparedByIndex(PreparedLoader):
    """Loader whose batches of indices a `Dealer` assigns to ranks. Starting at any batch reads no earlier data."""

    _dealer: Dealer

    def use(self, options: LoaderOptions) -> None:
        super().use(options)
        # The numbers of batches depend on `completes`, which is False for data that is not divided.
        self._dealer.completes = self._completes
        if self._is_dealt:
            self._counts = self._dealer.counts()
            self._fewest = min(self._counts or [0])

    @property
    def can_seek(self) -> bool:
        return True

    def position(self, batch: int) -> dict[str, int]:
        if self._is_dealt:
            return self._dealer.position(batch)
        return super().position(batch)

    def real_rows(self, batch: int) -> int | None:
        return self._dealer.real_rows(batch) if self._completes else None

    @property
    def _completes(self) -> bool:
        """True if the last round is completed, so that all ranks have equal numbers of samples."""
        return self.options.completes_rounds and self._is_dealt and self.options.world > 1

    # Passes that follow one another are dealt as one. With n micro-batches in a pass, over all ranks, micro-batch m of
    # all passes goes to rank m mod world, and is micro-batch m mod n of its pass. With n = 3 and two ranks, rank 0 gets
    # 0, 2 and then 1; rank 1 gets 1 and 0, 2. Passes are not dealt as one if each rank has its own data, or a part of
    # every micro-batch (`SplitBatchShard`).

    @property
    def _cycle_length(self) -> int | None:
        """Number of micro-batches of one pass over all ranks. None if unknown, or if passes are not dealt as one."""
        if not self._is_dealt or self._dealer.world != self.options.world:
            return None
        # This counts a full pass here: a `CombinedLoader` resumes its members by `start_batch`, not within the dealer.
        return self._dealer.micro_batches_left

    def place_in_cycles(self, start_batch: int) -> tuple[int, int]:
        length = self._cycle_length
        world = self.options.world
        if not length:
            return super().place_in_cycles(start_batch)
        # n = 3, two ranks: batch 2 of rank 1 is micro-batch 5 of all passes, which is micro-batch 2 of pass 1. Rank 1
        # has 0 and 2 in this pass, so it is the rank's batch 1 there.
        cycle, micro_batch = divmod(start_batch * world + self.options.rank, length)
        return cycle, micro_batch // world

    def cycle(self, cycle: int, start_batch: int) -> Iterator[Any]:
        length = self._cycle_length
        rank = self._dealer.rank
        if not length or cycle == 0:
            return super().cycle(cycle, start_batch)
        try:
            # This rank's first micro-batch in the pass. In pass 1 of the example, rank 0 has 1 and rank 1 has 0.
            self._dealer.rank = (rank - cycle * length) % self.options.world
            # The dealer's iterator reads its rank when it is created, so that `_open`, which this call runs, must
            # create it at once. If rounds are completed, the iterator also reads the rank later, but then `length` is a
            # multiple of the number of ranks, and the rank is unchanged.
            return super().cycle(cycle, start_batch)
        finally:
            self._dealer.rank = rank

    def indices_in(self, batch: int) -> list[int | str] | None:
        return self._dealer.indices_in(batch) if self.has_batch(batch) else []

    def _turn_to(self, epoch: int, resume: Mapping[str, int] | None) -> None:
        if sets_epoch(self._loader):  # first: its length may depend on the epoch
            self._loader.set_epoch(epoch)
        if resume is not None and not self._is_dealt:
            # The counts of samples and micro-batches in a position are sums over all ranks, but this rank alone reads
            # its own data.
            resume = {"batch": resume["batch"]}
        self._dealer.set_epoch(epoch, resume)

    def _count(self) -> list[int] | int | None:
        counts = self._dealer.counts()
        if counts is None or self._is_dealt:
            return counts
        return counts[0]  # this rank's own data: the dealer has world=1


class PreparedDataLoader(_PreparedByIndex):
    """Prepared DataLoader over a map-style data set, which can start at any position."""

    def __init__(self, loader: DataLoader[Any], options: LoaderOptions) -> None:
        dealer, self._is_dealt = dealer_for(loader, options)
        super().__init__(loader, options, dealer=dealer)
        slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._seeds = _WorkerSeeds(loader)
        # Set by StatefulDataLoader.load_state_dict (torchdata 0.11) for its next iterator.
        if getattr(loader, "next_iter_state", None) is not None:
            raise ConfigurationError(
                f"{options.title} got a state by load_state_dict before it was passed to the Trainer. The position in "
                "map-style data is counted in samples and saved in checkpoints. Pass a new loader, and ckpt_path."
            )
        changes: dict[str, Any] = {
            slot: dealer,
            "worker_init_fn": options.worker_start(loader.worker_init_fn),
            "generator": self._seeds.generator,
        }
        if options.per_sample_rng and callable(getattr(loader.dataset, "__getitems__", None)):
            changes["dataset"] = OneByOne(cast("Indexed", loader.dataset))
        self._loader = copy_loader(loader, **changes)
        _warn_of_workers_without_epoch(loader, options, "Do not use persistent workers.")

    def _turn_to(self, epoch: int, resume: Mapping[str, int] | None) -> None:
        # First, because the length may depend on the epoch. Workers receive the data set with its epoch at their start.
        if sets_epoch(self.raw.dataset):
            self.raw.dataset.set_epoch(epoch)
        super()._turn_to(epoch, resume)

    @property
    def batch_size(self) -> int | None:
        return self._dealer.batch_size if self._loader.batch_sampler is not None else None

    @property
    def num_full_rounds(self) -> int:
        return 0 if self._is_split else super().num_full_rounds

    def has_batch(self, batch: int) -> bool:
        if self._is_split:
            return self._dealer.has_batch(batch)
        return super().has_batch(batch)

    def real_ranks(self, batch: int) -> int:
        if self._is_split:
            return self._dealer.real_ranks(batch)
        return super().real_ranks(batch)

    @property
    def _is_split(self) -> bool:
        """True if each batch is divided over the ranks. Sizes are then known only after the sampler drew the batch."""
        return isinstance(self._dealer, SplitBatchShard)

    def samples_in_round(self, batch: int) -> int | None:
        if not self._is_dealt or self.batch_size is None:
            return None
        return self._dealer.samples_in_round(batch)

    def indices(self) -> Iterator[list[int]] | None:
        if not isinstance(self._dealer, ShardedBatchSampler):
            return None
        twin = copy.copy(self._dealer)  # the loader's workers read ahead of the loop, from the dealer itself
        twin.seeding = "none"
        twin.single = False
        twin.start(0)
        return iter(twin)

    def _open(self, start_batch: int) -> Iterator[Any]:
        self._begin(start_batch)
        self._dealer.start(start_batch)
        self._seeds.turn_to(self.options, self.epoch)
        set_place(self.options.rank, self.options.world)
        batches = self._workers.keep(iter(self._loader))  # creates the dealer's iterator, see `cycle`
        return IsolatedFetches(batches) if self._dealer.seeding == "sample here" else batches

    def filler(self) -> Any:
        """Return the first batch of the epoch, fetched in this process."""
        if not self._is_dealt and self._dealer.counts() == [0]:
            return super().filler()  # raises the error: this rank's own data is empty
        slot = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
        alone = copy_loader(self._loader, num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0)
        vars(alone)[slot] = [self._dealer.first()]
        with isolate_rng():
            return next(iter(alone))


class PreparedSequence(_PreparedByIndex):
    """List of batches, or another object with a length and `[index]`, divided by index."""

    def __init__(self, batches: Indexed, options: LoaderOptions) -> None:
        self._is_dealt = options.world == 1 or options.use_distributed_sampler
        rank = options.rank if self._is_dealt else 0
        world = options.world if self._is_dealt else 1
        completes = options.completes_rounds and world > 1
        dealer = BatchShard(SequentialSampler(batches), rank=rank, world=world, seed=options.seed, completes=completes)
        super().__init__(batches, options, dealer=dealer)
        self._loader = batches

    def _open(self, start_batch: int) -> Iterator[Any]:
        self._begin(start_batch)
        self._dealer.start(start_batch)
        if self.options.per_sample_rng:
            key = sample_key(self.options.seed, self.epoch, 0 if self._is_dealt else self.options.rank)
            # A generator function, whose body runs at the first batch: `iter` is called here, see `cycle`.
            return fetch_seeded(self.raw.__getitem__, iter(self._dealer), key)
        if start_batch == 0 and self._dealer.world == 1:
            return iter(self.raw)  # the object's own iterator, which may be faster than `[index]`
        return map(self.raw.__getitem__, self._dealer)

    def filler(self) -> Any:
        if len(self.raw) == 0:
            return super().filler()  # raises the error: this rank's own data is empty
        return self.raw[0]


class PreparedIterable(PreparedLoader):
    """DataLoader over an iterable data set, or any iterable of batches: divided as declared, without random access."""

    def __init__(self, loader: Iterable[Any], options: LoaderOptions) -> None:
        if options.per_sample_rng:
            raise ConfigurationError(
                f"per_sample_rng=True, but {options.title} reads an iterable, whose samples have no index to derive "
                "their randomness from. Use a map-style data set, or remove per_sample_rng."
            )
        data_loader = loader if isinstance(loader, DataLoader) else None
        dataset: Any = loader if data_loader is None else data_loader.dataset
        self._num_workers = 0 if data_loader is None else data_loader.num_workers
        self._batch_size = None if data_loader is None else data_loader.batch_size
        if options.split_batches and self._batch_size is not None:
            self._batch_size //= options.world
        if options.use_distributed_sampler:
            dataset = place_iterable(
                dataset,
                rank=options.rank,
                world=options.world,
                num_workers=self._num_workers,
                block=self._batch_size or 1,
                name=options.title,
            )
        super().__init__(loader, options, dealer=self._counting_dealer(dataset, loader, options))
        self._dataset = dataset  # this rank's part; the user's object if it is not divided here
        # The next two are None for an iterable of batches, which is not a DataLoader.
        self._seeds: _WorkerSeeds | None = None
        self._turns: SeededTurns | None = None  # also None without workers, or if the loader has no state
        self._loader = dataset
        if data_loader is not None:
            self._seeds = _WorkerSeeds(data_loader)
            if self._num_workers > 0 and keeps_state(data_loader):
                # A resume starts new workers: their random numbers must not depend on earlier ones.
                self._turns = SeededTurns(self._batch_size)
            self._loader = self._copy_for_rank(data_loader, self._seeds.generator)
        self._state_source = self._find_state(dataset)
        # The wrappers that `place_iterable` creates pass the epoch to their workers.
        if data_loader is not None and dataset is data_loader.dataset:
            advice = "Wrap it in ShardedIterable, or do not use persistent workers."
            _warn_of_workers_without_epoch(data_loader, options, advice)

    def _copy_for_rank(self, loader: DataLoader[Any], generator: torch.Generator) -> DataLoader[Any]:
        """Return a copy of the user's loader that reads this rank's part of the data."""
        options = self.options
        size = self._batch_size
        changes: dict[str, Any] = {
            "dataset": self._dataset,
            "worker_init_fn": WorkerPlace(options.rank, options.world, options.worker_start(loader.worker_init_fn)),
            "generator": generator,
        }
        if size is not None and size != loader.batch_size:  # divided for `split_batches`
            changes["batch_size"] = size
            changes["batch_sampler"] = BatchSampler(loader.sampler, size, loader.drop_last)
        if self._turns is not None:
            slot = "sampler" if size is None else "batch_sampler"
            changes[slot] = self._turns
            if keeps_state(self._dataset):
                changes["dataset"] = KeptStream(self._dataset)
        return copy_loader(loader, **changes)

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    def samples_in_round(self, batch: int) -> int | None:
        if self._dealer is None or self._batch_size is None:
            return None
        return self._dealer.samples_in_round(batch)

    def _turn_to(self, epoch: int, resume: Mapping[str, int] | None) -> None:
        if sets_epoch(self._loader):
            self._loader.set_epoch(epoch)
        if self._dataset is not self._loader and sets_epoch(self._dataset):
            self._dataset.set_epoch(epoch)

    def _count(self) -> list[int] | int | None:
        if self._dealer is not None:
            return self._dealer.counts()
        if self._num_workers > 1 or isinstance(self._dataset, (ShardedIterable, ByShardMethod)):
            return None
        if isinstance(self._dataset, IterableDataset) and self.options.world > 1:
            return None  # its length may be that of all data or of the part
        try:
            length = len(self._loader)
        except (TypeError, NotImplementedError):
            return None
        if self._seeds is not None:
            # `len` stores the data set's length here, and torch (2.13) would warn when more batches are fetched.
            vars(self._loader)["_IterableDataset_len_called"] = None
        return length

    def _open(self, start_batch: int) -> Iterator[Any]:
        self._begin(start_batch)
        return self._begin_pass()

    def _begin_pass(self) -> Iterator[Any]:
        options = self.options
        if self._seeds is not None:
            self._seeds.turn_to(options, self.epoch)
        if self._turns is not None:
            self._turns.turn_to(batch_key(options.seed, self.epoch, options.rank))
        set_place(options.rank, options.world)
        return self._workers.keep(iter(self._loader))

    def _own_state(self) -> dict[str, Any]:
        return {"num_workers": self._num_workers, "state": self._state_source.state_dict()}

    def _load_own(self, state: Mapping[str, Any], *, at_epoch_start: bool) -> None:
        is_state_of_workers = self._num_workers > 0 and not self._loader.persistent_workers
        if at_epoch_start and is_state_of_workers:
            return  # the workers that had this state ended with their epoch, and new ones start from the beginning
        if state["num_workers"] != self._num_workers:
            raise ConfigurationError(
                f"{self.options.title}: the checkpoint holds the states of num_workers={state['num_workers']}, which "
                f"num_workers={self._num_workers} cannot load. Use the same number of workers, or resume from a "
                "checkpoint at an epoch's end."
            )
        self._state_source.load_state_dict(state["state"])
        if at_epoch_start:
            # Open the pass that has ended, without reading from it: the state then takes effect as in the interrupted
            # run, and the next pass begins where this one ended.
            self._begin_pass()

    def _counting_dealer(self, dataset: object, loader: object, options: LoaderOptions) -> ShardedBatchSampler | None:
        """Return a `Dealer` that computes numbers of batches but divides nothing, or None if they are unknown."""
        if not isinstance(dataset, ShardedIterable) or not isinstance(dataset.dataset, Sized):
            return None
        # Only blocks of one batch go to the ranks as the batches of a ShardedBatchSampler do.
        size = self._batch_size or 1
        if dataset.block != size:
            return None
        drop_last = bool(getattr(loader, "drop_last", False))
        return ShardedBatchSampler(
            dataset, size, shuffle=False, seed=0, drop_last=drop_last, rank=options.rank, world=options.world
        )

    def _find_state(self, dataset: object) -> Any:
        """Return the object whose state is the position: the copied loader, or a data set without workers, or None."""
        if keeps_state(self._loader):
            return self._loader
        if self._num_workers == 0 and keeps_state(dataset):
            return dataset
        return None  # the state is in a worker, and torch's DataLoader does not return it


class _WorkerSeeds:
    """Seeds of a loader's workers, computed from (seed, epoch, rank).

    torch draws these seeds from a global generator, whose state differs after a resume. If the user's loader has its
    own generator, that one is used, and the user seeds it.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._is_ours = loader.generator is None
        self.generator = torch.Generator() if self._is_ours else loader.generator

    def turn_to(self, options: LoaderOptions, epoch: int) -> None:
        """Seed the generator for an epoch. Call this before the loader's iterator is created, which draws from it."""
        if self._is_ours:
            key = mix_seeds(epoch_key(options.seed, epoch), options.rank)
            self.generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)


def _warn_of_workers_without_epoch(loader: DataLoader[Any], options: LoaderOptions, advice: str) -> None:
    # Persistent workers hold copies of the data set from the first epoch.
    if loader.persistent_workers and sets_epoch(loader.dataset):
        warnings.warn(
            f"{options.title}: {type(loader.dataset).__name__}.set_epoch is not called in persistent workers "
            f"(persistent_workers=True). {advice}",
            TrainwrightWarning,
            stacklevel=2,
        )


def copy_loader(loader: DataLoader[Any], **attributes: object) -> DataLoader[Any]:
    """Return a shallow copy with other attributes. The constructor is not called, so any sub-class is supported."""
    twin = copy.copy(loader)
    # DataLoader.__setattr__ forbids `dataset`, `batch_size` and others after construction, because an iterator may use
    # them. The copy has no iterator yet.
    vars(twin).update(attributes, _iterator=None)
    if hasattr(twin, "_initial_iter_for_state_dict"):
        # StatefulDataLoader creates an iterator when its state is read, and uses it for the next pass. That iterator
        # belongs to the original.
        vars(twin)["_initial_iter_for_state_dict"] = False
    return twin


def holds_loaders(tree: object) -> TypeGuard[Sequence[Any] | Mapping[Any, Any]]:
    """Return whether an object is a sequence or mapping of loaders rather than of batches.

    True if its first leaf is a DataLoader, a CombinedLoader or an iterator. Also True if all entries of a container on
    the way down to this leaf are lists of numbers and texts, as in Lightning: `[[1, 2], [3, 4]]` contains two loaders.
    Other iterables may be batches.
    """
    if not is_tree(tree):
        return False
    while is_tree(tree) and tree:
        entries = tree.values() if isinstance(tree, Mapping) else tree
        if all(map(is_list_of_values, entries)):
            return True
        tree = next(iter(entries))  # one level down, towards the first leaf
    return isinstance(tree, (DataLoader, CombinedLoader, Iterator))
