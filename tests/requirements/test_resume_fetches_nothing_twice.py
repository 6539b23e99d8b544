"""A resume in the middle of an epoch fetches nothing that was consumed, or is refused before the first step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RecordingCallback, RegressionTask, StepTask
from tests.requirements.resumable import BATCH, train
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError
from trainwright.data import ShuffledOrder
from trainwright.trainer.trainer import Trainer

_BATCH_SIZE, _START = 512, 10**6


class Virtual(Dataset[torch.Tensor]):
    """10¹² samples that exist when they are asked for; counts how often."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched.append(index)
        return torch.tensor(index)


class _FarAlong(Callback):
    """Counts as if a million batches of the epoch had been trained on; only their number is needed for that."""

    def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
        trainer.state.batch_in_epoch = _START


def _sum(task: RegressionTask, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
    return task.net(torch.zeros(1, 4)).sum() + 0 * batch.sum()


def _far_trainer(folder: Path, **arguments: Any) -> Trainer:
    return quiet_trainer(default_root_dir=folder, enable_checkpointing=True, async_save=False, **arguments)


def test_a_whole_run_resumed_at_batch_a_million_fetches_only_what_comes_next(tmp_path: Path) -> None:
    data, resumed = Virtual(), Virtual()
    begun = _far_trainer(tmp_path, max_steps=2, seed=4, callbacks=[_FarAlong()])
    begun.fit(StepTask(_sum), DataLoader(data, _BATCH_SIZE, shuffle=True))
    began = time.perf_counter()
    again = _far_trainer(tmp_path, max_steps=4)
    again.fit(StepTask(_sum), DataLoader(resumed, _BATCH_SIZE, shuffle=True), ckpt_path="last")
    seconds = time.perf_counter() - began
    first = (_START + 2) * _BATCH_SIZE
    assert resumed.fetched == ShuffledOrder(10**12, 4, 0).slice(first, first + 2 * _BATCH_SIZE).tolist()
    assert seconds < 30  # the loader's part is timed above; replaying would take hours


class Forgetful(IterableDataset[torch.Tensor]):
    """A stream without a state; notes how often it was opened."""

    def __init__(self) -> None:
        self.opened = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.opened += 1
        return iter(torch.arange(40.0).reshape(10, 4).double())


def test_a_stream_without_a_state_is_refused_before_training_starts(tmp_path: Path) -> None:
    train(DataLoader(Forgetful(), BATCH), tmp_path)
    data, watch = Forgetful(), RecordingCallback("on_train_start")
    with pytest.raises(ConfigurationError) as caught:
        train(DataLoader(data, BATCH), tmp_path / "resumed", tmp_path / "step=3", callbacks=[watch])
    assert not data.opened
    assert watch.events == []
    message = str(caught.value)
    for said in ("train_dataloader cannot begin at batch 3", "state_dict and load_state_dict", "StatefulDataLoader"):
        assert said in message
