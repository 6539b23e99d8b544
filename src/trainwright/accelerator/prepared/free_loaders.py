"""Loaders of one process's part of the data, for loops without an `Accelerator`. Batches equal Accelerate's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from trainwright.accelerator.prepared.round_transfer import Round, RoundTransfer, rounds_of
from trainwright.core.errors import ConfigurationError
from trainwright.core.names.constants import RNGType
from trainwright.core.tree import batch_size as rows_of
from trainwright.data.batch_shards import (
    BatchSamplerShard,
    IterableDatasetShard,
    RoundLoader,
    SeedableRandomSampler,
    fetch_options,
)
from trainwright.data.iterable import sets_epoch
from trainwright.data.loader_options import check_divisible
from trainwright.processes.collectives import concatenate, send_to_device, slice_tensors
from trainwright.processes.partial_state import PartialState
from trainwright.processes.random_states import synchronize_rng_states


class _Loader(RoundLoader):
    """DataLoader that reports the end of a pass, and continues an interrupted pass after `load_state_dict`.

    Attributes:
        use_stateful_dataloader: Accepted without effect: each of these loaders has a state.
        iteration: The epoch (0-based) of the next pass. A complete pass increments it.
        end_of_dataloader: True once the newest pass has returned its last batch.
        remainder: Samples of an incomplete last batch over all processes. 0 if the last batch is full. -1 if the length
            is unknown, or if an incomplete batch is dropped. `DataLoaderDispatcher` replaces it by the number of
            samples of the last round, full or not, once that round is read.
    """

    def __init__(
        self,
        dataset: Any,
        skip_batches: int,
        use_stateful_dataloader: bool,
        drop_last: bool,
        non_blocking: bool,
        iteration: int,
        options: dict[str, Any],
    ) -> None:
        super().__init__(dataset, **options)
        self.use_stateful_dataloader = use_stateful_dataloader
        self.skip_batches = skip_batches
        self._drop_last = drop_last
        self._non_blocking = non_blocking
        self.iteration = iteration
        self.end_of_dataloader = False
        self.remainder = -1
        self._num_read = 0  # batches of the present pass, including those that were skipped at its start
        self._first_batch = 0  # batch at which the next pass begins; 0 unless `load_state_dict` was called
        # State of the sampler's generator when the present pass began. None without a generator.
        self._generator_at_start: torch.Tensor | None = None

    @property
    def _batches(self) -> Any:
        """The sampler of batches. A user may pass it as `sampler` of a loader with `batch_size=None`."""
        return self.sampler if isinstance(self.sampler, BatchSampler) else self.batch_sampler

    @property
    def total_dataset_length(self) -> int:
        """Samples of the data set over all processes."""
        data: Any = self.dataset
        if isinstance(data, IterableDatasetShard):
            data = data.dataset
        return len(data)

    @property
    def total_batch_size(self) -> int:
        """Samples of one batch over all processes."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (0-based) of the next pass, also in the sampler or the data set."""
        self.iteration = epoch
        samplers = [sampler for sampler in self._samplers if sets_epoch(sampler)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        if not samplers and sets_epoch(self.dataset):
            self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the newest batch of the present pass, for `load_state_dict` on the same process.

        For example, `{"iteration": 3, "batch": 5, "generator": None}`: 5 batches of epoch 3 have been read. `generator`
        is the state of the sampler's generator at the start of the pass. An order of torch's default generator is not
        restored.
        """
        if not self.end_of_dataloader:
            return {"iteration": self.iteration, "batch": self._num_read, "generator": self._generator_at_start}
        # After the last batch, the position is the start of the next epoch. While the loop uses this batch, the pass
        # has not incremented `iteration` yet.
        is_at_last_batch = self._num_read > 0
        next_iteration = self.iteration + 1 if is_at_last_batch else self.iteration
        return {"iteration": next_iteration, "batch": 0, "generator": None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass begin after the batches that were read when `state_dict` was called."""
        self.iteration = state_dict["iteration"]
        self._first_batch = state_dict["batch"]
        self._num_read = state_dict["batch"]  # for `state_dict` before the pass begins
        self._generator_at_start = state_dict["generator"]
        self.end_of_dataloader = False
        generator = self._sampler_generator
        if self._generator_at_start is not None and generator is not None:
            generator.set_state(self._generator_at_start)

    @property
    def _samplers(self) -> Iterator[Any]:
        """The batch sampler, and the samplers within it."""
        sampler = self._batches
        while sampler is not None:
            yield sampler
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)

    @property
    def _sampler_generator(self) -> torch.Generator | None:
        for sampler in self._samplers:
            generator = getattr(sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                return generator
        return None

    def _begin(self) -> int:
        """Prepare for a pass. Return the number of batches to skip at its start."""
        generator = self._sampler_generator  # before the sampler draws the order of the pass
        self._generator_at_start = None if generator is None else generator.get_state()
        num_skipped = self._first_batch or self.skip_batches
        self._first_batch = 0  # only the first pass after `load_state_dict` continues
        self._num_read = num_skipped
        self.end_of_dataloader = False
        self.remainder = -1
        if not self._drop_last:
            with contextlib.suppress(TypeError):  # the data set has no length
                self.remainder = self.total_dataset_length % self.total_batch_size
        self.set_epoch(self.iteration)
        return num_skipped


class DataLoaderShard(_Loader):
    """DataLoader over one process's batches. The data set, or a sampler such as `BatchSamplerShard`, divides data.

    Args:
        device: Device to which batches are moved. Default: None, which does not move batches.
        rng_types: Generators that are synchronized over processes before each pass; see `synchronize_rng_states`.
        synchronized_generator: The generator that `"generator"` in `rng_types` refers to. Default: None.
        skip_batches: Number of batches that are skipped at the beginning of each pass. Default: 0.
        use_stateful_dataloader: Accepted without effect: the loader has `state_dict` and `load_state_dict`.
        _drop_last: The data set or sampler drops an incomplete last batch. Default: False.
        _non_blocking: Copy batches to the device asynchronously. Default: False.
        torch_device_mesh: Accepted without effect: the data set or the sampler determines which batches are read.
        iteration: The epoch (0-based) of the first pass. Default: 0.
        dataset, **kwargs: Arguments of `DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | None = None,
        rng_types: Sequence[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: object = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, skip_batches, use_stateful_dataloader, _drop_last, _non_blocking, iteration, kwargs)
        del torch_device_mesh
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator

    @property
    def total_batch_size(self) -> int:
        """Samples of one batch over all processes."""
        divider = self.dataset if isinstance(self.dataset, IterableDatasetShard) else self._batches
        size: int = getattr(divider, "batch_size", None) or self.batch_size or 1
        if getattr(divider, "split_batches", False):  # `size` is the total
            return size
        num_processes: int = getattr(divider, "num_processes", 1)
        return size * num_processes

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterators
        """Iterate over the batches of the next epoch. Collective with `rng_types`."""
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        num_skipped = self._begin()
        batches = islice(super().__iter__(), num_skipped, None)
        # One batch is read ahead, because `end_of_dataloader` must be right while the loop uses the last batch. A list,
        # not None at the end: None may be a batch.
        ahead = list(islice(batches, 1))
        while ahead:
            batch = ahead.pop()
            ahead = list(islice(batches, 1))
            self.end_of_dataloader = not ahead
            self._num_read += 1
            yield batch if self.device is None else send_to_device(batch, self.device, non_blocking=self._non_blocking)
        self.iteration += 1
        self._num_read = 0


class _RoundFacts(NamedTuple):
    """Facts of a round of `DataLoaderDispatcher` that every process receives with its batch.

    Attributes:
        num_rows: Samples of the round over all processes, without those that complete it.
        is_last: True for the last round of the pass.
    """

    num_rows: int
    is_last: bool


class DataLoaderDispatcher(_Loader):
    """DataLoader that only the first process reads. It sends each other process that process's part of the data.

    A round is one batch with `split_batches`, otherwise one batch per process. It is divided over the processes. An
    incomplete last round is filled up with samples of the first round, or dropped with `_drop_last`. Batches are moved
    to the process's device. Iterating is collective.

    Args:
        split_batches: Divide each batch over the processes. Default: False.
        slice_fn: `slice_fn(batch, slice, process_index=…, num_processes=…)` returns a process's part. Default:
            `slice_tensors`.
        torch_device_mesh: A mesh. Processes receive equal batches if they differ only along `"tp"` and `"cp"`.
        dataset, skip_batches, _drop_last, _non_blocking, iteration, **kwargs: See `DataLoaderShard`.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: DeviceMesh | None = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, skip_batches, use_stateful_dataloader, _drop_last, _non_blocking, iteration, kwargs)
        self.split_batches = split_batches
        self.slice_fn = slice_tensors if slice_fn is None else slice_fn
        self.state = PartialState()
        group_size = _num_with_equal_batches(torch_device_mesh)
        places = [process // group_size for process in range(self.state.num_processes)]  # 4 processes by 2: 0, 0, 1, 1
        self._world = places[-1] + 1  # number of different batches
        self._transfer = RoundTransfer(self.state.joined(), places)

    @property
    def batches_per_round(self) -> int:
        """Number of batches of the data set that one round consumes."""
        return 1 if self.split_batches else self._world

    @property
    def total_batch_size(self) -> int:
        """Samples of one batch over all processes."""
        size: int = self.batch_size or getattr(self._batches, "batch_size", None) or 1
        return size if self.split_batches else size * self._world

    def __len__(self) -> int:
        """Return the number of batches of one process in a pass."""
        if self.split_batches:
            return super().__len__()
        num_rounds, rest = divmod(super().__len__(), self._world)
        if rest > 0 and not self._drop_last:
            num_rounds += 1
        return num_rounds

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its own iterators
        """Iterate over this process's batches of the next epoch. Collective."""
        num_skipped = self._begin()
        for number, (batch, facts) in enumerate(self._transfer.iterate(self._read)):
            if facts.is_last:
                self.end_of_dataloader = True
                self.remainder = facts.num_rows
            if number >= num_skipped:
                self._num_read = number + 1
                yield send_to_device(batch, self.state.device, non_blocking=self._non_blocking)
        self.iteration += 1
        self._num_read = 0

    def _read(self) -> Iterator[Round]:
        """Yield the rounds of a pass, each with `_RoundFacts`. First process only."""
        world = self._world
        rounds = self._joined_rounds(super().__iter__())
        first_samples: Any = None  # of the first round, one for each process
        batch = next(rounds, None)
        while batch is not None:
            upcoming = next(rounds, None)
            is_last = upcoming is None
            num_rows = rows_of(batch)
            share_size = num_rows // world
            if first_samples is None and not self._drop_last:
                first_samples = self._slice(batch, 0, world, 0)
            if is_last and num_rows % world and not self._drop_last:
                # 10 samples for 4 processes: with 4 more samples, each process gets 3, and 2 samples are left over.
                batch = concatenate([batch, first_samples])
                share_size += 1
            shares = []
            for place in range(world):
                shares.append(self._slice(batch, place * share_size, (place + 1) * share_size, place))
            yield Round(shares, _RoundFacts(num_rows, is_last))
            batch = upcoming

    def _joined_rounds(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the samples of each round as one batch."""
        for batches_of_round in rounds_of(batches, self.batches_per_round):
            if self._drop_last and len(batches_of_round) < self.batches_per_round:
                return
            yield batches_of_round[0] if len(batches_of_round) == 1 else concatenate(batches_of_round)

    def _slice(self, batch: object, start: int, stop: int, place: int) -> Any:
        return self.slice_fn(batch, slice(start, stop), process_index=place, num_processes=self._world)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: DeviceMesh | None = None,
) -> DataLoader[Any]:
    """Return a loader of one process's part of the data, with the same batches as in Accelerate.

    `Accelerator.prepare` returns other loaders: their order depends only on a seed, and no sample is repeated.

    Args:
        dataloader: A DataLoader. With several processes that read the data themselves, a random sampler without a
            generator receives one, except with `use_seedable_sampler`.
        num_processes: Number of processes. Default: the number of the script's processes.
        process_index: Index of the process. Default: the index of this process.
        split_batches: The batch size is the total over all processes. Default: False.
        device: Device for `put_on_device`.
        put_on_device: Move batches to the device. Default: False.
        rng_types: Generators that are synchronized before each pass. `"generator"` refers to the generator of the
            sampler or the iterable data set. Default: None.
        dispatch_batches: Only the first process reads the data. Needs `put_on_device`. Default: None, which is True for
            iterable data sets with `put_on_device`.
        even_batches: All processes get the same number of batches. Default: True.
        use_seedable_sampler: Shuffle with a `SeedableRandomSampler`. Default: False.
        data_seed: Seed of the `SeedableRandomSampler`. Default: None.
        slice_fn_for_dispatch, non_blocking, use_stateful_dataloader, torch_device_mesh: See `DataLoaderDispatcher`.

    Raises:
        ConfigurationError: The batch size is unknown or not divisible, or `dispatch_batches` is set without
            `put_on_device`.
    """
    dataset: Any = dataloader.dataset
    is_iterable = isinstance(dataset, IterableDataset)
    dispatches = put_on_device and is_iterable if dispatch_batches is None else dispatch_batches
    if dispatches and not put_on_device:
        raise ConfigurationError("dispatch_batches=True needs put_on_device=True.")
    state = PartialState()
    group_size = _num_with_equal_batches(torch_device_mesh)
    world = (state.num_processes if num_processes is None else num_processes) // group_size
    index = (state.process_index if process_index is None else process_index) // group_size
    # None for data without indices.
    batches: Any = dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler
    if split_batches:
        check_divisible(dataloader.batch_size or getattr(batches, "batch_size", None), world)
    if use_seedable_sampler:
        batches = _with_seedable_sampler(batches, data_seed)
    part = _Part(dataset, batches, dataloader.batch_size)
    if world > 1 and not dispatches:
        part = _divided(
            part,
            world,
            index,
            drop_last=dataloader.drop_last,
            split_batches=split_batches,
            even_batches=even_batches,
            is_seedable=use_seedable_sampler,
        )
    options = fetch_options(dataloader)
    options |= _batching(dataloader, part.batches, part.size)
    options["_drop_last"] = dataloader.drop_last
    options["_non_blocking"] = non_blocking
    options["use_stateful_dataloader"] = use_stateful_dataloader
    if dispatches:
        options |= {"slice_fn": slice_fn_for_dispatch, "torch_device_mesh": torch_device_mesh}
        return DataLoaderDispatcher(part.dataset, split_batches, **options)
    synchronized = rng_types
    if rng_types is not None and part.generator is None:
        synchronized = [kind for kind in rng_types if str(RNGType(kind)) != "generator"]
    target_device = device if put_on_device else None
    return DataLoaderShard(part.dataset, target_device, synchronized, part.generator, **options)


class _Part(NamedTuple):
    """The data of one process.

    Attributes:
        dataset: The data set, or the process's part of it.
        batches: The sampler of batches. None for data without indices or batches.
        size: Samples of one batch of an iterable data set. None without batches.
        generator: The generator of the order, to which `"generator"` in `rng_types` refers. None without one,
            or if it need not be synchronized.
    """

    dataset: Any
    batches: Any
    size: int | None
    generator: torch.Generator | None = None


def _with_seedable_sampler(batches: Any, data_seed: int | None) -> Any:
    """Return a sampler of batches with a `SeedableRandomSampler` instead of a random sampler."""
    sampler = getattr(batches, "sampler", None)
    if not isinstance(sampler, RandomSampler):
        return batches
    batches = copy.copy(batches)  # the user's loader keeps its order
    batches.sampler = SeedableRandomSampler(
        sampler.data_source, sampler.replacement, sampler._num_samples, sampler.generator, data_seed=data_seed
    )
    return batches


def _divided(
    whole: _Part,
    world: int,
    index: int,
    *,
    drop_last: bool,
    split_batches: bool,
    even_batches: bool,
    is_seedable: bool,
) -> _Part:
    """Return the part of process `index` of `world` processes that read the data themselves."""
    dataset = whole.dataset
    is_iterable = isinstance(dataset, IterableDataset)
    if is_iterable and not split_batches and _has_hub_shards(dataset, world):
        # Each process reads only its own files.
        return whole._replace(dataset=dataset.shard(num_shards=world, index=index))
    if is_iterable:
        # Each process reads all samples and keeps its own. The order must be the same on all processes.
        shard = IterableDatasetShard(dataset, whole.size or 1, drop_last, world, index, split_batches)
        size = whole.size
        if split_batches and size:
            size //= world
        return whole._replace(dataset=shard, size=size, generator=getattr(dataset, "generator", None))
    if whole.batches is None:
        raise ConfigurationError("prepare_data_loader divides batches: give the DataLoader a batch size.")
    # Each process draws all indices and keeps those of its batches. A `SeedableRandomSampler` draws the same indices on
    # all processes.
    generator = None
    if not is_seedable:
        generator = _generator_of(getattr(whole.batches, "sampler", None))
    batches = BatchSamplerShard(whole.batches, world, index, split_batches, even_batches)
    return whole._replace(batches=batches, generator=generator)


def _batching(loader: DataLoader[Any], batches: object, size: int | None) -> dict[str, Any]:
    """Return the arguments of a DataLoader that determine its batches."""
    if isinstance(loader.dataset, IterableDataset):
        return {"batch_size": size, "drop_last": loader.drop_last}
    if batches is not None and not isinstance(loader.sampler, BatchSampler):
        return {"batch_sampler": batches}
    return {"batch_size": None, "sampler": loader.sampler if batches is None else batches}


def _num_with_equal_batches(mesh: DeviceMesh | None) -> int:
    """Return the number of adjacent processes that get the same batches, because they split a model or a sequence."""
    num_adjacent = 1
    if mesh is None:
        return num_adjacent
    for name in ("tp", "cp"):
        if name in (mesh.mesh_dim_names or ()):
            num_adjacent *= mesh[name].size()
    return num_adjacent


def _has_hub_shards(dataset: object, world: int) -> bool:
    """Return whether an iterable data set of the library `datasets` has a shard for each process."""
    return type(dataset).__module__.startswith("datasets.") and getattr(dataset, "n_shards", 0) >= world


def _generator_of(sampler: object) -> torch.Generator | None:
    """Return the generator of a sampler. A sampler without a generator receives a seeded generator."""
    if not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        sampler.generator = torch.Generator().manual_seed(seed)
    generator: torch.Generator = sampler.generator
    return generator
