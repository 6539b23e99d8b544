"""A user's script whose last rank fails in the way that is asked for: `failing_run.py KIND FOLDER DEVICES STRATEGY`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from trainwright import DDPStrategy, ModelCheckpoint, TaskModule, Trainer

KIND, FOLDER, DEVICES, STRATEGY = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
_AT = 3  # the batch in which it happens
torch.set_num_threads(1)


def fail(rank: int, world: int) -> None:
    """Fail on the last rank, and note when."""
    if rank == world - 1:
        (FOLDER / "failed-at").write_text(str(time.time()))
        if KIND == "exit":
            os._exit(9)
        if KIND == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("seven is odd")


def begin_and_fail(rank: int, world: int) -> None:
    """Fail while an exchange is under way that the others do not take part in."""
    dist.all_reduce(torch.ones(4), async_op=True)
    fail(rank, world)


class FailingTask(TaskModule):
    """Two layers, in a bucket each, so that one's gradients are under way while the other's are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 600), nn.Linear(600, 600)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        rank, world = self.global_rank, self.trainer.world_size
        if batch_idx == _AT and KIND in ("exit", "kill"):
            fail(rank, world)
        hidden = self.first(batch)
        if batch_idx == _AT and KIND == "backward":
            if rank < world - 1:  # it never takes part in what the other has begun
                time.sleep(600)
            hidden.register_hook(lambda grad: begin_and_fail(rank, world))
        return self.second(hidden).pow(2).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("seen", batch.sum())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Fail during a save, in which ranks wait for each other."""
        if KIND == "save":
            fail(self.global_rank, self.trainer.world_size)

    def shard_units(self) -> Any:
        return [self.first, self.second]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    samples = torch.arange(32.0).repeat(4, 1).T / 32
    trainer = Trainer(
        accelerator="cpu",
        devices=int(DEVICES) if DEVICES.isdigit() else DEVICES,
        strategy=DDPStrategy(bucket_cap_mb=0.5) if STRATEGY == "ddp" else STRATEGY,
        max_epochs=2,
        callbacks=[ModelCheckpoint(every_n_train_steps=6, save_top_k=-1)],
        logger=False,
        default_root_dir=FOLDER,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(FailingTask(), DataLoader(samples, batch_size=1), DataLoader(samples, batch_size=4))
    (FOLDER / f"done-{trainer.global_rank}").touch()
