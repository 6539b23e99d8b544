"""Division of iterable data sets over ranks and workers, such that each sample is read by exactly one of them.

An iterable data set is copied into every loader worker of every rank, and each copy would yield all samples. An
undivided data set is therefore an error. There are three ways to divide it: wrap it in `ShardedIterable`, give it a
method `shard(index, count)`, or divide it inside its own `__iter__` with `shard_info()` and set the attribute
`is_sharded = True`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol, TypeGuard

import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainwright.core.errors import ConfigurationError


class SetsEpoch(Protocol):
    """Data set, sampler or loader with a method that sets the epoch before an iteration."""

    def set_epoch(self, epoch: int, /) -> None:
        """Set the epoch."""


class StatefulIterable(Protocol):
    """Iterable whose position can be saved and restored."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the position."""


class HasShards(Protocol):
    """Data set with a method that opens one of several parts of its samples."""

    def shard(self, index: int, count: int) -> Iterable[Any]:
        """Return the samples of one of `count` parts."""


def sets_epoch(source: object) -> TypeGuard[SetsEpoch]:
    """Return whether an object has a method `set_epoch`."""
    return callable(getattr(source, "set_epoch", None))


# (rank, world) of this process, or of the process that started this worker. Set by `set_place`, which a prepared loader
# calls before each pass, and `WorkerPlace` in each worker.
_place: tuple[int, int] = (0, 1)


def set_place(rank: int, world: int) -> None:
    """Set the data-parallel rank for `shard_info`. A loader worker has the rank of its training process."""
    global _place
    _place = (rank, world)


def shard_info() -> tuple[int, int]:
    """Return `(index, count)`: the index of this process's shard, and the number of shards (ranks × loader workers).

    Call this function in the `__iter__` of a data set whose attribute `is_sharded` is True. Outside of a worker
    process, `count` is the number of data-parallel ranks. Not collective.
    """
    return _shard_of(*_place)


def _shard_of(rank: int, world: int) -> tuple[int, int]:
    """Return `(index, count)` as `shard_info`, for the given rank."""
    worker = get_worker_info()
    if worker is None:
        return rank, world
    # Two ranks with two workers: worker 0 of ranks 0 and 1 has shards 0 and 1, worker 1 has shards 2 and 3. A loader
    # takes batches from its workers in turn, so rank 0 of a ShardedIterable gets blocks 0, 2, 4 and so on, in order.
    return worker.id * world + rank, worker.num_workers * world


class WorkerPlace:
    """Picklable `worker_init_fn` that sets the rank in a worker process and then calls the user's own function."""

    def __init__(self, rank: int, world: int, then: Callable[[int], object] | None) -> None:
        self.rank = rank
        self.world = world
        self.then = then

    def __call__(self, worker_id: int) -> None:
        set_place(self.rank, self.world)
        if self.then is not None:
            self.then(worker_id)


class ShardedIterable(IterableDataset[Any]):
    """Wrapper that divides any iterable data set over ranks and loader workers in blocks of one batch.

    Each process iterates over the complete data set and returns the samples of its own blocks. Block b of `block`
    consecutive samples belongs to worker (b div world) mod workers of rank b mod world. The batches therefore equal
    those of one process without workers. Every process reads all samples, but only collates its own samples. A data set
    that can read a part of its samples should have a method `shard(index, count)` instead.

    Args:
        dataset: the data set. It must yield samples in the same order in every process. If it has a method
            `set_epoch(epoch)`, this method is called before each epoch, also in persistent workers. If it has a length,
            this is the length of the complete data set.
        block: samples in a block. Default: None, the loader's batch size (1 if the loader does not batch).

    Attributes:
        rank, world: the rank whose samples are returned, and the number of ranks. `0, 1` until `placed` returns a copy
            for a rank.

    Raises:
        ConfigurationError: `block` is less than 1.
    """

    def __init__(self, dataset: Iterable[Any], *, block: int | None = None) -> None:
        if block is not None and block < 1:
            raise ConfigurationError(f"block={block} is not at least 1.")
        self.dataset = dataset
        self.block = block
        self.rank = 0
        self.world = 1
        self._epoch = _shared_number()  # set here, and read in the workers that iterate

    def placed(self, rank: int, world: int, *, block: int) -> ShardedIterable:
        """Return a copy for one of `world` ranks. `block` is the block size if the user has not set one."""
        kind = _KeptShard if keeps_state(self.dataset) else ShardedIterable
        placed = kind(self.dataset, block=self.block or block)
        placed.rank = rank
        placed.world = world
        return placed

    def set_epoch(self, epoch: int) -> None:
        """Call the data set's `set_epoch` with `epoch` when the next iteration begins."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        if sets_epoch(self.dataset):
            self.dataset.set_epoch(int(self._epoch))
        return self._samples_of_process(iter(self.dataset), 0)

    def _samples_of_process(self, samples: Iterator[Any], first: int) -> Iterator[Any]:
        """Return the samples of this process. `first` is the number of the first sample in `samples`."""
        index, count = _shard_of(self.rank, self.world)
        if count == 1:
            return samples
        return _every_nth_block(samples, self.block or 1, index, count, first)

    def __len__(self) -> int:
        """Return the length of the complete data set. Raises TypeError if it has none."""
        if not isinstance(self.dataset, Sized):
            raise TypeError(f"{type(self.dataset).__name__} has no length.")
        return len(self.dataset)


def _shared_number() -> torch.Tensor:
    """Return a 0-dim int64 zero in shared memory, so that persistent workers see a new epoch."""
    number = torch.zeros((), dtype=torch.int64)
    number.share_memory_()  # type: ignore[no-untyped-call]  # torch has no annotation for it
    return number


class _KeptShard(ShardedIterable):
    """`ShardedIterable` whose data set has a state. Its own state also contains the number of read samples.

    The owner of the next sample depends on this number, which counts the samples of all ranks and workers.
    """

    dataset: StatefulIterable

    def __init__(self, dataset: Iterable[Any], *, block: int | None = None) -> None:
        super().__init__(dataset, block=block)
        self._num_read = 0  # samples that the current or last pass has read from the data set
        self._resume_at = 0  # number of samples before the next pass; 0 unless a state was loaded for it

    def state_dict(self) -> dict[str, Any]:
        return {"num_read": self._num_read, "dataset": self.dataset.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.dataset.load_state_dict(state["dataset"])
        self._num_read = int(state["num_read"])
        self._resume_at = self._num_read

    def __iter__(self) -> Iterator[Any]:
        self._num_read = self._resume_at
        self._resume_at = 0
        if sets_epoch(self.dataset):
            self.dataset.set_epoch(int(self._epoch))
        return self._samples_of_process(self._counted(iter(self.dataset)), self._num_read)

    def _counted(self, samples: Iterator[Any]) -> Iterator[Any]:
        for sample in samples:
            self._num_read += 1
            yield sample


def _every_nth_block(samples: Iterator[Any], block: int, index: int, count: int, first: int) -> Iterator[Any]:
    """Return the samples of the blocks b with b mod count = index. Sample `first` is the first of `samples`."""
    # Blocks of 2 for index 1 of 3: samples 2 and 3 of each 6 are selected. If `first` is 3, the first sample is
    # selected, then 4 are not, then 2 are.
    period = block * count
    is_selected = [place // block == index for place in range(period)]
    start = first % period
    from_first = is_selected[start:] + is_selected[:start]
    return itertools.compress(samples, itertools.cycle(from_first))


class ByShardMethod(IterableDataset[Any]):
    """Iterable data set that calls `shard(index, count)` of another data set in the iterating process."""

    def __init__(self, dataset: HasShards, rank: int, world: int) -> None:
        self.dataset: Any = dataset
        self.rank = rank
        self.world = world
        self._epoch = _shared_number()

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Any]:
        if sets_epoch(self.dataset):
            self.dataset.set_epoch(int(self._epoch))
        index, count = _shard_of(self.rank, self.world)
        return iter(self.dataset.shard(index=index, count=count))


class _KeptPart(ByShardMethod):
    """`ByShardMethod` whose data set has a state."""

    def state_dict(self) -> Any:
        return self.dataset.state_dict()

    def load_state_dict(self, state: object) -> None:
        self.dataset.load_state_dict(state)


class KeptStream(IterableDataset[Any]):
    """Wrapper of a data set with a state, in a loader worker. Its state also records whether the data set has ended.

    After a resume, torchdata (0.11) requests another batch from a worker whose data set had ended before the save. A
    data set that resets its position at its end would then restart and repeat samples.
    """

    # In a worker, `get_worker_info().dataset` is this object. Code that reads or sets its attributes means those of the
    # data set.

    # `_has_ended`: the current or last iteration has reached its end.
    # `_ends_at_once`: the next iteration is empty, because the iteration of the loaded state had ended.

    def __init__(self, dataset: StatefulIterable) -> None:
        # Not by assignment: `__setattr__` sets attributes of the data set, except those that exist here.
        vars(self).update(dataset=dataset, _has_ended=False, _ends_at_once=False)

    def __getattr__(self, name: str) -> Any:
        # While it is copied or unpickled, the object has no attributes, and reading one would recurse.
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.dataset, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the data set's state, and whether it has ended."""
        return {"has_ended": self._has_ended, "dataset": self.dataset.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. The next iteration is empty if the saved iteration had ended."""
        self.dataset.load_state_dict(state["dataset"])
        self._has_ended = state["has_ended"]
        self._ends_at_once = self._has_ended

    def __iter__(self) -> Iterator[Any]:
        self._has_ended = self._ends_at_once
        self._ends_at_once = False
        if self._has_ended:
            return iter(())
        samples = iter(self.dataset)
        # torchdata saves the state of an iterator that has one, instead of this object's.
        iterator_has_state = keeps_state(samples)
        return samples if iterator_has_state else self._watched(samples)

    def __len__(self) -> int:
        """Return the data set's length. Raises TypeError if it has none."""
        return len(self.dataset)

    def _watched(self, samples: Iterator[Any]) -> Iterator[Any]:
        yield from samples
        self._has_ended = True


def keeps_state(source: object) -> TypeGuard[StatefulIterable]:
    """Return whether an object has `state_dict` and `load_state_dict`."""
    methods = ("state_dict", "load_state_dict")
    return all(callable(getattr(source, method, None)) for method in methods)


def has_shard_method(dataset: object) -> TypeGuard[HasShards]:
    """Return whether `dataset` has a method `shard` that takes `index` and `count`.

    The names are checked, because other libraries have a `shard` with the opposite order of arguments.
    """
    method = getattr(dataset, "shard", None)
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(index=0, count=1)
    except (TypeError, ValueError):
        return False
    return True


def is_divided(dataset: object) -> bool:
    """Return whether an iterable data set declares how it is divided over ranks and workers."""
    if isinstance(dataset, ShardedIterable) or has_shard_method(dataset):
        return True
    return getattr(dataset, "is_sharded", False) is True


def place_iterable(dataset: object, *, rank: int, world: int, num_workers: int, block: int, name: str) -> Any:
    """Return the iterable that replaces `dataset` in the loader of one rank, so that ranks read different samples.

    Args:
        dataset: an iterable data set, or an iterable of batches.
        rank, world: this rank and the number of data-parallel ranks.
        num_workers: loader workers of each rank.
        block: block size of a `ShardedIterable` that has none.
        name: name of the loader for messages.

    Raises:
        ConfigurationError: there are several ranks or workers and the data set does not declare how it is divided.
    """
    if isinstance(dataset, ShardedIterable):
        return dataset.placed(rank, world, block=block)
    if getattr(dataset, "is_sharded", False) is True:
        return dataset
    if has_shard_method(dataset):
        kind = _KeptPart if keeps_state(dataset) else ByShardMethod
        return kind(dataset, rank, world)
    if world == 1 and num_workers <= 1:
        return dataset
    name_of_class = type(dataset).__name__
    num_readers = max(1, num_workers)
    raise ConfigurationError(
        f"{name}: the iterable data set {name_of_class} would be read completely by each of {world} ranks × "
        f"{num_readers} loader workers, so every sample would be seen {world * num_readers} times. Declare how it is "
        f"divided: wrap it, ShardedIterable({name_of_class}(...)); or give it a method shard(index, count) "
        "that returns an iterable over its part; or divide it in __iter__ with shard_info() and set is_sharded = True "
        "on it. Or, if each process has its own data, pass Trainer(use_distributed_sampler=False)."
    )
