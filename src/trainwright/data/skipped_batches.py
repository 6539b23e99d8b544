"""Loaders that skip their first batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from trainwright.core.errors import ConfigurationError
from trainwright.data.loader import copy_loader


class SkippableLoader(DataLoader[Any]):
    """Loader with its own way to skip batches, such as one that an Accelerator has prepared."""

    def skip(self, num_batches: int) -> DataLoader[Any]:
        """Return this loader with a first pass that skips `num_batches` batches."""
        raise NotImplementedError


class RoundLoader(DataLoader[Any]):
    """Loader that may read several batches of its data set for one of its own."""

    @property
    def batches_per_round(self) -> int:
        """Batches of the data set that one batch of each process consumes."""
        return 1


class SkipBatchSampler(BatchSampler):
    """Batches of another batch sampler without the first ones. Every pass skips them.

    Args:
        batch_sampler: a batch sampler, or another iterable of batches.
        skip_batches: number of batches that are skipped. Default: 0.
    """

    def __init__(self, batch_sampler: Iterable[Any], skip_batches: int = 0) -> None:
        _check_number("skip_batches", skip_batches)
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    @property
    def total_length(self) -> int:
        """Batches of the batch sampler, with those that are skipped."""
        return len(cast(Sized, self.batch_sampler))

    def __len__(self) -> int:
        """Batches of a pass."""
        return max(0, self.total_length - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches after the skipped ones."""
        return islice(self.batch_sampler, self.skip_batches, None)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the batch sampler (`batch_size`, `drop_last`, `sampler`, …)."""
        if name.startswith("__") or "batch_sampler" not in vars(self):
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


class SkipDataLoader(DataLoader[Any]):
    """DataLoader without its first batches, in every pass. Those of an iterable data set are fetched and dropped.

    Args:
        dataset: the data set.
        skip_batches: number of batches that are skipped. Default: 0.
        **kwargs: arguments of `DataLoader`.
    """

    def __init__(self, dataset: Any, skip_batches: int = 0, **kwargs: Any) -> None:
        _check_number("skip_batches", skip_batches)
        super().__init__(dataset, **kwargs)
        self.skip_batches = skip_batches
        if not isinstance(dataset, IterableDataset):
            vars(self).update(_skipping(self, skip_batches))

    @property
    def _num_dropped(self) -> int:
        """Batches that are fetched and dropped."""
        return self.skip_batches if isinstance(self.dataset, IterableDataset) else 0

    def __len__(self) -> int:
        """Batches of a pass."""
        return max(0, super().__len__() - self._num_dropped)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterators
        """Iterate over the batches after the skipped ones."""
        return islice(super().__iter__(), self._num_dropped, None)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader without the first batches.

    Skipped batches are not fetched, except for iterable data sets. The argument is not changed. Of a prepared loader
    only the first pass skips batches, as with `Accelerator.skip_first_batches`. Other loaders skip them in every pass.

    Args:
        dataloader: a DataLoader, prepared or not.
        num_batches: number of batches that are skipped. Default: 0.

    Raises:
        ConfigurationError: the number is negative, the object is not a DataLoader, or it is one over an iterable data
            set whose class has its own `__iter__`.
    """
    _check_number("num_batches", num_batches)
    if not isinstance(dataloader, DataLoader):
        raise ConfigurationError(f"skip_first_batches needs a DataLoader, not a {type(dataloader).__name__}.")
    if isinstance(dataloader, SkippableLoader):
        return dataloader.skip(num_batches)
    if not isinstance(dataloader.dataset, IterableDataset):
        # A dispatched loader reads a batch for each process in a round.
        num_read = num_batches * (dataloader.batches_per_round if isinstance(dataloader, RoundLoader) else 1)
        return copy_loader(dataloader, **_skipping(dataloader, num_read))
    if type(dataloader).__iter__ not in (DataLoader.__iter__, SkipDataLoader.__iter__):
        raise ConfigurationError(
            f"{type(dataloader).__name__} has its own __iter__, which skip_first_batches cannot change. Restore its "
            "position with its own load_state_dict, or read the batches to skip with next()."
        )
    found = SkipDataLoader.__new__(SkipDataLoader)
    vars(found).update(vars(dataloader), _iterator=None)
    found.skip_batches = num_batches + (dataloader.skip_batches if isinstance(dataloader, SkipDataLoader) else 0)
    return found


def _skipping(loader: DataLoader[Any], num_batches: int) -> dict[str, SkipBatchSampler]:
    """Return the sampler to replace, by the name of its attribute, so that a loader skips batches."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return {name: SkipBatchSampler(getattr(loader, name), num_batches)}


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"{name}={value!r}: expected a whole number of at least 0.")
