"""DeepSpeed: ZeRO stage 2 shards gradients and optimizer states over the processes."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Accelerator, DeepSpeedPlugin
from trainwright.utils import set_seed


def training_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train, save, and continue from the state."""
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), **options)
    set_seed(config["seed"])
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), shuffle=True, batch_size=4)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # the model and its optimizer together
    losses = []
    for epoch in range(config["num_epochs"]):
        for rows, labels in loader:
            loss = nn.functional.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)  # of the full gradients; on every process
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        accelerator.save_state(os.path.join(config["output_dir"], f"epoch_{epoch}"))  # each process writes its shards
    weights = accelerator.get_state_dict(model)  # full weights on the main process
    accelerator.load_state(os.path.join(config["output_dir"], "epoch_0"))
    accelerator.save_model(model, os.path.join(config["output_dir"], "model"))
    accelerator.print(f"last loss: {losses[-1]:.3f}, {sum(each.numel() for each in weights.values())} weights")
    accelerator.end_training()
    return {"losses": losses, "shapes": {name: tuple(each.shape) for name, each in weights.items()}}


if __name__ == "__main__":
    folder = os.environ.get("RUN") or tempfile.mkdtemp()  # the same for all processes: RUN=runs torchrun …
    training_function({"lr": 0.02, "num_epochs": 2, "seed": 3, "output_dir": folder})
