"""Disks that are full or read-only: the error says so, and the checkpoints that were there are whole."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.torture.runs import Ranks
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import newest_valid, read_checkpoint, verify
from trainwright.core.errors import CheckpointError
from trainwright.core.task import TaskModule
from trainwright.trainer.trainer import Trainer

STEPS = 8
_CHECKPOINT_KIB = 260  # weights and both moments of Adam are 240 KiB


class BroadTask(TaskModule):
    """Large enough for its checkpoints to fill a small disk."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(80, 160), nn.ReLU(), nn.Dropout(0.2), nn.Linear(160, 40))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(
    folder: Path,
    *,
    until: int = STEPS,
    resume: bool = False,
    async_save: bool = True,
    callbacks: Sequence[Callback] = (),
    **policy: Any,
) -> Any:
    """Train to step `until` with a checkpoint at every step, and keep all of them by default. Return the weights."""
    torch.manual_seed(78 if resume else 77)
    task = BroadTask()
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, **{"save_top_k": -1, **policy})
    trainer = quiet_trainer(devices="auto", max_steps=until, callbacks=[saver, *callbacks], async_save=async_save)
    loader = DataLoader(torch.arange(16.0 * 80).reshape(16, 80).sin(), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    trainer.fit(task, loader, ckpt_path="last" if resume else None)
    return weights_of(task)


def mount(disk: Path, options: str) -> None:
    """Mount (or remount) a disk in memory; skips the test where this user may not."""
    command = shutil.which("mount")
    if command is None:
        pytest.skip("there is no mount command")
    done = subprocess.run([command, "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that two checkpoints fit on, with their index, and no third."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount(folder, f"size={_CHECKPOINT_KIB * 2 + 160}k")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def check_whole(folder: Path, steps: set[int]) -> None:
    """Check that the newest checkpoint is one of `steps`, and that nothing half written lies beside it."""
    newest = newest_valid(folder)  # warns, which is an error here, of one that is damaged
    assert verify(newest) == []
    assert read_checkpoint(newest).state["step"] in steps
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".index.json"]


@pytest.mark.parametrize("async_save", [True, False], ids=["async", "sync"])
def test_a_full_disk_is_named_and_leaves_the_earlier_checkpoints(disk: Path, async_save: bool) -> None:
    folder = disk / "checkpoints"
    with pytest.raises((CheckpointError, OSError), match="No space left on device") as caught:
        train(folder, async_save=async_save)
    assert "step=3" in str(caught.value)  # which checkpoint, and so which disk
    check_whole(folder, {2})
    mount(disk, "remount,size=16m")
    resumed = train(folder, resume=True, async_save=async_save)
    assert_equal_weights(resumed, train(disk / "again", async_save=async_save))


@pytest.mark.parametrize("async_save", [True, False], ids=["async", "sync"])
def test_a_checkpoint_whose_replacement_does_not_fit_stays(disk: Path, async_save: bool) -> None:
    folder = disk / "checkpoints"
    (disk / "filler").write_bytes(bytes(_CHECKPOINT_KIB * 1024))
    with pytest.raises((CheckpointError, OSError), match="No space left on device"):
        train(folder, async_save=async_save, save_top_k=0, save_last=True)
    check_whole(folder, {1})


class ReadOnlyAfter(Callback):
    """Makes the disk read-only once the first checkpoint is whole."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk

    def on_train_batch_start(self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            assert newest_whole(self.disk / "checkpoints", time.monotonic() + 30.0)
            mount(self.disk, "remount,ro")


def newest_whole(folder: Path, until: float) -> Path | None:
    """Wait for a whole checkpoint beside which nothing is being written; an empty folder only keeps a name."""
    while time.monotonic() < until:
        written = [
            path for path in folder.iterdir() if path.name.startswith(".") and path.is_dir() and any(path.iterdir())
        ]
        if not written and (newest := newest_valid(folder)) is not None:
            return newest
        time.sleep(0.05)
    return None


@pytest.mark.parametrize("async_save", [True, False], ids=["async", "sync"])
def test_a_disk_that_becomes_read_only_is_named_and_keeps_its_checkpoints(disk: Path, async_save: bool) -> None:
    folder = disk / "checkpoints"
    with pytest.raises((CheckpointError, OSError), match="Read-only file system") as caught:
        train(folder, async_save=async_save, callbacks=[ReadOnlyAfter(disk)])
    assert "step=2" in str(caught.value)
    newest = newest_valid(folder)
    assert read_checkpoint(newest).state["step"] == 1
    mount(disk, "remount,rw,size=16m")
    assert_equal_weights(train(folder, resume=True), train(disk / "again"))
    check_whole(folder, {STEPS})  # the name that could not be given back on that disk is gone


@pytest.mark.slow
@pytest.mark.distributed
def test_both_processes_hear_of_a_full_disk(disk: Path, tmp_path: Path) -> None:
    folder = disk / "checkpoints"
    logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
    ranks = Ranks([partial(train, folder), partial(train, folder)], logs)
    try:
        assert ranks.wait(time.monotonic() + 60.0), ranks.output()
    finally:
        ranks.end()
    assert ranks.statuses == {0: 1, 1: 1}, ranks.output()
    for log in logs:
        assert "No space left on device" in log.read_text()
        assert "step=3" in log.read_text()
    assert "rank 0 could not write" in logs[1].read_text()
    check_whole(folder, {2})
