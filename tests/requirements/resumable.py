"""Data, a task and runs with which the requirements about the place in the data are shown."""

from __future__ import annotations

import multiprocessing
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.helpers.runs import quiet_trainer
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.core.errors import TrainwrightWarning
from trainwright.core.task import TaskModule
from trainwright.data import ShardedIterable, shard_info

BATCH = 2
# By "forkserver" a worker inherits no thread and no lock of a rank that has a process group.
WORKERS: dict[int, dict[str, Any]] = {0: {}, 2: {"num_workers": 2, "multiprocessing_context": "forkserver"}}
multiprocessing.set_forkserver_preload([__name__])  # torch is imported once for all workers


def noisy(index: int) -> torch.Tensor:
    """Return (index, draws of the three global generators), shape (4,), float64."""
    return torch.tensor([index, torch.rand(()).item(), random.random(), float(np.random.rand())], dtype=torch.float64)


class NoisySamples(Dataset[torch.Tensor]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return noisy(index)


class Part:
    def __init__(self, part: range) -> None:
        self.part = part
        self.place = 0

    def __iter__(self) -> Part:
        return self

    def __next__(self) -> torch.Tensor:
        if self.place == len(self.part):
            raise StopIteration
        self.place += 1
        return noisy(self.part[self.place - 1])

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.place = state["place"]


class NoisyStream(IterableDataset[torch.Tensor]):
    """The same samples as a stream, divided over ranks and workers, whose iterators keep their place."""

    is_sharded = True

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[torch.Tensor]:
        index, count = shard_info()
        return Part(range(index, self.n, count))


class SelfKeptStream(IterableDataset[torch.Tensor]):
    """The same, keeping its place in itself and setting it back at its end; opens its own part."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.shard(0, 1)

    def shard(self, index: int, count: int) -> Iterator[torch.Tensor]:
        part = range(index, self.n, count)
        while self.place < len(part):
            self.place += 1
            yield noisy(part[self.place - 1])
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.place = state["place"]


class WholeStream(SelfKeptStream):
    """The same, which cannot open a part."""

    shard = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return SelfKeptStream.shard(self, 0, 1)


class NoisyBatches:
    """An iterable of batches that is no DataLoader and keeps its own place."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        start, self.place = self.place, 0
        for first in range(start, self.n, BATCH):
            self.place = first + BATCH
            yield torch.stack([noisy(i) for i in range(first, min(first + BATCH, self.n))])
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.place = state["place"]


_DATA: dict[str, Callable[[int], Any]] = {
    "stateful": NoisySamples,
    "stream": NoisyStream,
    "stream that keeps its place": SelfKeptStream,
    "stream read whole": lambda n: ShardedIterable(WholeStream(n)),
}


def make_loader(kind: str, n: int, workers: int, *, shuffle: bool = False, batch_size: int = BATCH) -> Any:
    """Return a loader of `n` samples: "plain", "stateful", a stateful one over a "stream" of some kind, or "own"."""
    if kind == "own":
        return NoisyBatches(n)
    if kind == "plain":
        return DataLoader(NoisySamples(n), batch_size, shuffle=shuffle, **WORKERS[workers])
    data = _DATA[kind](n)
    with warnings.catch_warnings():
        # torchdata 0.11 calls what torch 2.13 has deprecated.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        return StatefulDataLoader(data, batch_size, shuffle=shuffle, **WORKERS[workers])


class Seen(Callback):
    def on_train_step_start(self, trainer: Any, task: Any, group: Any) -> None:
        weights = group.weights or [1.0] * len(group.batches)
        real = [batch for batch, weight in zip(group.batches, weights, strict=True) if weight > 0]
        task.steps.append([int(i) for batch in real for i in batch[:, 0].tolist()])


class SeeingTask(TaskModule):
    """Its loss depends on the noise and on dropout; keeps the losses, and the samples of each step."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Linear(8, 1)).double()
        self.steps: list[list[int]] = []
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch / 10).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def train(loader: Any, folder: Path, ckpt_path: Path | None = None, **arguments: Any) -> SeeingTask:
    """Train two epochs and keep a checkpoint of every step in `folder`; the generators start elsewhere each time."""
    torch.manual_seed(77 if ckpt_path is None else 78)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    more = arguments.pop("callbacks", [])
    settings = {"max_epochs": 2, "seed": 3, "devices": "auto", "async_save": False, **arguments}
    task = SeeingTask()
    with warnings.catch_warnings():
        # A resumed run writes to a folder of its own.
        warnings.filterwarnings("ignore", "ModelCheckpoint.*not found", TrainwrightWarning)
        quiet_trainer(callbacks=[saver, Seen(), *more], **settings).fit(task, loader, ckpt_path=ckpt_path)
    return task


def resume_after_every_step(make: Callable[[], Any], folder: Path, steps: range, **arguments: Any) -> SeeingTask:
    """Train without a stop, then from the checkpoint of each of `steps`; fail unless what follows is bit-equal."""
    whole = train(make(), folder / "whole", **arguments)
    for step in steps:
        resumed = train(make(), folder / f"from {step}", folder / "whole" / f"step={step}", **arguments)
        assert whole.steps[:step] + resumed.steps == whole.steps, step
        # The last group of an epoch may be short: count from the end.
        assert resumed.losses == whole.losses[len(whole.losses) - len(resumed.losses) :], step
        assert resumed.losses or step == len(whole.steps)
    return whole
