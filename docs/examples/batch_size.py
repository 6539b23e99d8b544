"""Automatic batch size: half of it after running out of memory, and as many more micro-batches in a step.

The effective batch size stays the same, and the peak memory of each attempt is shown.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Accelerator
from trainwright.utils import find_executable_batch_size, set_seed


def peak_memory(device: torch.device) -> float:
    """Return the peak memory in MB: of the device, or of the process without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # in KiB on Linux


def training_function(
    config: dict[str, Any], on_step: Callable[[Any, torch.Tensor], None] = lambda batch, loss: None, **options: Any
) -> dict[str, Any]:
    """Train with the largest batch size that fits; here more than `fits` rows count as out of memory."""
    accelerator = Accelerator(**options)
    wanted, tried = int(config["batch_size"]), []

    @find_executable_batch_size(starting_batch_size=wanted)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        accelerator.free_memory()
        if accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        accelerator.gradient_accumulation_steps = wanted // batch_size
        set_seed(config["seed"])
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
        loader: Any = DataLoader(data, shuffle=True, batch_size=batch_size)
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config["lr"])
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for _ in range(config["num_epochs"]):
            for step, batch in enumerate(loader):
                if step == 1 and len(batch[0]) > config["fits"]:
                    raise RuntimeError("CUDA out of memory.")  # the text of torch's error
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
                    on_step(batch, loss)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        accelerator.print(f"batch size {batch_size}: {peak_memory(accelerator.device):.0f} MB")

    train()
    accelerator.print(f"batch sizes tried: {tried}")
    accelerator.end_training()
    return {"tried": tried}


if __name__ == "__main__":
    training_function({"lr": 0.02, "num_epochs": 2, "seed": 3, "batch_size": 16, "fits": 4})
