"""Seeds for random augmentation, which are sent to loader workers with the indices of a batch.

A loader worker is a process with its own generators, which a resume creates again. Its random numbers must therefore
not depend on earlier random numbers: the worker sets the seed that it receives with the indices.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset, Sampler, get_worker_info

from trainwright.core.errors import ConfigurationError
from trainwright.core.rng import isolate_rng
from trainwright.data.order import derive_key, epoch_key

_WORD = (1 << 64) - 1
# Indices of words that derive_key returns for an epoch's key. They differ from 0 to 11, the words in the cipher of the
# order. `stream`, which is 0 or a rank, is added to them.
_BATCH_STREAM = 1 << 32
_SAMPLE_STREAM = 1 << 33
# Index of a word for the seed of a batch's first sample.
_COLLATE_STREAM = 1 << 34


def seed_global_generators(seed: int) -> None:
    """Seed `random`, numpy's global generator and torch's CPU generator of this process with a 64-bit `seed`."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # numpy's limit
    torch.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)


def numbers_of_global_generators() -> tuple[float, float, float]:
    """Draw and return a number of each generator that `seed_global_generators` seeds."""
    return random.random(), np.random.random(), torch.rand((), device="cpu").item()


class HeldGenerator:
    """NumPy's or Python's generator in an attribute of a sampler, with one interface for both."""

    def __init__(self, generator: np.random.Generator | np.random.RandomState | random.Random) -> None:
        self._generator = generator

    def seed(self, seed: int) -> None:
        """Seed the generator with a 64-bit integer."""
        generator = self._generator
        if isinstance(generator, np.random.Generator):
            # It has no method to seed it: use the state of a new one of its kind.
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        elif isinstance(generator, np.random.RandomState):
            generator.seed(seed & 0xFFFFFFFF)
        else:
            generator.seed(seed)

    @property
    def state(self) -> Any:
        """The generator's state, in its own type."""
        generator = self._generator
        if isinstance(generator, np.random.Generator):
            return generator.bit_generator.state
        if isinstance(generator, np.random.RandomState):
            return generator.get_state()
        return generator.getstate()

    @state.setter
    def state(self, state: Any) -> None:
        generator = self._generator
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        else:
            generator.setstate(state)


def held_generators(owner: object) -> list[HeldGenerator]:
    """Return the generators of NumPy and Python among an object's attributes, in their order."""
    kinds = (np.random.Generator, np.random.RandomState, random.Random)
    generators = []
    for value in getattr(owner, "__dict__", {}).values():
        # SystemRandom reads the system's random numbers, which have no seed.
        if isinstance(value, kinds) and not isinstance(value, random.SystemRandom):
            generators.append(HeldGenerator(value))
    return generators


def batch_key(seed: int, epoch: int, stream: int = 0) -> int:
    """Return the key of an epoch's batches, whose seeds are `derive_key(key, batch)`. Ranks may differ in `stream`."""
    return derive_key(epoch_key(seed, epoch), _BATCH_STREAM + stream)


def sample_key(seed: int, epoch: int, stream: int = 0) -> int:
    """Return the key of an epoch's samples, for `sample_seed(key, index)`. Ranks may differ in `stream`."""
    return derive_key(epoch_key(seed, epoch), _SAMPLE_STREAM + stream)


def _unpickle_seeded(value: object, seed: int) -> Any:
    """Return `value`. In a loader worker, which unpickles its input, the generators are seeded before."""
    # torch (2.13) has no hook that runs in a worker before each batch, but it unpickles the batch's indices there.
    if get_worker_info() is not None:
        seed_global_generators(seed)
    return value


class SeededIndices(list[Any]):
    """Indices of one batch, with a seed for the loader worker that receives them.

    Random augmentation then depends only on (seed, epoch, micro-batch), and not on the number of workers, earlier
    batches of the worker, or a resume. Unpickling in a worker process seeds `random`, numpy's global generator and
    torch's CPU generator, and returns a plain list.
    """

    def __init__(self, indices: Iterable[Any], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_seeded, (self[:], self.seed)


class SeededIndex(int):
    """Single index with a seed, for a loader without batches. See `SeededIndices`."""

    seed: int

    @classmethod
    def of(cls, index: int, seed: int) -> SeededIndex:
        """Return `index` with its seed."""
        seeded_index = cls(index)
        seeded_index.seed = seed
        return seeded_index

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_seeded, (int(self), self.seed)


class SeededInput:
    """Input of another type for a worker, with a seed. Unpickled as `value`.

    `value` is a text or bytes index, or None for an iterable data set in a loader without batches, which ignores it.
    """

    def __init__(self, value: str | bytes | None, seed: int) -> None:
        self.value = value
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_seeded, (self.value, self.seed)


def seeded(indices: object, seed: int) -> Any:
    """Return a list of indices or an integer index with a seed for the worker.

    Objects of other types, also of sub-classes, are returned unchanged, without a seed.
    """
    if type(indices) is list:
        return SeededIndices(indices, seed)
    if type(indices) is int:
        return SeededIndex.of(indices, seed)
    return indices


class SampleSeeds(list[Any]):
    """Indices of one batch, each of which seeds the generators of the process before its sample is fetched.

    Random numbers for a sample depend only on (seed, epoch, index). Random numbers for collation depend only on (seed,
    epoch, the batch's first index).
    """

    def __init__(self, indices: Iterable[Any], key: int) -> None:
        super().__init__(indices)
        self.key = key

    def __iter__(self) -> Iterator[Any]:
        # torch fetches `[dataset[index] for index in indices]` and then collates. So each sample is fetched directly
        # after its seed is set, and collation follows the end of the iteration.
        for index in super().__iter__():
            seed_global_generators(sample_seed(self.key, index))
            yield index
        if len(self) > 0:
            seed_global_generators(derive_key(sample_seed(self.key, self[0]), _COLLATE_STREAM))

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleSeeds, (self[:], self.key)  # a slice copies without iterating


def sample_seed(key: int, index: Any) -> int:
    """Return the 64-bit seed of the sample at `index`.

    Raises:
        ConfigurationError: `index` is not an integer, text, bytes or tuple.
    """
    try:
        return derive_key(key, operator.index(index) & _WORD)
    except TypeError:
        if isinstance(index, (str, bytes, tuple)):
            return derive_key(key, xxhash.xxh3_64_intdigest(repr(index).encode()))
    raise ConfigurationError(
        f"per_sample_rng=True: an index of type {type(index).__name__} does not identify a sample. Let the sampler "
        "yield integers, strings or tuples of them."
    )


def seed_each_sample(batches: Iterator[Any], key: int, *, here: bool) -> Iterator[Any]:
    """Yield the batches of indices, or single indices, with a seed for every sample.

    Args:
        batches: batches of indices, or single indices, from a sampler. A tuple counts as a batch.
        key: see `sample_key`.
        here: True if this process fetches the data, directly after an index is drawn: a single index is then yielded
            without a seed, after the generators are seeded. False if workers fetch the data.
    """
    for indices in batches:
        if isinstance(indices, Iterable) and not isinstance(indices, (str, bytes)):
            yield SampleSeeds(indices, key)
            continue
        seed = sample_seed(key, indices)
        if here:
            seed_global_generators(seed)
            yield indices
        elif isinstance(indices, (str, bytes)):
            yield SeededInput(indices, seed)
        else:
            yield seeded(operator.index(indices), seed)


class Indexed(Protocol):
    """Object with a length and `[index]`."""

    def __getitem__(self, index: object, /) -> Any: ...

    def __len__(self) -> int: ...


class OneByOne(Dataset[Any]):
    """Map-style data set that fetches samples of another data set one by one.

    `__getitems__` of the other data set is not used, because it would fetch all samples with one seed.
    """

    def __init__(self, dataset: Indexed) -> None:
        self.dataset = dataset

    def __getitem__(self, index: object) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)


class IsolatedFetches(Iterator[Any]):
    """Iterator that restores this process's generators after each fetched item."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __next__(self) -> Any:
        with isolate_rng():
            return next(self._items)


def fetch_seeded(fetch: Callable[[Any], Any], indices: Iterable[Any], key: int) -> Iterator[Any]:
    """Yield `fetch(index)` for each index, with the generators seeded for the sample. They are restored after it."""
    for index in indices:
        with isolate_rng():
            seed_global_generators(sample_seed(key, index))
            item = fetch(index)
        yield item
        del item  # its memory is free before the next one is fetched


class SeededTurns(Sampler[Any]):
    """Sampler of a loader over an iterable data set. It sends one seed per batch to the workers, instead of indices.

    The state is the number of seeds that were sent, and their key. torchdata's StatefulDataLoader saves and restores
    it, and then continues with the same seeds.

    Attributes:
        batch_size: samples in a batch. None for a loader without batches.
        key: key of the epoch's seeds, set by `turn_to`.
    """

    def __init__(self, batch_size: int | None) -> None:
        self.batch_size = batch_size
        self.key = 0
        self._next = 0  # index of the next seed

    def turn_to(self, key: int) -> None:
        """Start with the seeds of another epoch; see `batch_key`."""
        self.key = key
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number of seeds that were sent, and their key."""
        return {"turn": self._next, "key": self.key}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the result of `state_dict`."""
        self._next = int(state["turn"])
        self.key = int(state["key"])

    def __iter__(self) -> Iterator[Any]:
        while True:
            seed = derive_key(self.key, self._next)
            self._next += 1
            if self.batch_size is None:
                yield SeededInput(None, seed)
            else:
                # torch takes as many samples from an iterable data set as the list has entries.
                yield SeededIndices([None] * self.batch_size, seed)
