"""The same training on one process and on several: a step consumes 32 samples, and losses are equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Accelerator
from trainwright.utils import set_seed

_SAMPLES_OF_A_STEP = 32


def training_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train and return the loss over all data."""
    accelerator = Accelerator(seed=config["seed"], **options)
    set_seed(config["seed"])
    features = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(features, features.sin().sum(1, keepdim=True))
    batch_size = _SAMPLES_OF_A_STEP // accelerator.num_processes
    loader: Any = DataLoader(data, batch_size=batch_size, shuffle=True)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=config["lr"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(config["num_epochs"]):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        errors = [(model(inputs) - targets).square() for inputs, targets in loader]
    loss = accelerator.gather_for_metrics(torch.cat(errors)).mean().item()
    accelerator.print(f"{accelerator.num_processes} processes: {loss:.4f}")
    accelerator.end_training()
    return {"loss": loss, "steps": len(loader) * config["num_epochs"]}


if __name__ == "__main__":
    training_function({"lr": 0.02, "num_epochs": 4, "seed": 0})
