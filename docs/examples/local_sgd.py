"""LocalSGD: processes train on their own, and average their parameters after every so many optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Accelerator
from trainwright.local_sgd import LocalSGD
from trainwright.utils import set_seed


def make_data(num: int, seed: int) -> TensorDataset:
    """Return rows with a class of 2."""
    inputs = torch.randn(num, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def training_function(
    config: dict[str, Any], on_step: Callable[[Any, torch.Tensor], None] = lambda batch, loss: None, **options: Any
) -> dict[str, Any]:
    """Train in a block for each epoch, and evaluate the average between them."""
    accelerator = Accelerator(gradient_accumulation_steps=config["accumulate"], **options)
    set_seed(config["seed"])
    loader: Any = DataLoader(make_data(48, seed=0), shuffle=True, batch_size=2)
    eval_loader: Any = DataLoader(make_data(11, seed=1), batch_size=2)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    model, optimizer, loader, eval_loader = accelerator.prepare(model, optimizer, loader, eval_loader)
    metrics = []
    for _ in range(config["num_epochs"]):
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=config["local_sgd_steps"]) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
                    on_step(batch, loss)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:  # counts optimizer steps
                    local_sgd.step()
        with torch.no_grad():
            right = [accelerator.gather_for_metrics(model(rows).argmax(-1) == labels) for rows, labels in eval_loader]
        metrics.append({"accuracy": torch.cat(right).float().mean().item(), "num": len(torch.cat(right))})
        accelerator.print(metrics[-1])
    accelerator.end_training()
    return {"metrics": metrics}


if __name__ == "__main__":
    training_function({"lr": 0.02, "num_epochs": 2, "seed": 3, "accumulate": 2, "local_sgd_steps": 2})
