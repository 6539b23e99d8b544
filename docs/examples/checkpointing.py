"""Checkpoints by epoch or by step, and a run that continues from one at the next batch."""

from __future__ import annotations

import os
import tempfile
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
    """Train from the start, or from the folder of a state; its name tells the epoch or the step."""
    accelerator, folder, every = Accelerator(**options), config["output_dir"], config["checkpointing_steps"]
    set_seed(config["seed"])
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), shuffle=True, batch_size=4)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=12)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    step = 0
    if config["resume_from_checkpoint"]:
        path = config["resume_from_checkpoint"]
        if path == "newest":
            path = max((entry.path for entry in os.scandir(folder)), key=os.path.getctime)
        accelerator.load_state(path)
        kind, _, number = os.path.basename(path).partition("_")
        step = (int(number) + 1) * len(loader) if kind == "epoch" else int(number)
    for epoch in range(step // len(loader), config["num_epochs"]):
        for batch in loader:  # the first pass after load_state starts at the saved position
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            on_step(batch, loss)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if every != "epoch" and step % int(every) == 0:
                accelerator.save_state(os.path.join(folder, f"step_{step}"))
        if every == "epoch":
            accelerator.save_state(os.path.join(folder, f"epoch_{epoch}"))
    accelerator.end_training()
    return {"step": step}


if __name__ == "__main__":
    run = {"lr": 0.02, "num_epochs": 2, "seed": 3, "output_dir": os.environ.get("RUN", "") or tempfile.mkdtemp()}
    training_function({**run, "checkpointing_steps": "epoch", "resume_from_checkpoint": None})
