"""Accelerate's free loaders on one and two processes: the batches are those of Accelerate 1.15."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from tests.data.sources import NumberStream
from tests.helpers.distributed import run_distributed
from trainwright import Accelerator
from trainwright.core.errors import ConfigurationError
from trainwright.data_loader import DataLoaderDispatcher, DataLoaderShard, prepare_data_loader

Batches = list[list[int]]


def loader(n: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(n), batch_size=4, **options)  # type: ignore[arg-type]


def stream(n: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(NumberStream(n), batch_size=4, **options)


# name → loader, options, the batches of both ranks, total batch size, remainder after the pass
DISPATCH, SPLIT = {"dispatch_batches": True, "put_on_device": True}, {"split_batches": True}
CASES: dict[str, tuple[Any, dict[str, Any], list[Batches], int, int]] = {
    "short": (loader(10), {}, [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]], 8, 2),
    "uneven": (loader(10), {"even_batches": False}, [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7]]], 8, 2),
    "drop_last": (loader(10, drop_last=True), {}, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]], 8, -1),
    "split": (loader(7), SPLIT, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]], 4, 3),
    "in sampler": (
        DataLoader(torch.arange(4), sampler=BatchSampler(SequentialSampler(range(4)), 2, False), batch_size=None),  # type: ignore[arg-type]
        {},
        [[[0, 1]], [[2, 3]]],
        4,
        0,
    ),
    "stream": (stream(10), {}, [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]], 8, -1),
    "split stream": (stream(7), SPLIT, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]], 4, -1),
    "dispatch": (loader(10), DISPATCH, [[[0, 1, 2, 3], [8]], [[4, 5, 6, 7], [9]]], 8, 2),
    "dispatch odd": (loader(11), DISPATCH, [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7], [10, 0]]], 8, 3),
    "dispatch stream": (
        stream(13),
        {"put_on_device": True},
        [[[0, 1, 2, 3], [8, 9, 10]], [[4, 5, 6, 7], [11, 12, 0]]],
        8,
        5,
    ),
    "dispatch split": (loader(7), DISPATCH | SPLIT, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]], 4, 3),
    "dispatch empty": (loader(10, collate_fn=lambda _: torch.zeros(0)), DISPATCH, [[[], []], [[], []]], 8, 0),
    "dispatch drop_last": (loader(10, drop_last=True), DISPATCH, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]], 8, 8),
}


def _read(loader: Any) -> tuple[Batches, list[bool], int]:
    batches, ends = [], []
    for batch in loader:
        batches.append(batch.tolist())
        ends.append(loader.end_of_dataloader)
    return batches, ends, loader.remainder


def _every_case() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (raw, options, *_) in CASES.items():
        ready = prepare_data_loader(raw, torch.device("cpu"), **options)
        found[name] = (type(ready), ready.total_batch_size, [_read(ready) for _ in range(2)])  # type: ignore[attr-defined]
    shuffled = loader(16, shuffle=True)
    torch.manual_seed(torch.distributed.get_rank())
    found["shuffled"] = _read(prepare_data_loader(shuffled, rng_types=["generator"]))[0]
    seeded = prepare_data_loader(loader(16, shuffle=True), use_seedable_sampler=True, data_seed=5)
    found["seeded"] = [_read(seeded)[0] for _ in range(2)]
    sampler = RandomSampler(range(8), replacement=True)
    synchronized = Accelerator(rng_types=["torch", "generator"]).prepare_data_loader(
        DataLoader(range(8), sampler=sampler, batch_size=2, generator=torch.Generator())  # type: ignore[arg-type]
    )
    for _ in synchronized:
        pass
    found["drawn"] = float(torch.rand(()))
    return found


@pytest.mark.distributed
def test_two_processes_get_the_batches_of_accelerate() -> None:
    ranks = run_distributed(_every_case, 2, init=False, timeout=60)
    for rank, found in enumerate(ranks):
        for name, (_, _, batches, total, remainder) in CASES.items():
            kind = DataLoaderDispatcher if name.startswith("dispatch") else DataLoaderShard
            ends = [i == len(batches[rank]) - 1 for i in range(len(batches[rank]))]
            assert found[name] == (kind, total, [(batches[rank], ends, remainder)] * 2), name
    for passes in ([found["shuffled"] for found in ranks], *zip(*(found["seeded"] for found in ranks), strict=True)):
        assert sorted(number for of_rank in passes for batch in of_rank for number in batch) == list(range(16))
    assert ranks[0]["seeded"][0] != ranks[0]["seeded"][1]
    assert ranks[0]["drawn"] == ranks[1]["drawn"]


def test_one_process_gets_all_batches() -> None:
    for options in ({}, DISPATCH, SPLIT, {"num_processes": 1, "process_index": 0}):
        ready = prepare_data_loader(loader(6), torch.device("cpu"), **options)  # type: ignore[arg-type]
        assert _read(ready) == ([[0, 1, 2, 3], [4, 5]], [False, True], 2)
        assert (len(ready), ready.iteration) == (2, 1)  # type: ignore[attr-defined]
    third = prepare_data_loader(loader(24), num_processes=3, process_index=2)
    assert _read(third)[0] == [[8, 9, 10, 11], [20, 21, 22, 23]]
    assert (third.total_batch_size, third.total_dataset_length) == (12, 24)  # type: ignore[attr-defined]
    skipping = DataLoaderShard(range(6), skip_batches=1, batch_size=2)
    assert _read(skipping)[0] == [[2, 3], [4, 5]]
    assert _read(DataLoaderDispatcher(range(6), skip_batches=1, batch_size=2))[0] == [[2, 3], [4, 5]]


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="batch_size=4 is not divisible by num_processes=3"):
        prepare_data_loader(loader(6), num_processes=3, process_index=0, split_batches=True)
    with pytest.raises(ConfigurationError, match="needs put_on_device=True"):
        prepare_data_loader(loader(6), dispatch_batches=True)


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher])
def test_an_interrupted_pass_continues(kind: Any) -> None:
    data = torch.arange(12)

    def make(seed: int) -> Any:
        sampler: Any = RandomSampler(data, generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
        return kind(data, batch_size=4, sampler=sampler, use_stateful_dataloader=True)

    whole, other = make(0), make(1)
    state = {}
    batches = []
    for _ in range(2):
        for batch in whole:
            batches.append(batch.tolist())
            state[len(batches)] = whole.state_dict()
    other.load_state_dict(state[1])
    assert other.state_dict().keys() == state[1].keys()
    assert other.state_dict()["batch"] == 1
    assert _read(other)[0] == batches[1:3]
    assert other.iteration == 1
    other.load_state_dict(state[3])
    assert len(_read(other)[0]) == 3
    assert other.state_dict() == whole.state_dict() == {"iteration": 2, "batch": 0, "generator": None}


def test_a_divided_pass_continues_in_its_order() -> None:
    def make() -> Any:
        shuffled = loader(32, shuffle=True, generator=torch.Generator().manual_seed(5))
        return prepare_data_loader(shuffled, num_processes=2, process_index=0)

    whole, other = make(), make()
    _read(whole)
    batches = []
    for batch in whole:
        batches.append(batch.tolist())
        if len(batches) == 1:
            state = whole.state_dict()
    other.load_state_dict(state)
    assert _read(other)[0] == batches[1:]
