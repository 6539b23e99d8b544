"""Samplers and iterable data sets that divide data over processes with the index lists of Accelerate.

They are for loops that build their own loaders. A Trainer and `Accelerator.prepare` divide loaders themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain, cycle, islice
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from trainwright.core.errors import ConfigurationError
from trainwright.data.iterable import sets_epoch


class SeedableRandomSampler(RandomSampler):
    """Random sampler whose order depends on a seed and the epoch alone. A complete pass increments the epoch.

    Args:
        data_source: the data set, or another object with a length.
        replacement: draw samples with replacement. Default: False.
        num_samples: samples of a pass. Default: the length of `data_source`.
        generator: is seeded with `data_seed + epoch` at the start of each pass. Default: a new generator.
        data_seed: seed of epoch 0; the same on every process. Default: torch's initial seed, when the sampler is made.
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

    Consecutive batches go to consecutive processes. With `split_batches` each batch is divided instead. An incomplete
    last round is dropped if the batch sampler has `drop_last`. Otherwise it is completed with samples from the
    beginning, or left incomplete without `even_batches`.

    Args:
        batch_sampler: a batch sampler, or a list of batches. Batches of one without `batch_size` may differ in size:
            an incomplete round is then completed with whole batches from the beginning.
        num_processes: number of processes. Default: 1.
        process_index: index of this process. Default: 0.
        split_batches: divide each batch over the processes. Default: False.
        even_batches: all processes get the same number of batches. Default: True.

    Raises:
        ConfigurationError: `split_batches` with a batch size that is unknown or not divisible by `num_processes`, or an
            index that is out of range.
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
        """Batches of the batch sampler."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        """Batches of this process. With `split_batches` and without `even_batches` the last one may be missing."""
        if self.split_batches:
            return self.total_length
        length, rest = divmod(self.total_length, self.num_processes)
        if self.drop_last:
            return length
        return length + (rest > (0 if self.even_batches else self.process_index))

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of this process."""
        return self._parts() if self.split_batches else self._batches()

    def _parts(self) -> Iterator[Any]:
        size = cast(int, self.batch_size)
        part = size // self.num_processes
        mine = slice(part * self.process_index, part * (self.process_index + 1))
        first: Sequence[Any] | None = None
        for batch in self.batch_sampler:
            first = batch if first is None else first
            if len(batch) >= size:
                yield batch[mine]
            elif self.even_batches and not self.drop_last:
                yield _completed(batch, first, size)[mine]
            elif not self.drop_last and len(batch) > mine.start:
                yield batch[mine]

    def _batches(self) -> Iterator[Any]:
        size, world, index = self.batch_size, self.num_processes, self.process_index
        first: list[Any] = []  # batches of the first round
        batches: list[Any] = []  # of the current round
        for batch in self.batch_sampler:
            if len(batches) == world:  # a batch sampler of the user had a short batch here
                yield batches[index]
                batches = []
            batches.append(batch)
            if len(first) < world:
                first.append(batch)
            if len(batches) == world and (size is None or len(batch) == size):
                yield batches[index]
                batches = []
        if self.drop_last or not batches:
            return
        if not self.even_batches:
            yield from batches[index : index + 1]
        elif size is None:
            yield _completed(batches, first, world)[index]
        else:
            samples = _completed(chain.from_iterable(batches), chain.from_iterable(first), size * world)
            yield samples[size * index : size * (index + 1)]


class IterableDatasetShard(IterableDataset[Any]):
    """Samples of one process, from an iterable data set that is the same on every process.

    Every process reads the whole data set and returns its samples of each round. An incomplete last round is completed
    with samples of the first one, or dropped.

    Args:
        dataset: its `set_epoch` is called. Without one, its `generator` (a `torch.Generator`) is seeded with the epoch
            at the start of each pass.
        batch_size: samples per batch of one process; with `split_batches`, of all processes. Default: 1.
        drop_last: drop an incomplete last round. Default: False.
        num_processes: number of processes. Default: 1.
        process_index: index of this process. Default: 0.
        split_batches: divide each batch over the processes. Default: False.

    Raises:
        ConfigurationError: `split_batches` with a batch size that is not divisible by `num_processes`, or an index that
            is out of range.
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
        """Samples of this process in a round."""
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (0-based) of the next pass, also of the data set."""
        self.epoch = epoch
        if sets_epoch(self.dataset):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Samples of this process.

        Raises:
            TypeError: the data set has no length.
        """
        rounds, rest = divmod(len(cast(Sized, self.dataset)), self._share * self.num_processes)
        return (rounds + (rest > 0 and not self.drop_last)) * self._share

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the samples of this process."""
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not sets_epoch(self.dataset):
            generator.manual_seed(self.epoch)
        size = self._share * self.num_processes
        mine = slice(self._share * self.process_index, self._share * (self.process_index + 1))
        samples = iter(self.dataset)
        first: list[Any] = []
        while found := list(islice(samples, size)):
            first = first or found
            if len(found) == size:
                yield from found[mine]
            elif not self.drop_last:
                yield from _completed(found, first, size)[mine]


def _completed(found: Iterable[Any], first: Iterable[Any], size: int) -> list[Any]:
    """Return `size` entries: those that were found, then those of the beginning as often as needed."""
    return list(islice(chain(found, cycle(first)), size))


def _check_index(process_index: int, num_processes: int) -> None:
    if not 0 <= process_index < num_processes:
        raise ConfigurationError(f"process_index={process_index} is not in [0, num_processes={num_processes}).")


def check_divisible(batch_size: int | None, num_processes: int) -> None:
    """Check that a batch can be divided into equal parts.

    Raises:
        ConfigurationError: the batch size is unknown or not divisible.
    """
    if batch_size is None:
        raise ConfigurationError("split_batches=True needs a batch sampler with the attribute batch_size.")
    if batch_size % num_processes:
        raise ConfigurationError(
            f"batch_size={batch_size} is not divisible by num_processes={num_processes}: split_batches=True needs it."
        )
