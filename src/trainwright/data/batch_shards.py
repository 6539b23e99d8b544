"""Samplers, data sets and loaders with Accelerate's names. They divide data over processes or skip first batches.

Use them in user-written training loops. A Trainer and `Accelerator.prepare` divide loaders automatically.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from trainwright.core.errors import ConfigurationError
from trainwright.data.iterable import sets_epoch
from trainwright.data.loader import copy_loader
from trainwright.data.loader_options import check_divisible
from trainwright.data.rounds import completed, rounds_of_batches

_FETCH_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


class SeedableRandomSampler(RandomSampler):
    """Random sampler whose order depends on a seed and the epoch alone. A complete pass increments the epoch.

    Args:
        data_source, replacement, num_samples: see `RandomSampler`.
        generator: generator that each pass seeds with `data_seed + epoch`. Default: None, a new generator.
        data_seed: seed of epoch 0, the same on every process. Default: torch's initial seed at construction.
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        """Iterate over the indices of the epoch."""
        if self.generator is None:
            self.generator = torch.Generator(device=torch.get_default_device())
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (0-based) of the next pass."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """Batches of one process, from a batch sampler that is the same on every process.

    Consecutive batches go to consecutive processes. With `split_batches` each batch is divided instead. A round is one
    batch per process, or the batch that is divided. An incomplete last round is dropped if the batch sampler has
    `drop_last`. Otherwise it is completed with samples from the beginning, or without `even_batches` left incomplete.

    Args:
        batch_sampler: a batch sampler, or a list of batches. Without an attribute `batch_size`, batches may differ in
            size, and an incomplete round is completed with whole batches from the beginning.
        num_processes: number of processes. Default: 1.
        process_index: index of this process. Default: 0.
        split_batches: divide each batch over the processes. Default: False.
        even_batches: return the same number of batches on all processes. Default: True.

    Raises:
        ConfigurationError: `process_index` is out of range, or the batch size for `split_batches` is unknown or not
            divisible.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler | Sequence[Sequence[Any]],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]  # unknown
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        _check_index(process_index, num_processes)
        if split_batches:
            check_divisible(self.batch_size, num_processes)

    @property
    def total_length(self) -> int:
        """Number of batches of `batch_sampler`."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        """Return the number of batches of this process. Without `even_batches`, processes may differ by one batch.

        With `split_batches`, return the number of divided batches. Without `even_batches`, a process without a part of
        a short last batch then yields one batch less.
        """
        if self.split_batches:
            return self.total_length
        # 5 batches on 3 processes: one complete round, and a round of 2 batches.
        num_rounds, rest = divmod(self.total_length, self.num_processes)
        if self.drop_last or rest == 0:
            return num_rounds
        has_last_batch = self.even_batches or self.process_index < rest
        return num_rounds + 1 if has_last_batch else num_rounds

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of this process."""
        return self._parts() if self.split_batches else self._batches()

    def _parts(self) -> Iterator[Any]:
        part = cast(int, self.batch_size) // self.num_processes
        for indices in _shares(iter(self.batch_sampler), part, self, completes=self.even_batches):
            # Without `even_batches`, a short batch may have no part for this process.
            if indices:
                yield indices

    def _batches(self) -> Iterator[Any]:
        rounds = rounds_of_batches(
            self.batch_sampler,
            self.num_processes,
            self.batch_size,
            drop_last=self.drop_last,
            completes=self.even_batches,
        )
        for batches, _ in rounds:
            # Without `even_batches`, the last round may have fewer batches than processes.
            if self.process_index < len(batches):
                yield batches[self.process_index]


class IterableDatasetShard(IterableDataset[Any]):
    """Samples of one process, from an iterable data set that is the same on every process.

    Every process reads the full data set. A round is one batch of each process, in the order of the processes. An
    incomplete last round is completed with samples of the first round, or dropped.

    Args:
        dataset: the data set. Its method `set_epoch` is called. Without such a method, its `generator` (a
            `torch.Generator`) is seeded with the epoch at the start of each pass.
        batch_size: samples per batch of one process, or with `split_batches` of all processes. Default: 1.
        drop_last: drop an incomplete last round. Default: False.
        num_processes, process_index, split_batches: see `BatchSamplerShard`.

    Raises:
        ConfigurationError: `process_index` is out of range, or `batch_size` is not divisible for `split_batches`.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        _check_index(process_index, num_processes)
        if split_batches:
            check_divisible(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0

    @property
    def _share(self) -> int:
        """Number of samples of one process in a round."""
        if self.split_batches:
            return self.batch_size // self.num_processes
        return self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (0-based) of the next pass, also of the data set."""
        self.epoch = epoch
        if sets_epoch(self.dataset):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of samples of this process. Raises TypeError if the data set has no length."""
        # 10 samples, 2 processes, batches of 2: two complete rounds, and one that is completed or dropped.
        num_rounds, rest = divmod(len(cast(Sized, self.dataset)), self._share * self.num_processes)
        if rest > 0 and not self.drop_last:
            num_rounds += 1
        return num_rounds * self._share

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the samples of this process."""
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not sets_epoch(self.dataset):
            generator.manual_seed(self.epoch)
        rounds = _lists_of(iter(self.dataset), self._share * self.num_processes)
        for share in _shares(rounds, self._share, self):
            yield from share


def _lists_of(samples: Iterator[Any], size: int) -> Iterator[list[Any]]:
    """Yield the samples in lists of `size`. The last list may be shorter."""
    while True:
        next_samples = list(islice(samples, size))
        if not next_samples:
            return
        yield next_samples


class SkippableLoader(DataLoader[Any]):
    """Loader with a method to skip batches, such as a loader prepared by an Accelerator."""

    def skip(self, num_batches: int) -> DataLoader[Any]:
        """Return a loader that skips the first `num_batches` batches of each pass over this loader."""
        raise NotImplementedError


class RoundLoader(DataLoader[Any]):
    """Loader that may read several batches of its data set for each batch that it returns, one for each process."""

    @property
    def batches_per_round(self) -> int:
        """Number of batches of the data set that are read in a round, in which each process returns one batch."""
        return 1


class SkipBatchSampler(BatchSampler):
    """Batch sampler that skips the first batches of another batch sampler in every pass.

    Args:
        batch_sampler: a batch sampler, or another iterable of batches.
        skip_batches: number of batches that are skipped. Default: 0.

    Other attributes are those of the batch sampler.

    Raises:
        ConfigurationError: `skip_batches` is negative or not an integer.
    """

    def __init__(self, batch_sampler: Iterable[Any], skip_batches: int = 0) -> None:
        check_number("skip_batches", skip_batches)
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    @property
    def total_length(self) -> int:
        """Number of batches of the batch sampler, including skipped batches."""
        return len(cast(Sized, self.batch_sampler))

    def __len__(self) -> int:
        """Return the number of batches of a pass."""
        return max(0, self.total_length - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches that follow the skipped batches."""
        return islice(self.batch_sampler, self.skip_batches, None)

    def __getattr__(self, name: str) -> Any:
        # While it is copied or unpickled, the object has no attributes, and reading one would recurse.
        if name.startswith("__") or "batch_sampler" not in vars(self):
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


class SkipDataLoader(DataLoader[Any]):
    """DataLoader that skips the first batches of every pass. Batches of an iterable data set are fetched and dropped.

    Args:
        skip_batches: number of batches that are skipped. Default: 0.
        dataset, **kwargs: arguments of `DataLoader`.

    Raises:
        ConfigurationError: `skip_batches` is negative or not an integer.
    """

    def __init__(self, dataset: Any, skip_batches: int = 0, **kwargs: Any) -> None:
        check_number("skip_batches", skip_batches)
        super().__init__(dataset, **kwargs)
        self.skip_batches = skip_batches
        if not isinstance(dataset, IterableDataset):
            # Not by assignment: DataLoader.__setattr__ forbids it after construction, because an iterator may use the
            # old sampler. This loader has no iterator yet.
            vars(self).update(_skipping(self, skip_batches))

    @property
    def _num_dropped(self) -> int:
        """Number of batches that are fetched and dropped at the start of a pass."""
        return self.skip_batches if isinstance(self.dataset, IterableDataset) else 0

    def __len__(self) -> int:
        return max(0, super().__len__() - self._num_dropped)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterators
        return islice(super().__iter__(), self._num_dropped, None)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader that skips the first `num_batches` batches of every pass. `dataloader` is not changed.

    Skipped batches are not fetched, except for iterable data sets. A loader that an Accelerator has prepared skips
    batches itself; see `Accelerator.skip_first_batches`.

    Args:
        dataloader: a DataLoader.
        num_batches: number of batches that are skipped. Default: 0.

    Raises:
        ConfigurationError: the number is negative or not an integer, the object is not a DataLoader, or it is an
            instance of a class with its own `__iter__` over an iterable data set.
    """
    check_number("num_batches", num_batches)
    if not isinstance(dataloader, DataLoader):
        raise ConfigurationError(f"skip_first_batches needs a DataLoader, not a {type(dataloader).__name__}.")
    if isinstance(dataloader, SkippableLoader):
        return dataloader.skip(num_batches)
    if not isinstance(dataloader.dataset, IterableDataset):
        num_read = num_batches
        if isinstance(dataloader, RoundLoader):  # a dispatched loader reads a batch for each process in a round
            num_read *= dataloader.batches_per_round
        return copy_loader(dataloader, **_skipping(dataloader, num_read))
    if type(dataloader).__iter__ not in (DataLoader.__iter__, SkipDataLoader.__iter__):
        raise ConfigurationError(
            f"{type(dataloader).__name__} has its own __iter__, which skip_first_batches cannot change. Restore its "
            "position with its own load_state_dict, or read the batches to skip with next()."
        )
    num_skipped = dataloader.skip_batches if isinstance(dataloader, SkipDataLoader) else 0
    return SkipDataLoader(
        dataloader.dataset,
        num_skipped + num_batches,
        batch_size=dataloader.batch_size,
        drop_last=dataloader.drop_last,
        **fetch_options(dataloader),
    )


def fetch_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the constructor arguments of a loader for fetching. Data set, samplers and batch size are omitted."""
    return {name: getattr(loader, name) for name in _FETCH_OPTIONS if hasattr(loader, name)}


def _skipping(loader: DataLoader[Any], num_batches: int) -> dict[str, SkipBatchSampler]:
    """Return the sampler attribute of a loader that must be replaced to skip batches: its name and new value."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return {name: SkipBatchSampler(getattr(loader, name), num_batches)}


def _shares(
    rounds: Iterator[Any], part: int, shard: BatchSamplerShard | IterableDatasetShard, *, completes: bool = True
) -> Iterator[Any]:
    """Yield the samples of one process in each round. `part` is their number in a complete round.

    A short round is dropped if the shard has `drop_last`, else completed with samples of the first round. Without
    `completes`, the process's samples of a short round may be fewer than `part`, or none.
    """
    size = part * shard.num_processes
    start = part * shard.process_index
    first_round: Any = None
    for samples in rounds:
        if first_round is None:
            first_round = samples
        is_short = len(samples) < size
        if is_short and shard.drop_last:
            continue
        if is_short and completes:
            yield completed(samples, first_round, size)[start : start + part]
        else:
            yield samples[start : start + part]


def _check_index(process_index: int, num_processes: int) -> None:
    if not 0 <= process_index < num_processes:
        raise ConfigurationError(f"process_index={process_index} is not in [0, num_processes={num_processes}).")


def check_number(name: str, value: object) -> None:
    """Raise a ConfigurationError unless `value` is a whole number of at least 0."""
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not is_number:
        raise ConfigurationError(f"{name}={value!r}: expected a whole number of at least 0.")
