"""A script whose ranks do not come together: `hanging_run.py KIND HANG_TIMEOUT_S SLOW_S`."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch._dynamo  # optimizers import it, which may take longer than the run may stand still
from torch import nn

from trainwright import Callback, DDPStrategy, TaskModule, Trainer

KIND, HANG_TIMEOUT_S, SLOW_S = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(1)


def dawdle() -> None:
    """Be where nobody expects this rank to be."""
    time.sleep(SLOW_S)


class Task(TaskModule):
    """Rank 1 does something else in the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Come late, or not at all."""
        if batch_idx == 2 and self.global_rank == 1:
            if KIND == "step":
                dawdle()
            if KIND == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
        return self.net(batch).pow(2).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Take time on rank 1."""
        self.log("seen", batch.sum())
        if KIND == "validation" and self.global_rank == 1:
            time.sleep(SLOW_S / 8)

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Collectives(Callback):
    """Rank 1 enters another collective than rank 0."""

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if KIND == "another collective" and batch_idx == 2 and trainer.global_rank == 1:
            trainer.strategy.processes.gather_object("here")


if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=DDPStrategy(timeout=60, hang_timeout=HANG_TIMEOUT_S),
        max_steps=6,
        callbacks=[Collectives()],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = [torch.ones(1, 4)] * 12
    trainer.fit(Task(), batches, [torch.ones(1, 4)] * 16 if KIND == "validation" else None)
    print("done", trainer.global_rank, flush=True)
