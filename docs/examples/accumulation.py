"""Gradient accumulation: four micro-batches in a step, gradients cross processes in the last one, with clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Accelerator
from trainwright.utils import set_seed


def training_function(
    config: dict[str, Any], on_step: Callable[[Any, torch.Tensor], None] = lambda batch, loss: None, **options: Any
) -> dict[str, Any]:
    """Train; `on_step` receives each micro-batch and its loss."""
    accelerator = Accelerator(gradient_accumulation_steps=4, **options)
    set_seed(config["seed"])
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), shuffle=True, batch_size=4)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    num_steps = 0
    for _ in range(config["num_epochs"]):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
                on_step(batch, loss)
                accelerator.backward(loss)  # divides by 4
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 100.0)
                    num_steps += 1
                optimizer.step()  # does nothing until the last micro-batch of a step
                optimizer.zero_grad()
    accelerator.print(f"{num_steps} optimizer steps of {len(loader) * config['num_epochs']} micro-batches")
    accelerator.end_training()
    return {"steps": num_steps}


if __name__ == "__main__":
    training_function({"lr": 0.02, "num_epochs": 2, "seed": 3})
