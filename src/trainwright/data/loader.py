"""Make a user's loader ready for one rank: keep it as it is, exchange only the order in which it visits the data."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.rng import isolate_rng
from trainwright.data.combined import CombinedLoader, PreparedCombined, map_leaves
from trainwright.data.iterable import ByShardMethod, ShardedIterable, WorkerPlace, place_iterable, set_place
from trainwright.data.order import epoch_key
from trainwright.data.prepared import Agree, LoaderSettings, PreparedLoader, Stage, Uneven
from trainwright.data.sampler import BatchShard, Dealer, ShardedBatchSampler, mix_seeds

_STAGE_NAMES = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


def prepare_loader(
    loader: Any,
    *,
    stage: Stage,
    rank: int = 0,
    world: int = 1,
    seed: int = 0,
    use_distributed_sampler: bool = True,
    uneven: Uneven = "pad",
    lockstep: bool | None = None,
    agree: Agree | None = None,
    shuffle: bool | None = None,
    name: str | None = None,
) -> PreparedLoader:
    """Return `loader` made ready for one data-parallel rank; the user's own object is not changed.

    What becomes of it:

    - A `DataLoader` (or a sub-class) keeps its workers, collation, pinning and type. Its default sampler is replaced:
      shuffled by the keyed order of (seed, epoch) in training, in the data's order otherwise, dealt to the ranks
      without repeating a sample. A sampler or batch sampler of the user's own is kept and its batches are dealt; a
      distributed one (with `set_epoch` and `num_replicas`) is left alone.
    - A list of batches, or anything with a length and `[index]`, is dealt by index.
    - An iterable data set, or an iterable of batches, must say how it is divided (see `trainwright.data.iterable`) as
      soon as there are several ranks or loader workers.
    - A `CombinedLoader`, or a list or dict of DataLoaders, has each of its members prepared so.

    Args:
        loader: the user's loader.
        stage: evaluation is never shuffled, unless the user's own loader shuffles and there is one rank.
        rank: this rank on the data axis.
        world: number of data-parallel ranks.
        seed: of the order; the same on every rank. A `generator` of the user's DataLoader keeps seeding its workers
            but does not change the order.
        use_distributed_sampler: False: each rank's loader is its own affair and nothing is dealt.
        uneven: what to do when ranks hold different numbers of batches; see `trainwright.data.prepared`.
        lockstep: all ranks do the same number of rounds; None: in training only.
        agree: gathers a short list of integers from every rank, in rank order, over the host. None with several ranks:
            the caller vouches that loaders which are not dealt have the same number of batches everywhere.
        shuffle: overrides whether a default sampler shuffles; None: as the loader says.
        name: of the loader, for messages; by default that of the stage's hook.

    Every rank must call it: like `set_epoch` it may communicate through `agree`.

    Raises:
        ConfigurationError: the loader is empty, or an iterable does not say how it is divided, or ranks are uneven and
            the policy is "error".
    """
    settings = LoaderSettings(
        stage=stage,
        rank=rank,
        world=world,
        seed=seed,
        use_distributed_sampler=use_distributed_sampler,
        uneven=uneven,
        lockstep=stage == "train" if lockstep is None else lockstep,
        agree=agree,
        shuffle=shuffle,
        name=name or _STAGE_NAMES.get(stage, "loader"),
    )
    prepared = _prepare(loader, settings)
    prepared.count_batches()
    return prepared


def _prepare(loader: Any, settings: LoaderSettings) -> PreparedLoader:
    if isinstance(loader, PreparedLoader):
        raise ConfigurationError(f"{settings.name} is prepared already; hand over the loader itself, `.raw`.")
    if isinstance(loader, (list, tuple, Mapping)) and holds_loaders(loader):
        loader = CombinedLoader(loader, "max_size_cycle" if settings.stage == "train" else "sequential")
    if isinstance(loader, CombinedLoader):
        # Each member yields this rank's own batches; the combination is padded as a whole.
        of_member = replace(settings, lockstep=False)
        return PreparedCombined(loader, map_leaves(lambda m: _prepare(m, of_member), loader.iterables), settings)
    if isinstance(loader, DataLoader):
        if isinstance(loader.dataset, IterableDataset):
            return PreparedIterable(loader, settings)
        return PreparedDataLoader(loader, settings)
    if isinstance(loader, Sized) and hasattr(loader, "__getitem__") and not isinstance(loader, (Mapping, str)):
        return PreparedSequence(loader, settings)
    if not hasattr(loader, "__iter__") or isinstance(loader, (Mapping, str)):
        raise ConfigurationError(
            f"{settings.name}: {type(loader).__name__} is no loader. Expected a DataLoader, a list of batches, another "
            "iterable of batches, or a CombinedLoader."
        )
    return PreparedIterable(loader, settings)


class PreparedDataLoader(PreparedLoader):
    """A DataLoader over a map-style data set: the order is ours or the user's, and any place can be reached at once."""

    _dealer: Dealer

    def __init__(self, loader: DataLoader[Any], settings: LoaderSettings) -> None:
        dealer, self._is_dealt = _dealer_for(loader, settings)
        super().__init__(loader, settings, dealer=dealer)
        slot = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._seeds = _WorkerSeeds(loader)
        self._loader = _with(loader, generator=self._seeds.generator, **{slot: dealer})

    @property
    def batch_size(self) -> int | None:
        """Samples in one micro-batch; None for batches that the data set or a user's batch sampler makes."""
        size: int | None = getattr(self._dealer, "batch_size", None)
        return size if self._loader.batch_sampler is not None else None

    def samples_in_round(self, batch: int) -> int | None:
        """Return the samples of that round over all ranks, or None when arithmetic does not give it."""
        return self._dealer.samples_in_round(batch) if self._is_dealt and self.batch_size is not None else None

    def indices(self) -> Iterator[list[int]] | None:
        """Return the data set's indices of this rank's batches; None for a sampler of the user's own."""
        if not isinstance(self._dealer, ShardedBatchSampler):
            return None
        twin = copy.copy(self._dealer)  # the dealer itself is read by the loader, and is ahead of it
        twin.seed_batches = twin.single = False
        twin.start(0)
        return iter(twin)

    def position(self, batch: int) -> dict[str, int]:
        """Return the place in the data after `batch` rounds; see `PreparedLoader.position`."""
        return self._dealer.position(batch) if self._is_dealt else {"batch": batch}

    def indices_in(self, batch: int) -> list[int | str] | None:
        """Return the data set's indices in this rank's batch of that round; see `PreparedLoader.indices_in`."""
        return self._dealer.indices_in(batch) if self.has_batch(batch) else []

    def _turn_to(self, epoch: int, resume: Mapping[str, int] | None) -> None:
        # What other ranks have consumed says nothing about a loader that is this rank's own affair.
        self._dealer.set_epoch(epoch, resume if resume is None or self._is_dealt else {"batch": resume["batch"]})
        if callable(getattr(self._loader, "set_epoch", None)):
            self._loader.set_epoch(epoch)  # type: ignore[attr-defined]

    def _count(self) -> list[int] | int | None:
        counts = self._dealer.counts()
        return counts if self._is_dealt or counts is None else counts[0]

    def _open(self, start_batch: int) -> Iterator[Any]:
        self._begin(start_batch, seekable=True)
        self._dealer.start(start_batch)
        self._seeds.turn_to(self.settings, self.epoch)
        set_place(self.settings.rank, self.settings.world)
        return iter(self._loader)

    def filler(self) -> Any:
        """Return the first batch of the epoch, fetched in this process."""
        slot = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
        alone = _with(self._loader, num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0)
        vars(alone)[slot] = [self._dealer.first()]
        with isolate_rng():
            return next(iter(alone))


class PreparedSequence(PreparedLoader):
    """A list of batches, or anything with a length and `[index]`, dealt by index."""

    _dealer: Dealer

    def __init__(self, batches: Any, settings: LoaderSettings) -> None:
        self._is_dealt = settings.world == 1 or settings.use_distributed_sampler
        rank, world = (settings.rank, settings.world) if self._is_dealt else (0, 1)
        dealer = BatchShard(range(len(batches)), rank=rank, world=world, seed=settings.seed)
        super().__init__(batches, settings, dealer=dealer)

    def position(self, batch: int) -> dict[str, int]:
        """Return the place in the data after `batch` rounds; see `PreparedLoader.position`."""
        return self._dealer.position(batch) if self._is_dealt else {"batch": batch}

    def indices_in(self, batch: int) -> list[int | str] | None:
        """Return the data set's indices in this rank's batch of that round; see `PreparedLoader.indices_in`."""
        return self._dealer.indices_in(batch) if self.has_batch(batch) else []

    def _turn_to(self, epoch: int, resume: Mapping[str, int] | None) -> None:
        self._dealer.set_epoch(epoch, resume if resume is None or self._is_dealt else {"batch": resume["batch"]})
        if callable(getattr(self.raw, "set_epoch", None)):
            self.raw.set_epoch(epoch)

    def _count(self) -> list[int] | int | None:
        counts = self._dealer.counts()
        return counts if self._is_dealt or counts is None else counts[0]

    def _open(self, start_batch: int) -> Iterator[Any]:
        self._begin(start_batch, seekable=True)
        if start_batch == 0 and self._dealer.world == 1:
            return iter(self.raw)
        self._dealer.start(start_batch)
        return map(self.raw.__getitem__, self._dealer)

    def filler(self) -> Any:
        """Return the first batch."""
        return self.raw[0]


class PreparedIterable(PreparedLoader):
    """A DataLoader over an iterable data set, or any iterable of batches: divided as it says, without random access."""

    def __init__(self, loader: Any, settings: LoaderSettings) -> None:
        batched = isinstance(loader, DataLoader)
        dataset = loader.dataset if batched else loader
        self._num_workers: int = loader.num_workers if batched else 0
        self._batch_size: int | None = loader.batch_size if batched else None
        if settings.use_distributed_sampler:
            dataset = place_iterable(
                dataset,
                rank=settings.rank,
                world=settings.world,
                num_workers=self._num_workers,
                block=self._batch_size or 1,
                name=settings.name,
            )
        super().__init__(loader, settings, dealer=self._arithmetic(dataset, loader, settings))
        self._dataset = dataset
        self._seeds: _WorkerSeeds | None = None
        self._loader = dataset
        if batched:
            self._seeds = _WorkerSeeds(loader)
            init = WorkerPlace(settings.rank, settings.world, loader.worker_init_fn)
            self._loader = _with(loader, dataset=dataset, worker_init_fn=init, generator=self._seeds.generator)
        self._state_source = self._find_state(dataset)
        if batched and loader.persistent_workers and dataset is loader.dataset and hasattr(dataset, "set_epoch"):
            warnings.warn(
                f"{settings.name}: workers that outlive an epoch (persistent_workers=True) do not hear of "
                f"{type(dataset).__name__}.set_epoch. Wrap it in ShardedIterable, or give up persistent workers.",
                TrainwrightWarning,
                stacklevel=2,
            )

    @property
    def batch_size(self) -> int | None:
        """Samples in one micro-batch; None when the data set makes the batches."""
        return self._batch_size

    def samples_in_round(self, batch: int) -> int | None:
        """Return the samples of that round over all ranks; only known for a `ShardedIterable` with a length."""
        known = self._dealer is not None and self._batch_size is not None
        return self._dealer.samples_in_round(batch) if known and self._dealer is not None else None

    def _turn_to(self, epoch: int, resume: Mapping[str, int] | None) -> None:
        for part in {id(part): part for part in (self._loader, self._dataset)}.values():
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)

    def _count(self) -> list[int] | int | None:
        if self._dealer is not None:
            return self._dealer.counts()
        if self._num_workers > 1 or isinstance(self._dataset, (ShardedIterable, ByShardMethod)):
            return None
        if isinstance(self._dataset, IterableDataset) and self.settings.world > 1:
            return None  # whether its length is that of the whole or of the part, only its author knows
        try:
            length = len(self._loader)
        except (TypeError, NotImplementedError):
            return None
        if self._seeds is not None:
            # torch compares it with the number of batches fetched and would warn in the user's name.
            vars(self._loader)["_IterableDataset_len_called"] = None
        return length

    def _open(self, start_batch: int) -> Iterator[Any]:
        self._begin(start_batch, seekable=False)
        if self._seeds is not None:
            self._seeds.turn_to(self.settings, self.epoch)
        set_place(self.settings.rank, self.settings.world)
        return iter(self._loader)

    def _arithmetic(self, dataset: Any, loader: Any, settings: LoaderSettings) -> ShardedBatchSampler | None:
        """The numbers of a `ShardedIterable` with a length; its blocks are dealt as a sampler deals micro-batches."""
        size = self._batch_size or 1
        if not isinstance(dataset, ShardedIterable) or dataset.block != size or not isinstance(dataset.dataset, Sized):
            return None
        drop_last = bool(getattr(loader, "drop_last", False))
        return ShardedBatchSampler(
            len(dataset), size, shuffle=False, seed=0, drop_last=drop_last, rank=settings.rank, world=settings.world
        )

    def _find_state(self, dataset: Any) -> Any:
        """The object whose state is the place in the data: the loader's copy, or a data set read in this process."""
        if _keeps_state(self._loader):
            return self._loader
        return dataset if self._num_workers == 0 and _keeps_state(dataset) else None


class _WorkerSeeds:
    """Seeds a loader's workers by (seed, epoch, rank), so that beginning an epoch draws nothing from global generators.

    A resumed run would otherwise draw once more than the uninterrupted one. A generator of the user's own is kept.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._is_ours = loader.generator is None
        self.generator = torch.Generator() if self._is_ours else loader.generator

    def turn_to(self, settings: LoaderSettings, epoch: int) -> None:
        if self._is_ours:
            key = mix_seeds(epoch_key(settings.seed, epoch), settings.rank)
            self.generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)


def _dealer_for(loader: DataLoader[Any], settings: LoaderSettings) -> tuple[Dealer, bool]:
    """Return what replaces the loader's sampler, and whether it deals the data to all ranks."""
    batched = loader.batch_sampler is not None
    is_dealt = settings.world == 1 or (settings.use_distributed_sampler and not _is_distributed(loader))
    rank, world = (settings.rank, settings.world) if is_dealt else (0, 1)
    seed_batches = batched and loader.num_workers > 0
    dealer: Dealer
    if _has_default_sampler(loader):
        dealer = ShardedBatchSampler(
            len(cast(SequentialSampler, loader.sampler).data_source),
            (loader.batch_size or 1) if batched else 1,
            shuffle=_shuffles(loader, settings),
            seed=settings.seed,
            drop_last=batched and loader.drop_last,
            rank=rank,
            world=world,
            single=not batched,
            seed_batches=seed_batches,
        )
    else:
        own: Any = loader.batch_sampler if batched else loader.sampler
        dealer = BatchShard(own, rank=rank, world=world, seed=settings.seed, seed_batches=seed_batches)
    if not is_dealt:
        dealer.stream = settings.rank
    return dealer, is_dealt


def _has_default_sampler(loader: DataLoader[Any]) -> bool:
    """Whether the sampler is what DataLoader makes by itself from `shuffle=`."""
    if loader.batch_sampler is not None and (
        loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler
    ):
        return False
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def _shuffles(loader: DataLoader[Any], settings: LoaderSettings) -> bool:
    if settings.shuffle is not None:
        return settings.shuffle
    wished = type(loader.sampler) is RandomSampler
    if not wished or settings.stage == "train":
        return wished
    kept = settings.world == 1
    warnings.warn(
        f"{settings.name} has shuffle=True. Evaluation does not need it; "
        + ("it is kept." if kept else f"with {settings.world} ranks the data is visited in its own order."),
        TrainwrightWarning,
        stacklevel=2,
    )
    return kept


def _is_distributed(loader: DataLoader[Any]) -> bool:
    """Whether the user's sampler divides the data over ranks by itself, as torch's DistributedSampler does."""
    parts = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(hasattr(part, "num_replicas") and callable(getattr(part, "set_epoch", None)) for part in parts)


def _with(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a shallow copy with other attributes; the constructor is not called, so any sub-class will do."""
    twin = copy.copy(loader)
    # DataLoader forbids setting some of these once it is built, because an iterator may be using them: not here.
    vars(twin).update(attributes, _iterator=None)
    return twin


def holds_loaders(tree: Any) -> bool:
    """Tell a list, tuple or dict of loaders from one of batches; its first entry decides.

    Only a DataLoader or CombinedLoader counts as a loader: an iterable of another kind may as well be a batch.
    """
    while isinstance(tree, (list, tuple, Mapping)) and tree:
        tree = next(iter(tree.values() if isinstance(tree, Mapping) else tree))
    return isinstance(tree, (DataLoader, CombinedLoader))


def _keeps_state(source: Any) -> bool:
    return callable(getattr(source, "state_dict", None)) and callable(getattr(source, "load_state_dict", None))
