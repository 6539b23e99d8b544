"""An iterable data set is divided over ranks and workers, or refused; it is never read twice in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask
from trainwright.core.errors import ConfigurationError
from trainwright.data import ShardedIterable, shard_info

_N = 23


class Stream(IterableDataset[int]):
    """0 .. 22, saying nothing about how it is divided."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(_N))


class ByMethod(Stream):
    """Opens its own part."""

    def shard(self, index: int, count: int) -> range:
        """Return one of `count` parts."""
        return range(index, _N, count)


class ByItself(Stream):
    """Divides itself."""

    is_sharded = True

    def __iter__(self) -> Iterator[int]:
        index, count = shard_info()
        return iter(range(index, _N, count))


_MADE = {"wrapped": lambda: ShardedIterable(Stream()), "method": ByMethod, "itself": ByItself}


class SeenTask(RegressionTask):
    """Keeps what it is given, padding left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {"train": [], "val": [], "predict": []}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Keep the numbers; a batch that pads this rank's share comes again right after itself."""
        numbers = batch.tolist()
        if self.seen["train"][-len(numbers) :] != numbers:
            self.seen["train"] += numbers
        return self.net(torch.ones(len(numbers), 4)).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Keep the numbers."""
        self.seen["val"] += batch.tolist()

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Keep the numbers."""
        self.seen["predict"] += batch.tolist()
        return batch


def _loader(kind: str, workers: int) -> DataLoader[Any]:
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    return DataLoader(_MADE[kind](), batch_size=3, **options)


_CASES = [(kind, workers) for kind in _MADE for workers in (0, 2)]


def _read_all() -> list[dict[str, list[int]]]:
    found = []
    for kind, workers in _CASES:
        task, trainer = SeenTask(), quiet_trainer(devices="auto", max_epochs=1, num_sanity_val_steps=0)
        trainer.fit(task, _loader(kind, workers), _loader(kind, workers))
        trainer.predict(task, _loader(kind, workers))
        found.append(task.seen)
    return found


@pytest.mark.distributed
def test_two_processes_with_and_without_workers_see_each_sample_exactly_once() -> None:
    for case, *of_ranks in zip(_CASES, *run_distributed(_read_all, 2, timeout=90), strict=True):
        for stage in ("train", "val", "predict"):
            union = sorted(number for seen in of_ranks for number in seen[stage])
            assert union == list(range(_N)), (case, stage)
            assert all(seen[stage] for seen in of_ranks)


def _refused_on_rank() -> list[str]:
    messages = []
    for stage in ("fit", "validate", "predict"):
        trainer = quiet_trainer(devices="auto", max_epochs=1)
        with pytest.raises(ConfigurationError) as caught:
            getattr(trainer, stage)(SeenTask(), DataLoader(Stream(), batch_size=3))
        messages.append(str(caught.value))
    return messages


@pytest.mark.distributed
def test_a_stream_that_does_not_say_how_it_is_divided_is_refused_on_every_rank() -> None:
    for messages in run_distributed(_refused_on_rank, 2):
        for message in messages:
            assert "Stream would be read completely by each of 2 ranks" in message
            assert "ShardedIterable" in message
