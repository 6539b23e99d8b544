"""What Lightning and Accelerate leave on the disk, made by hand in their layout, so that tests need neither."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.flag}",)


class Net(torch.nn.Module):
    """A model with a buffer, shapes that repeat, and BatchNorm's buffers."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.relu(self.norm(self.first(x))))


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Do some steps, so that the optimizer has state that differs from parameter to parameter."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).pow(2).mean().backward()
        optimizer.step()


def lightning_dict(
    model: torch.nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    *,
    step: int = 8,
    epoch: int = 1,
    inside: int = 4,
    is_last_batch: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """Return what Lightning 2.6 saves at the end of an epoch (or `inside` it), as far as anybody reads it."""
    ended = epoch + 1 if is_last_batch else epoch
    current = {"ready": epoch + 1, "started": epoch + 1, "processed": ended, "completed": epoch}
    return {
        "epoch": epoch,
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": model.state_dict(),
        "loops": {
            "fit_loop": {
                "state_dict": {},
                "epoch_loop.batch_progress": {
                    "total": {"ready": step, "started": step, "processed": step, "completed": step},
                    "current": {"ready": inside, "started": inside, "processed": inside, "completed": inside},
                    "is_last_batch": is_last_batch,
                },
                "epoch_progress": {"total": current, "current": current},
            }
        },
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": None, "kth_value": torch.tensor(1.0)}},
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 4},
        **more,
    }


def accelerate_folder(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, safe: bool, num_processes: int = 1
) -> Path:
    """Write what `Accelerator.save_state` of Accelerate 1.15 writes."""
    from safetensors.torch import save_file

    folder.mkdir()
    if safe:
        save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save({"last_epoch": 3, "_step_count": 4, "_last_lr": [0.1]}, folder / "scheduler.bin")
    for rank in range(num_processes):
        torch.save(
            {
                "step": 0,
                "random_state": random.getstate(),
                "numpy_random_seed": np.random.get_state(),
                "torch_manual_seed": torch.get_rng_state(),
            },
            folder / f"random_states_{rank}.pkl",
        )
    return folder
