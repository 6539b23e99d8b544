"""Early stopping on all processes when the loss of one is small: `early_stopping.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.accelerator.programs.synthetic import Record, classifier, rows
from trainwright import Accelerator
from trainwright.utils import set_seed


class EarlyStoppingCallback:
    """Stops when the loss has not improved by `min_delta` for `patience` micro-batches."""

    def __init__(self, min_delta: float = 0.0, patience: int = 3) -> None:
        self.min_delta, self.patience, self.counter, self.lowest_loss = min_delta, patience, 0, float("inf")

    def check_early_stopping(self, eval_loss: float) -> bool:
        """Return True to stop."""
        delta = self.lowest_loss - eval_loss
        if delta >= self.min_delta:
            self.lowest_loss, self.counter = eval_loss, 0
        else:
            self.counter += 1
        return self.counter >= self.patience


def training_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train until a process stops."""
    callback = EarlyStoppingCallback()
    accelerator = Accelerator(**options)
    set_seed(config["seed"])
    train_dataloader: Any = DataLoader(rows(64), shuffle=True, batch_size=2)
    model, record, stopped = classifier().to(accelerator.device), Record(), []
    optimizer: Any = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    for _ in range(config["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            record.add(batch, loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if callback.check_early_stopping(loss.item()):
                stopped.append(len(record.losses))
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
        if stopped or len(record.losses) % len(train_dataloader):
            break
    accelerator.end_training()
    return {"batches": record.batches, "losses": record.losses, "stopped": bool(stopped)}
