"""Started by a test: trains with Accelerate and saves its state where the argument says."""

from __future__ import annotations

import sys

import accelerate
import torch
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for (x,) in loader:
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.save_state(sys.argv[1], safe_serialization=False)
