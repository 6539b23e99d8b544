"""One replica of a run: a script with the number of steps, the seconds per step and a folder as arguments."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_data
from trainwright import Trainer
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.strategies.torchft.strategy import TorchFTStrategy

NUM_VALIDATED = 16


class Task(RegressionTask):
    """Has a momentum, a schedule that depends on the last rate, and batches with different numbers of items."""

    def __init__(self, step_s: float = 0.0) -> None:
        super().__init__(lr=0.05, momentum=0.9)
        self.step_s = step_s

    def num_items(self, batch: Any) -> int:
        return 1 + int((batch[1] > 0).sum())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.step_s)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500), "interval": "step"}
        ]


class Printer(Callback):
    def on_validation_batch_end(
        self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        print("validated", len(batch[0]), flush=True)

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        state = trainer.state
        print("step", state.step, state.epoch, state.batch_in_epoch, state.samples, flush=True)


def train(task: Task, num_steps: int, **arguments: Any) -> Trainer:
    """Train on shuffled batches of 4 samples, accumulating 2 of them. Return the Trainer."""
    trainer = quiet_trainer(
        max_steps=num_steps, accumulate_grad_batches=2, seed=0, num_sanity_val_steps=0,
        val_check_interval=2 * num_steps, check_val_every_n_epoch=None, **arguments,
    )  # fmt: skip
    validation = torch.utils.data.DataLoader(regression_data(NUM_VALIDATED), batch_size=4)
    trainer.fit(task, torch.utils.data.DataLoader(regression_data(252), batch_size=4, shuffle=True), validation)
    return trainer


def main() -> None:
    """Train one replica, or one process of a replica whose model is sharded, and save the weights."""
    num_steps, step_s, folder, number = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    options: dict[str, Any] = {"within": "fsdp"} if sys.argv[5:] == ["fsdp"] else {}
    torch.set_num_threads(1)
    task = Task(step_s)
    if not options:
        with torch.no_grad():
            next(task.parameters()).add_(float(number))  # the replicas must become equal
    callbacks = [Printer(), ModelCheckpoint(folder / "checkpoints", every_n_train_steps=num_steps)]
    strategy = TorchFTStrategy(host="127.0.0.1", timeout=5, **options)
    devices: Any = "auto" if options else 1
    trainer = train(task, num_steps, strategy=strategy, callbacks=callbacks, default_root_dir=folder, devices=devices)
    if trainer.global_rank == 0:
        torch.save(task.state_dict(), folder / f"weights_{number}.pt")


if __name__ == "__main__":
    main()
