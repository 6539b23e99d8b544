from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, SubsetRandomSampler

from tests.data.sources import Numbers, NumberStream, flat, ids, on_ranks, prepared
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.data import LoaderOptions, ShuffledOrder, prepare_loader


def test_shuffle_true_is_replaced_by_the_keyed_order_in_one_process_too() -> None:
    loader = prepared(DataLoader(Numbers(20), batch_size=4, shuffle=True), epoch=3, seed=9)
    assert flat(loader.iterate()) == ShuffledOrder(20, 9, 3).slice(0, 20).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("world", "workers"), [(2, 0), (3, 1)])
def test_the_global_order_depends_neither_on_ranks_nor_on_workers(world: int, workers: int) -> None:
    data = Numbers(23)
    whole = ids(prepared(DataLoader(data, batch_size=4, shuffle=True)).iterate())
    dealt = [
        ids(prepared(DataLoader(data, 4, True, num_workers=workers), rank=rank, world=world, lockstep=False).iterate())
        for rank in range(world)
    ]
    assert [own[i] for i in range(len(dealt[0])) for own in dealt if i < len(own)] == whole


def test_drop_last_drops_only_the_short_batch() -> None:
    loaders = [prepared(DataLoader(Numbers(11), 2, drop_last=True), rank=r, world=2, lockstep=False) for r in range(2)]
    assert [ids(loader.iterate()) for loader in loaders] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]
    assert [loader.num_batches for loader in loaders] == [3, 3]


def test_a_users_random_sampler_visits_each_sample_once_over_ranks() -> None:
    loaders = [DataLoader(Numbers(20), 2, sampler=SubsetRandomSampler(range(5, 18))) for _ in range(3)]
    dealt = [flat(prepared(x, rank=r, world=3, lockstep=False).iterate()) for r, x in enumerate(loaders)]
    assert sorted(number for own in dealt for number in own) == list(range(5, 18))


def test_a_users_distributed_sampler_is_left_alone_and_hears_of_each_epoch() -> None:
    def dataloader(rank: int) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(Numbers(20), num_replicas=2, rank=rank, seed=4)
        return DataLoader(Numbers(20), batch_size=5, sampler=sampler)

    for rank in range(2):
        alone = dataloader(rank)
        assert isinstance(alone.sampler, DistributedSampler)
        alone.sampler.set_epoch(3)
        assert ids(prepared(dataloader(rank), epoch=3, rank=rank, world=2).iterate()) == ids(alone)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_is_dealt_in_the_datas_order(stage: str) -> None:
    dealt = [ids(prepared(DataLoader(Numbers(6), 2), stage=stage, rank=r, world=2).iterate()) for r in range(2)]
    assert dealt == [[[0, 1], [4, 5]], [[2, 3]]]


def test_a_shuffled_evaluation_loader_is_not_shuffled_on_several_ranks() -> None:
    with pytest.warns(TrainwrightWarning, match="with 2 ranks the data is visited in its own order"):
        loader = prepared(DataLoader(Numbers(30), 5, shuffle=True), stage="test", world=2)
    assert flat(loader.iterate(2)) == [20, 21, 22, 23, 24]


def test_shuffle_false_overrides_the_loader() -> None:
    assert flat(prepared(DataLoader(Numbers(9), 3, shuffle=True), shuffle=False).iterate()) == list(range(9))


def test_what_is_no_loader_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="int is not a loader"):
        prepare_loader(3, LoaderOptions())
    with pytest.raises(ConfigurationError, match="dict is not a loader"):
        prepare_loader({"a": 1}, LoaderOptions())
    with pytest.raises(ConfigurationError, match="uneven='wait'"):
        prepare_loader([1], LoaderOptions(uneven="wait"))  # type: ignore[arg-type]


# Rounds, sizes and places


@pytest.mark.parametrize("size", [1, 4, 7])
def test_nothing_that_was_consumed_is_fetched_again(size: int) -> None:
    data = Numbers(50)
    whole = flat(prepared(DataLoader(data, size, shuffle=True)).iterate())
    data.fetched.clear()
    assert flat(prepared(DataLoader(data, size, shuffle=True)).iterate(3)) == whole[3 * size :]
    assert data.fetched == whole[3 * size :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "world", "shuffle"), [(0, 2, True), pytest.param(2, 2, True, marks=pytest.mark.exhaustive)]
)
def test_resuming_after_any_batch_gives_the_uninterrupted_list(workers: int, world: int, shuffle: bool) -> None:
    def loader(rank: int) -> Any:
        source = DataLoader(Numbers(17), batch_size=3, shuffle=shuffle, num_workers=workers)
        return prepared(source, epoch=1, rank=rank, world=world, lockstep=False)

    for rank in range(world):
        whole = ids(loader(rank).iterate())
        for k in range(len(whole) + 1):
            assert whole[:k] + ids(loader(rank).iterate(k)) == whole


def test_a_stream_that_cannot_seek_refuses_to_begin_in_the_middle() -> None:
    with pytest.raises(ConfigurationError, match="cannot begin at batch 2: DataLoader can neither seek"):
        prepared(DataLoader(NumberStream(10))).iterate(2)
    with pytest.raises(ConfigurationError, match="cannot begin at batch 1"):
        prepared(iter([1, 2])).iterate(1)


# Uneven ranks


def own_loaders(counts: list[int], **settings: Any) -> list[tuple[int | None, list[list[int]], list[bool]]]:
    """What ranks get that have different loaders of their own, nothing dealt."""

    def work(rank: int, agree: Any) -> tuple[int | None, list[list[int]], list[bool]]:
        source = DataLoader(Numbers(counts[rank]), batch_size=1)
        loader = prepared(source, rank=rank, world=len(counts), use_distributed_sampler=False, agree=agree, **settings)
        batches = ids(loader.iterate())
        return loader.num_batches, batches, [loader.has_batch(i) for i in range(len(batches))]

    return on_ranks(len(counts), work)


def test_padding_replays_the_last_batch_until_all_are_done() -> None:
    three, five = own_loaders([3, 5])
    assert three == (5, [[0], [1], [2], [2], [2]], [True, True, True, False, False])
    assert five == (5, [[0], [1], [2], [3], [4]], [True] * 5)


def test_padding_does_not_show_what_the_step_changed_in_the_batch() -> None:
    loader = prepared([{"x": i, "parts": [i]} for i in range(3)], rank=1, world=2)
    popped = [(batch.pop("x"), batch["parts"].pop()) for batch in loader.iterate()]
    assert popped == [(1, 1), (1, 1)]


def test_stop_ends_all_ranks_with_the_first() -> None:
    assert [own[:2] for own in own_loaders([3, 5], uneven="stop")] == [(3, [[0], [1], [2]])] * 2


def test_error_refuses_before_the_start_and_names_the_numbers() -> None:
    with pytest.raises(ConfigurationError, match=r"different numbers of batches, \[3, 5\]"):
        own_loaders([3, 5], uneven="error")


def test_a_rank_without_any_batch_pads_with_the_epochs_first() -> None:
    loader = prepared(DataLoader(Numbers(4), batch_size=4), rank=2, world=3)
    assert (ids(loader.iterate()), loader.has_batch(0)) == ([[0, 1, 2, 3]], False)
    assert list(prepared([7], rank=1, world=2).iterate()) == [7]


def test_evaluation_ends_at_different_rounds_unless_it_is_in_lock_step() -> None:
    source = DataLoader(Numbers(3), batch_size=1)
    assert ids(prepared(source, stage="validate", rank=1, world=2).iterate()) == [[1]]
    padded = prepared(source, stage="validate", rank=1, world=2, lockstep=True)
    assert ids(padded.iterate()) == [[1], [1]]
    assert [padded.has_batch(i) for i in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("counts", "first", "real"), [((3, 4), [0, 1, 2, 2], 3), ((0, 2), [10, 10], 0)], ids=["short", "empty"]
)
def test_evaluation_in_lock_step_agrees_on_the_end_of_a_stream(counts: Any, first: list[int], real: int) -> None:
    def work(rank: int, agree: Any) -> tuple[list[int], list[bool]]:
        loader = prepared(
            (10 * rank + i for i in range(counts[rank])), stage="test", rank=rank, world=2, lockstep=True,
            use_distributed_sampler=False, agree=agree, lend=lambda batch: [row[0] for row in agree([batch or 0])],
        )  # fmt: skip
        batches = list(loader.iterate())
        return batches, [loader.has_batch(i) for i in range(len(batches))]

    short, long = on_ranks(2, work)
    assert short == (first, [i < real for i in range(counts[1])])
    assert long == ([10 + i for i in range(counts[1])], [True] * counts[1])


# Workers and random numbers


class Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), float(np.random.rand())])


def augmented(start: int = 0, **settings: Any) -> torch.Tensor:
    workers = settings.pop("workers", 2)
    loader = prepared(DataLoader(Augmented(), 4, shuffle=True, num_workers=workers), epoch=1, **settings)
    return torch.cat(list(loader.iterate(start)))


@pytest.mark.slow
def test_augmentation_in_workers_does_not_depend_on_their_number_or_on_a_resume() -> None:
    whole = augmented()
    assert torch.equal(augmented(workers=1), whole)
    assert torch.equal(augmented(start=3), whole[12:])
    assert torch.equal(augmented(rank=1, world=2), whole.reshape(6, 4, 4)[1::2].reshape(-1, 4))


class Noise(IterableDataset[torch.Tensor]):
    """An endless-looking stream of random numbers, drawn in the worker."""

    is_sharded = True

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(()) for _ in range(3))


@pytest.mark.slow
def test_workers_of_a_stream_are_seeded_by_seed_epoch_and_rank() -> None:
    def drawn(epoch: int, **more: Any) -> list[Any]:
        source = DataLoader(Noise(), num_workers=1)
        return flat(prepared(source, epoch, stage="validate", **more).iterate())

    assert drawn(1) == drawn(1)
    different = [drawn(0), drawn(1), drawn(1, seed=5), drawn(1, rank=1, world=2)]
    assert len({tuple(numbers) for numbers in different}) == 4


class NamedNoise(Dataset[torch.Tensor]):
    def __getitem__(self, name: object) -> torch.Tensor:
        return torch.rand(()) if name in ("first", "second", b"third") else torch.zeros(())

    def __len__(self) -> int:
        return 3


def test_names_of_samples_without_batches_have_equal_seeds_with_and_without_a_worker() -> None:
    options = LoaderOptions(per_sample_rng=True)
    drawn: list[list[float]] = []
    for num_workers in (0, 1):
        names: Any = ["first", "second", b"third"]
        source = DataLoader(NamedNoise(), batch_size=None, sampler=names, num_workers=num_workers)
        loader = prepare_loader(source, options)
        loader.set_epoch(0)
        drawn.append([sample.item() for sample in loader.iterate()])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3


def test_persistent_workers_serve_every_epoch_in_its_own_order() -> None:
    source = DataLoader(Numbers(12), 3, shuffle=True, num_workers=1, persistent_workers=True)
    loader = prepare_loader(source, LoaderOptions())
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert flat(loader.iterate(epoch)) == ShuffledOrder(12, 0, epoch).slice(3 * epoch, 12).tolist()


class OfEpoch(Numbers):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(100 * self.epoch + index)


@pytest.mark.parametrize(("num_workers", "per_sample_rng"), [(0, True), (1, False)])
def test_a_data_set_receives_the_epoch(num_workers: int, per_sample_rng: bool) -> None:
    options = LoaderOptions(per_sample_rng=per_sample_rng)
    loader = prepare_loader(DataLoader(OfEpoch(4), 2, num_workers=num_workers), options)
    for epoch in (3, 1):
        loader.set_epoch(epoch)
        assert flat(loader.iterate()) == [100 * epoch + i for i in range(4)]


def test_a_list_receives_the_epoch_before_its_batches_are_counted() -> None:
    batches = type("OfEpoch", (list,), {"set_epoch": list.append})([0])
    assert list(prepared(batches, epoch=3).iterate()) == [0, 3]


def test_a_data_set_in_persistent_workers_does_not_receive_the_epoch_and_gives_a_warning() -> None:
    with pytest.warns(TrainwrightWarning, match=r"OfEpoch\.set_epoch is not called"):
        prepare_loader(DataLoader(OfEpoch(4), num_workers=1, persistent_workers=True), LoaderOptions())


@pytest.mark.parametrize("per_sample_rng", [False, True])
def test_a_list_begins_its_second_pass_where_the_first_has_ended(per_sample_rng: bool) -> None:
    second = []
    for rank in range(2):
        loader = prepared([10, 11, 12], rank=rank, world=2, lockstep=False, per_sample_rng=per_sample_rng)
        second.append(list(loader.cycle(1, 0)))
    assert second == [[11], [10, 12]]
