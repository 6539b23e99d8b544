"""Notebooks: `notebook_launcher` trains on several processes from a cell. A script may call it, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Accelerator, notebook_launcher
from trainwright.utils import set_seed


def training_function(lr: float, num_epochs: int) -> dict[str, Any]:
    """Train in each process. The Accelerator is created here, not in an earlier cell."""
    accelerator = Accelerator()
    set_seed(3)
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), shuffle=True, batch_size=4)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss = torch.zeros(())
    for _ in range(num_epochs):
        for rows, labels in loader:
            loss = nn.functional.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), reduction="mean").item()
    num_processes = accelerator.num_processes
    weights = {name: weight.cpu() for name, weight in accelerator.unwrap_model(model).state_dict().items()}
    accelerator.end_training()
    return {"loss": mean, "num_processes": num_processes, "weights": weights}


if __name__ == "__main__":  # in a notebook, the lines below are a cell
    found = notebook_launcher(training_function, (0.02, 2), num_processes=2)  # the first process's result
    print(f"loss on {found['num_processes']} processes: {found['loss']:.3f}")
