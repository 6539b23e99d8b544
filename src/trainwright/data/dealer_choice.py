"""Choice of the sampler that replaces the sampler of a user's DataLoader."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from trainwright.core.errors import TrainwrightWarning
from trainwright.data.dealer import Dealer, Seeding
from trainwright.data.iterable import sets_epoch
from trainwright.data.loader_options import LoaderOptions
from trainwright.data.sampler import ShardedBatchSampler
from trainwright.data.user_sampler import BatchShard, SplitBatchShard


def dealer_for(loader: DataLoader[Any], options: LoaderOptions) -> tuple[Dealer, bool]:
    """Return the sampler that replaces the loader's sampler, and whether it divides the data over all ranks."""
    batched = loader.batch_sampler is not None
    divides_itself = is_distributed(loader)
    # shuffle=False requests the order of the data, whatever the sampler is. A distributed sampler is only replaced if
    # the data is divided here instead.
    in_order = options.shuffle is False and _has_plain_batches(loader)
    if divides_itself and not options.use_distributed_sampler:
        in_order = False
    keeps_distributed_sampler = divides_itself and not in_order
    # The data is divided here unless each rank has its own data, or a distributed sampler that stays divides it.
    is_dealt = options.world == 1 or (options.use_distributed_sampler and not keeps_distributed_sampler)
    rank = options.rank if is_dealt else 0
    world = options.world if is_dealt else 1
    seeding = _seeding(loader, options)
    completes = options.completes_rounds and world > 1
    dealer: Dealer
    if in_order or _has_default_sampler(loader):
        # A user's SequentialSampler may have another data source than the loader's data set.
        data = loader.dataset if in_order else cast(SequentialSampler, loader.sampler).data_source
        batch_size = (loader.batch_size or 1) if batched else 1
        if batched and options.split_batches:
            batch_size //= world
        dealer = ShardedBatchSampler(
            cast(Sized, data),
            batch_size,
            shuffle=_shuffles(loader, options),
            seed=options.seed,
            drop_last=batched and loader.drop_last,
            rank=rank,
            world=world,
            single=not batched,
            seeding=seeding,
            completes=completes,
        )
    else:
        sampler: Any = loader.batch_sampler if batched else loader.sampler
        kind = SplitBatchShard if options.split_batches and world > 1 else BatchShard
        dealer = kind(sampler, rank=rank, world=world, seed=options.seed, seeding=seeding, completes=completes)
    if not is_dealt:
        dealer.stream = options.rank  # each rank has its own data: the stream keeps the seeds of ranks apart
    return dealer, is_dealt


def _seeding(loader: DataLoader[Any], options: LoaderOptions) -> Seeding:
    has_workers = loader.num_workers > 0
    if options.per_sample_rng:
        return "sample in worker" if has_workers else "sample here"
    # Without workers, samples draw from the generators of this process, which checkpoints contain.
    return "batch" if has_workers else "none"


def _has_default_sampler(loader: DataLoader[Any]) -> bool:
    """Return whether the sampler is the default one of DataLoader for `shuffle=`."""
    if not _has_plain_batches(loader):
        return False
    sampler: Any = loader.sampler
    if _is_plain(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def _has_plain_batches(loader: DataLoader[Any]) -> bool:
    """Return whether batches are successive indices of the sampler, or single indices."""
    if loader.batch_sampler is None:
        return True
    return loader.batch_size is not None and _is_plain(loader.batch_sampler, BatchSampler)


def _is_plain(sampler: object, kind: type) -> bool:
    """Return whether a sampler is torch's own, or its replacement in torchdata's StatefulDataLoader."""
    if type(sampler) is kind:
        return True
    name = (type(sampler).__module__, type(sampler).__name__)  # compared by name: torchdata may not be installed
    return name == ("torchdata.stateful_dataloader.sampler", kind.__name__)


def _shuffles(loader: DataLoader[Any], options: LoaderOptions) -> bool:
    """Return whether the order is random. Warn if a loader of an evaluation shuffles."""
    if options.shuffle is not None:
        return options.shuffle
    is_random = _is_plain(loader.sampler, RandomSampler)
    if not is_random or options.stage == "train":
        return is_random
    is_kept = options.world == 1
    effect = "it is kept." if is_kept else f"with {options.world} ranks the data is visited in its own order."
    warnings.warn(
        f"{options.title} has shuffle=True. Evaluation does not need it; {effect}", TrainwrightWarning, stacklevel=2
    )
    return is_kept


def is_distributed(loader: DataLoader[Any]) -> bool:
    """Return whether the user's sampler divides the data over ranks itself, as torch's DistributedSampler does."""
    parts = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(hasattr(part, "num_replicas") and sets_epoch(part) for part in parts)
