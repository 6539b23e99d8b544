"""Cross-validation: a model for each fold, whose predictions on the test set are averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from trainwright import Accelerator
from trainwright.utils import set_seed

NUM_FOLDS = 3


def make_data(num: int, seed: int) -> TensorDataset:
    """Return rows with a class of 2."""
    inputs = torch.randn(num, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def training_function(
    config: dict[str, Any], on_step: Callable[[Any, torch.Tensor], None] = lambda batch, loss: None, **options: Any
) -> dict[str, Any]:
    """Train a model for each fold, and return the accuracy of the folds and of their mean."""
    accelerator, data, test, size = Accelerator(**options), make_data(24, 0), make_data(11, 1), config["batch_size"]

    def predict(model: Any, loader: Any) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([accelerator.gather_for_metrics(model(batch[0])) for batch in loader])

    predictions, metrics = [], []
    for fold, valid in enumerate(torch.arange(len(data)).chunk(NUM_FOLDS)):
        set_seed(config["seed"] + fold)
        train = Subset(data, [i for i in range(len(data)) if i not in valid])
        loaders: Any = [DataLoader(train, shuffle=True, batch_size=size)]
        loaders += [DataLoader(part, batch_size=size) for part in (Subset(data, valid.tolist()), test)]
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config["lr"])
        scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        model, optimizer, scheduler, *loaders = accelerator.prepare(model, optimizer, scheduler, *loaders)
        for _ in range(config["num_epochs"]):
            for batch in loaders[0]:
                loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
                on_step(batch, loss)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            right = predict(model, loaders[1]).argmax(-1) == data.tensors[1][valid].to(accelerator.device)
            metrics.append({"accuracy": right.float().mean().item(), "num": len(right)})
        predictions.append(predict(model, loaders[2]))
        model, optimizer, scheduler, *loaders = accelerator.free_memory(model, optimizer, scheduler, *loaders)
    right = torch.stack(predictions).mean(0).argmax(-1).cpu() == test.tensors[1]
    accelerator.print(f"accuracy of the mean of {NUM_FOLDS} folds: {right.float().mean():.2f}")
    accelerator.end_training()
    return {"metrics": metrics, "test": {"accuracy": right.float().mean().item(), "num": len(right)}}


if __name__ == "__main__":
    training_function({"lr": 0.02, "num_epochs": 2, "seed": 3, "batch_size": 4})
