"""Loaders that only the first process reads, and loaders whose batches are split over processes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.helpers.distributed import RankError, run_distributed
from trainwright import Accelerator, DataLoaderConfiguration, ShardedIterable
from trainwright.core.errors import ConfigurationError, WorkerError

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Batches = list[list[int]]


class OnlyFirst(Dataset[int]):
    """The numbers below n, which the other ranks cannot read."""

    def __init__(self, n: int, wrong: int = -1) -> None:
        self.n, self.wrong = n, wrong

    def __len__(self) -> int:
        assert os.environ["RANK"] == "0"
        return self.n

    def __getitem__(self, index: int) -> int:
        assert os.environ["RANK"] == "0"
        if index == self.wrong:
            raise OSError(f"sample {index} is damaged")
        return index


class Numbers(IterableDataset[int]):
    """The numbers below n, without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class Divided(Numbers):
    def shard(self, index: int, count: int) -> range:
        return range(index, self.n, count)


class Stream(Numbers):
    """The numbers below n, which the other ranks cannot read."""

    def __iter__(self) -> Iterator[int]:
        assert os.environ["RANK"] == "0"
        return super().__iter__()


def mapped(n: int, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        if os.environ["RANK"] == "0":
            return DataLoader(OnlyFirst(n), batch_size=4, **options)
        return DataLoader([0])  # type: ignore[arg-type]

    return make


def streamed(n: int, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Stream(n), batch_size=4, **options)


def plain(n: int, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(range(n), batch_size=4, **options)  # type: ignore[arg-type]


def custom() -> DataLoader[Any]:
    return DataLoader(range(20), batch_sampler=_CUSTOM)  # type: ignore[arg-type]


def of(dataset: IterableDataset[int], **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(dataset, batch_size=4, **options)


B = [list(range(i, i + 4)) for i in range(0, 16, 4)]
_CUSTOM = [[9, 8, 7], [1, 2], [5]]
_SPLIT_SEVEN = [[[0, 1], [4, 5]], [[2, 3], [6]]]
_FOUR = [[B[0], B[2]], [B[1], B[3]]]
_FOURTEEN = [[B[0], B[2]], [B[1], [12, 13]]]
# loader, both ranks' batches without padding, what gather_for_metrics returns
Case = tuple[Callable[[], Any], list[Batches], Batches]
CASES: dict[str, tuple[dict[str, bool], dict[str, Case]]] = {
    "the first process reads": (
        {"dispatch_batches": True},
        {
            "short": (mapped(14), _FOURTEEN, [B[0] + B[1], [*B[2], 12, 13]]),
            "one rank": (mapped(10), [[B[0], [8, 9]], [B[1]]], [B[0] + B[1], [8, 9]]),
            "drop_last": (mapped(10, drop_last=True), [[B[0]], [B[1]]], [B[0] + B[1]]),
            "workers": (mapped(16, num_workers=1), _FOUR, [B[0] + B[1], B[2] + B[3]]),
            "stream": (streamed(10), [[B[0], [8, 9]], [B[1]]], [B[0] + B[1], [8, 9]]),
        },
    ),
    "the first process reads, and each batch is split": (
        {"dispatch_batches": True, "split_batches": True},
        {
            "short": (mapped(7), _SPLIT_SEVEN, [B[0], [4, 5, 6]]),
            "one rank": (mapped(6), [[[0, 1], [4, 5]], [[2, 3]]], [B[0], [4, 5]]),
            "drop_last": (mapped(6, drop_last=True), [[[0, 1]], [[2, 3]]], [B[0]]),
            "stream": (streamed(7), _SPLIT_SEVEN, [B[0], [4, 5, 6]]),
        },
    ),
    "each batch is split": (
        {"split_batches": True},
        {
            "short": (plain(7), _SPLIT_SEVEN, [B[0], [4, 5, 6]]),
            "one rank": (plain(6), [[[0, 1], [4, 5]], [[2, 3]]], [B[0], [4, 5]]),
            "drop_last": (plain(7, drop_last=True), [[[0, 1]], [[2, 3]]], [B[0]]),
            "workers": (plain(8, num_workers=1), [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], B[:2]),
            "custom": (custom, [[[9, 8], [1], [5]], [[7], [2]]], _CUSTOM),
            "iterable": (of(ShardedIterable(Numbers(7))), _SPLIT_SEVEN, [B[0], [4, 5, 6]]),
        },
    ),
    "iterables are cut into shards": (
        {"dispatch_batches": False},
        {
            "short": (of(Numbers(14)), _FOURTEEN, [B[0] + B[1], [*B[2], 12, 13]]),
            "workers": (of(Numbers(16), num_workers=2), _FOUR, [B[0] + B[1], B[2] + B[3]]),
            "declared": (of(Divided(8)), [[[0, 2, 4, 6]], [[1, 3, 5, 7]]], [[0, 2, 4, 6, 1, 3, 5, 7]]),
        },
    ),
    "iterables are cut into shards of batches that are split": (
        {"dispatch_batches": False, "split_batches": True},
        {"short": (of(Numbers(7)), _SPLIT_SEVEN, [B[0], [4, 5, 6]])},
    ),
}


def _read(accelerator: Accelerator, loader: Any) -> tuple[Batches, Batches, bool]:
    own, gathered = [], []
    for batch in loader:
        if not accelerator._groups.micro_batch.is_padding:
            own.append(batch.tolist())
        gathered.append(accelerator.gather_for_metrics(batch).tolist())
    return own, gathered, loader.end_of_dataloader


def _nested(numbers: list[int]) -> dict[str, Any]:
    long = ["word" * 500] * len(numbers)
    x = torch.tensor(numbers)
    return {"x": (x, x > 1), "text": [str(n) for n in numbers], "empty": torch.empty(len(numbers), 0), "long": long}


def _listed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.tolist())
    if isinstance(value, dict):
        return {key: _listed(part) for key, part in value.items()}
    return [_listed(part) for part in value] if isinstance(value, (list, tuple)) else value


def _every_case(with_workers: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (options, cases) in CASES.items():
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))  # type: ignore[arg-type]
        for case, (make, *_) in cases.items():
            if (case == "workers") != with_workers:
                continue
            given = make()
            kept = weakref.ref(given)
            loader = accelerator.prepare_data_loader(given)
            del given
            assert kept() is not None  # otherwise, another object could have its id
            found[f"{name}: {case}"] = [_read(accelerator, loader) for _ in range(2)]
    return found


@pytest.mark.parametrize("with_workers", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_each_rank_reads_its_share_and_results_are_gathered_once(with_workers: bool) -> None:
    for rank, found in enumerate(run_distributed(_every_case, 2, with_workers, init=False, timeout=240)):
        for each, read in found.items():
            name, case = each.split(": ")
            _, expected, gathered = CASES[name][1][case]
            assert read == [(expected[rank], gathered, True)] * 2, each


def _dispatched() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for split in (False, True):
        config = DataLoaderConfiguration(split_batches=split, dispatch_batches=True)
        accelerator = Accelerator(dataloader_config=config)
        nested = accelerator.prepare_data_loader(mapped(7, collate_fn=_nested)())
        found[f"nested {split}"] = [_listed(batch) for batch in nested]
        loader = accelerator.prepare_data_loader(mapped(20)())
        found[f"numbers {split}"] = (loader.total_batch_size, len(loader))
        found[f"skipped {split}"] = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)]
        for _ in loader:
            break
        assert loader.state_dict()["position"] is None
        for number, _ in enumerate(loader):
            if number == 1:
                state = loader.state_dict()
                break
        resumed = accelerator.prepare_data_loader(mapped(20)())
        resumed.load_state_dict(state)
        found[f"resumed {split}"] = [batch.tolist() for batch in resumed]
    reversing = accelerator.prepare_data_loader(mapped(8)(), slice_fn_for_dispatch=_reversed)
    found["sliced"] = [batch.tolist() for batch in reversing]
    found["default"] = [batch.tolist() for batch in Accelerator().prepare_data_loader(streamed(10)())]
    accelerator = Accelerator(gradient_accumulation_steps=2)
    stream = accelerator.prepare_data_loader(streamed(20)())
    found["padding"] = [(accelerator._groups.micro_batch.is_padding, stream.end_of_dataloader) for _ in stream]
    return found


def _reversed(batch: Any, tensor_slice: slice, process_index: int, num_processes: int) -> Any:
    assert num_processes == 2
    assert process_index in (0, 1)
    return batch.flip(0)[tensor_slice]


def test_the_first_process_sends_the_others_their_share() -> None:
    ranks = run_distributed(_dispatched, 2, init=False, timeout=50)
    whole = [_listed(_nested(numbers)) for numbers in (B[0], [4, 5, 6])]
    parts = [[_listed(_nested(numbers)) for numbers in of_rank] for of_rank in _SPLIT_SEVEN]
    for rank, found in enumerate(ranks):
        assert found["nested False"] == [whole[rank]]
        assert found["nested True"] == parts[rank]
        assert (found["numbers False"], found["numbers True"]) == ((8, 3), (4, 5))
        assert found["skipped False"] == [[16, 17, 18, 19]]  # padding on rank 1
        assert found["skipped True"] == [[[8, 9], [12, 13], [16, 17]], [[10, 11], [14, 15], [18, 19]]][rank]
        assert found["resumed False"] == [[16, 17, 18, 19]]
        assert found["resumed True"] == found["skipped True"]
        assert found["sliced"] == [[[3, 2], [7, 6]], [[1, 0], [5, 4]]][rank]
        assert found["default"] == [[B[0], [8, 9]], [B[1], [8, 9]]][rank]
    assert ranks[0]["padding"] == [(False, False), (False, False), (False, True)]
    assert ranks[1]["padding"] == [(False, False), (False, False), (True, True)]


def _damaged() -> str:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare_data_loader(
        DataLoader(OnlyFirst(8, wrong=5), batch_size=2) if os.environ["RANK"] == "0" else []
    )
    read = 0
    try:
        for _ in loader:
            read += 1
    except (OSError, WorkerError) as error:
        return f"{read} {type(error).__name__}: {error}"
    return ""


def _empty() -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    accelerator.prepare_data_loader(DataLoader(OnlyFirst(0)) if accelerator.is_main_process else [])


def test_an_error_of_the_first_process_ends_all() -> None:
    first, second = run_distributed(_damaged, 2, init=False, timeout=50)
    assert first == "1 OSError: sample 5 is damaged"
    assert second == "1 WorkerError: the first process could not read the data: OSError: sample 5 is damaged"
    with pytest.raises(RankError, match="is empty"):
        run_distributed(_empty, 2, init=False, timeout=50)


class _Resumable(Stream):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.n:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def _resumed_stream() -> Any:
    accelerator = Accelerator(split_batches=True)
    loader = accelerator.prepare_data_loader(DataLoader(_Resumable(12), batch_size=4))
    for _ in loader:
        state = loader.state_dict()
        break
    other = accelerator.prepare_data_loader(DataLoader(_Resumable(12), batch_size=4))
    other.load_state_dict(state)
    return [[batch.tolist() for batch in other] for _ in range(2)]


def test_a_stream_that_keeps_its_position_is_resumed() -> None:
    first, second = run_distributed(_resumed_stream, 2, init=False, timeout=50)
    assert first == [[[4, 5], [8, 9]], [[0, 1], [4, 5], [8, 9]]]
    assert second == [[[6, 7], [10, 11]], [[2, 3], [6, 7], [10, 11]]]


def _split() -> dict[str, Any]:
    found: dict[str, Any] = {}
    accelerator = Accelerator(split_batches=True)
    loader = accelerator.prepare_data_loader(plain(10)())
    found["numbers"] = (loader.total_batch_size, loader.remainder, len(loader), loader.batch_size)
    found["skipped"] = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)]
    found["skipped custom"] = [batch.tolist() for batch in accelerator.skip_first_batches(custom(), 1)]  # type: ignore[arg-type]
    for _ in loader:
        break
    resumed = accelerator.prepare_data_loader(plain(10)())
    resumed.load_state_dict({"epoch": 0, "position": loader.prepared.position(1), "loader": None})
    found["resumed"] = [batch.tolist() for batch in resumed]
    wrong: dict[str, Any] = {"uneven": DataLoader(range(6), batch_size=3), "list": [torch.ones(4)]}  # type: ignore[arg-type]
    for name, given in wrong.items():
        with pytest.raises(ConfigurationError) as caught:
            accelerator.prepare_data_loader(given)
        found[name] = str(caught.value)
    config = DataLoaderConfiguration(split_batches=True, data_seed=3)
    shuffled = Accelerator(dataloader_config=config).prepare_data_loader(plain(16, shuffle=True)())
    found["shuffled"] = [batch.tolist() for batch in shuffled]
    return found


def test_two_ranks_get_the_parts_of_each_batch() -> None:
    ranks = run_distributed(_split, 2, init=False, timeout=240)
    for rank, found in enumerate(ranks):
        assert found["numbers"] == (4, 2, 3, 4)
        assert found["skipped"] == [[[8, 9]], [[0, 1]]][rank]  # rank 1 has padding
        assert found["skipped custom"] == [[[1], [5]], [[2], [5]]][rank]  # rank 1 has padding
        assert found["resumed"][0] == [[4, 5], [6, 7]][rank]
        assert "batch_size=3 is not divisible by num_processes=2" in found["uneven"]
        assert "a list without a batch size" in found["list"]
    one = Accelerator(cpu=True, seed=3, split_batches=True).prepare_data_loader(plain(16, shuffle=True)())
    assert [a + b for a, b in zip(*(found["shuffled"] for found in ranks), strict=True)] == [b.tolist() for b in one]
