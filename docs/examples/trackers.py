"""Trackers: TensorBoard, and one of your own that appends to a file."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Accelerator
from trainwright.tracking import GeneralTracker, on_main_process
from trainwright.utils import set_seed


class JsonTracker(GeneralTracker):
    """Writes a line for each call of `log`, on the main process."""

    name = "json"
    requires_logging_directory = False

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @property
    def tracker(self) -> str:
        return self.path

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.log({"config": values}, step=None)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with open(self.path, "a") as file:
            print(json.dumps({"step": step, **values}), file=file)


def training_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train, and log the loss of each step and of each epoch."""
    path = os.path.join(config["output_dir"], "log.jsonl")
    accelerator = Accelerator(log_with=["tensorboard", JsonTracker(path)], project_dir=config["output_dir"], **options)
    accelerator.init_trackers("project", config={"lr": config["lr"], "seed": config["seed"]})
    set_seed(config["seed"])
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), shuffle=True, batch_size=4)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    for epoch in range(config["num_epochs"]):
        total = torch.zeros((), device=accelerator.device)
        for rows, labels in loader:
            loss = nn.functional.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
            accelerator.log({"loss": loss.item()}, step=step)  # the main process's loss
        mean = accelerator.reduce(total / len(loader), reduction="mean").item()  # of all processes
        accelerator.log({"epoch_loss": mean, "epoch": epoch}, step=step)
    if accelerator.is_main_process:
        accelerator.get_tracker("tensorboard", unwrap=True).add_text("note", "finished")  # torch's SummaryWriter
    accelerator.end_training()
    return {"steps": step, "path": path}


if __name__ == "__main__":
    folder = os.environ.get("RUN") or tempfile.mkdtemp()
    training_function({"lr": 0.02, "num_epochs": 2, "seed": 3, "output_dir": folder})
