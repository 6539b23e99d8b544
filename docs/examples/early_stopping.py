"""Early stopping: all processes stop after the step in which the loss of one of them has stopped improving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Accelerator
from trainwright.utils import set_seed


class EarlyStopping:
    """Stop when the loss has not improved by `min_delta` for `patience` micro-batches."""

    def __init__(self, min_delta: float = 0.0, patience: int = 3) -> None:
        self.min_delta, self.patience, self.counter, self.lowest = min_delta, patience, 0, float("inf")

    def should_stop(self, loss: float) -> bool:
        """Return True to stop."""
        improved = self.lowest - loss >= self.min_delta
        self.counter, self.lowest = (0, loss) if improved else (self.counter + 1, self.lowest)
        return self.counter >= self.patience


def training_function(
    config: dict[str, Any], on_step: Callable[[Any, torch.Tensor], None] = lambda batch, loss: None, **options: Any
) -> dict[str, Any]:
    """Train until a process stops; `on_step` receives each batch and its loss."""
    accelerator, stopping, num_steps, stopped = Accelerator(**options), EarlyStopping(), 0, False
    set_seed(config["seed"])
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), shuffle=True, batch_size=2)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(config["num_epochs"]):
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            on_step(batch, loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            num_steps += 1
            if stopping.should_stop(loss.item()):
                accelerator.set_trigger()
            if stopped := accelerator.check_trigger():  # True on every process
                break
        if stopped:
            break
    accelerator.print(f"stopped after {num_steps} steps" if stopped else "not stopped")
    accelerator.end_training()
    return {"stopped": stopped, "steps": num_steps}


if __name__ == "__main__":
    training_function({"lr": 0.02, "num_epochs": 2, "seed": 3})
