"""Metrics over all processes: each sample counts once, although the last round is padded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Accelerator
from trainwright.utils import set_seed


def evaluation_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Evaluate with `gather_for_metrics`, or with `gather` and the padding removed in the script."""
    accelerator = Accelerator(**options)
    set_seed(config["seed"])
    inputs = torch.randn(config["num"], 8, generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=4)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    model, loader = accelerator.prepare(model, loader)
    right, seen, num_seen = [], [], 0
    for batch in loader:
        with torch.no_grad():
            found = (model(batch[0]).argmax(-1) == batch[1], batch[0])
        if config.get("gather", False):  # for scripts that are older than gather_for_metrics
            found = accelerator.gather(found)
            found = tuple(each[: config["num"] - num_seen] for each in found)
            num_seen += len(found[0])
        else:
            found = accelerator.gather_for_metrics(found)
        right.append(found[0])
        seen.append(found[1])
    metric = {"accuracy": torch.cat(right).float().mean().item(), "num": len(torch.cat(right))}
    accelerator.print(metric)
    accelerator.end_training()
    return {"metric": metric, "seen": torch.cat(seen)}


if __name__ == "__main__":
    evaluation_function({"num": 25, "seed": 3})
