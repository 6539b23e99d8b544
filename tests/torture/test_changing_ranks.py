"""A training that goes on with another number of processes, in the middle of an epoch."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.helpers.runs import quiet_trainer
from tests.torture.runs import Ranks, append, lines_of, preload
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import newest_valid
from trainwright.checkpoint.format.manifests import read_manifest
from trainwright.core.errors import TrainwrightWarning
from trainwright.core.task import TaskModule

pytestmark = [pytest.mark.exhaustive, pytest.mark.distributed]

SAMPLES, GLOBAL_BATCH, EPOCHS = 100, 12, 3
STEPS_PER_EPOCH = 9  # the last one of an epoch has 4 samples: on some ranks fewer than on others, or none
STEPS = EPOCHS * STEPS_PER_EPOCH
_LIMIT_S = 90.0


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    """(index, input), a pure function of the index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(1.0, 5.0) * index)


class WeighedTask(TaskModule):
    """Without dropout, since the number of processes changes what is drawn; each micro-batch weighs its samples."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[1]), batch[1].sum(1, keepdim=True))

    def num_items(self, batch: Any) -> int:
        return len(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Notes(Callback):
    """Note, at each completed step, its number, this rank's part of the loss and the samples of its real batches."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.ids: list[int] = []

    def on_train_step_start(self, trainer: Any, task: Any, group: Any) -> None:
        weights = group.weights or [1.0] * len(group.batches)
        real = [batch for batch, weight in zip(group.batches, weights, strict=True) if weight > 0]
        self.ids = [i for batch in real for i in batch[0].tolist()]

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        append(self.file, f"{trainer.state.step} {result.loss.item()} {' '.join(map(str, self.ids))}")


@dataclass(frozen=True)
class Phase:
    """One start of the training: with how many processes and micro-batches, and until which step.

    Attributes:
        world, accumulate: their product divides the global batch, which stays the same.
        until: the step it ends at by itself.
        kill_after_s: or it is killed so long after its start.
    """

    world: int
    accumulate: int = 1
    until: int = STEPS
    kill_after_s: float | None = None


def train(folder: Path, number: int, phase: Phase, rank: int, *, resume: bool) -> None:
    """Train in one phase, from the last checkpoint if `resume`."""
    torch.manual_seed(1000 + number if resume else 5)
    saver = ModelCheckpoint(folder / "checkpoints", filename="{step}", every_n_train_steps=1, save_top_k=1)
    trainer = quiet_trainer(
        devices="auto",
        max_epochs=EPOCHS,
        max_steps=phase.until,
        accumulate_grad_batches=phase.accumulate,
        callbacks=[saver, Notes(folder / f"{number:03d}-rank{rank}")],
    )
    loader = DataLoader(Numbers(), batch_size=GLOBAL_BATCH // phase.world // phase.accumulate, shuffle=True)
    with warnings.catch_warnings():
        # That the generators start anew is said; nothing here draws from them.
        warnings.filterwarnings("ignore", ".*process\\(es\\) and is resumed by", TrainwrightWarning)
        trainer.fit(WeighedTask(), loader, ckpt_path="last" if resume else None)


@dataclass
class Step:
    """A completed step over all ranks: its loss, and its samples."""

    loss: float
    ids: list[int]


def run_phase(folder: Path, number: int, phase: Phase) -> dict[int, Step]:
    """Run one phase; returns its completed steps by number.

    Raises:
        AssertionError: a rank failed by itself, or was not done in time.
    """
    resume = newest_valid(folder / "checkpoints") is not None
    works = [partial(train, folder, number, phase, rank, resume=resume) for rank in range(phase.world)]
    ranks = Ranks(works, [folder / f"{number:03d}-rank{rank}.log" for rank in range(phase.world)])
    limit_s = _LIMIT_S if phase.kill_after_s is None else phase.kill_after_s
    try:
        done = ranks.wait(time.monotonic() + limit_s, all_of_them=False)
        assert done or phase.kill_after_s is not None, ranks.output()
    finally:
        ranks.end()
    assert not ranks.failed, ranks.output()
    steps: dict[int, Step] = {}
    noted = [lines_of(folder / f"{number:03d}-rank{rank}") for rank in range(phase.world)]
    for lines in zip(*noted, strict=not any(ranks.statuses.values())):
        rows = [line.split() for line in lines]
        assert len({row[0] for row in rows}) == 1
        ids = [int(i) for row in rows for i in row[2:]]
        steps[int(rows[0][0])] = Step(sum(float(row[1]) for row in rows) / len(rows), ids)
    return steps


def run_phases(folder: Path, phases: Iterable[Phase]) -> list[Step]:
    """Run phases one after the other; returns the steps that count, in order."""
    folder.mkdir()
    steps: dict[int, Step] = {}
    for number, phase in enumerate(phases):
        newest = newest_valid(folder / "checkpoints")
        start = read_manifest(newest).step if newest is not None else 0
        new = run_phase(folder, number, phase)
        assert list(new) == list(range(start + 1, start + 1 + len(new)))
        steps.update(new)
    assert sorted(steps) == list(range(1, STEPS + 1))
    return [steps[number] for number in sorted(steps)]


def check_equal(steps: list[Step], alone: list[Step]) -> None:
    """Check that every epoch visited each sample once, in the same steps as one process alone, with its losses."""
    for epoch in range(EPOCHS):
        of_epoch = steps[epoch * STEPS_PER_EPOCH : (epoch + 1) * STEPS_PER_EPOCH]
        assert sorted(i for step in of_epoch for i in step.ids) == list(range(SAMPLES))
    assert [sorted(step.ids) for step in steps] == [sorted(step.ids) for step in alone]
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in alone], abs=1e-5, rel=0)


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> None:
    preload()


def test_four_two_three_and_one_processes_share_an_epoch(tmp_path: Path) -> None:
    alone = run_phases(tmp_path / "alone", [Phase(1)])
    within = [Phase(4, until=2), Phase(2, until=4), Phase(3, until=6), Phase(1)]
    check_equal(run_phases(tmp_path / "within", within), alone)
    # The last step of an epoch, which is shorter than the others, on each number of processes; and accumulation.
    across = [Phase(4, until=11), Phase(2, accumulate=3, until=13), Phase(3, until=20), Phase(1, accumulate=2)]
    check_equal(run_phases(tmp_path / "across", across), alone)


@pytest.mark.torture
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(6))
def test_kills_and_changes_of_the_number_of_processes_together(seed: int, tmp_path: Path) -> None:
    alone = run_phases(tmp_path / "alone", [Phase(1)])
    source = random.Random(seed)
    shapes = [(world, n) for world in (1, 2, 3, 4) for n in (1, 2, 3) if GLOBAL_BATCH % (world * n) == 0]
    killed = [Phase(*source.choice(shapes), kill_after_s=source.uniform(0.05, 0.6)) for _ in range(8)]
    check_equal(run_phases(tmp_path / "torn", [*killed, Phase(1)]), alone)
