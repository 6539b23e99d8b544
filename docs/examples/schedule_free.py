"""A schedule-free optimizer, which has other weights for training than for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Accelerator
from trainwright.utils import set_seed


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Schedule-free SGD of Defazio et al.: parameters are `y` in training and the average `x` in evaluation."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "k": 0, "train_mode": False})

    @torch.no_grad()
    def train(self, mode: bool = True) -> None:
        """Set the parameters to `y`, or with `mode=False` to `x`."""
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != mode else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - group["beta"] if mode else 1 - 1 / group["beta"])
            group["train_mode"] = mode

    def eval(self) -> None:
        """Set the parameters to `x`."""
        self.train(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step once; call `train()` before."""
        for group in self.param_groups:
            weight = 1 / (group["k"] + 1)
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, weight).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


def training_function(
    config: dict[str, Any], on_step: Callable[[Any, torch.Tensor], None] = lambda batch, loss: None, **options: Any
) -> dict[str, Any]:
    """Train, evaluate the average, and train on."""
    accelerator, evaluations = Accelerator(**options), []
    set_seed(config["seed"])
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), shuffle=True, batch_size=4)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer: Any = ScheduleFreeSGD(model.parameters(), lr=config["lr"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(config["num_epochs"]):
        optimizer.train()
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            on_step(batch, loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        with torch.no_grad():
            evaluations.append(model(config["eval_rows"]).tolist())
    accelerator.end_training()
    return {"evaluations": evaluations}


if __name__ == "__main__":
    training_function({"lr": 0.5, "num_epochs": 2, "seed": 3, "eval_rows": torch.ones(1, 8)})
