"""An optimizer with training and evaluation weights: `schedule_free.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.accelerator.programs.synthetic import Record, classifier, rows
from trainwright import Accelerator
from trainwright.utils import set_seed


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Schedule-free SGD of Defazio et al.: parameters are `y` in training and the average `x` in evaluation."""

    def __init__(self, params: Any, lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _switch(self, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        weight = 1 - group["beta"] if train_mode else 1 - 1 / group["beta"]
                        p.lerp_(self.state[p]["z"], weight)
                group["train_mode"] = train_mode

    def train(self) -> None:
        """Set the parameters to `y`."""
        self._switch(True)

    def eval(self) -> None:
        """Set the parameters to `x`."""
        self._switch(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step once in training mode."""
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("the optimizer is not in training mode")
            weight = 1 / (group["k"] + 1)
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, weight).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


def training_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train, evaluate the average, and train on."""
    accelerator = Accelerator(**options)
    set_seed(config["seed"])
    train_dataloader: Any = DataLoader(rows(32), shuffle=True, batch_size=4)
    model, record, evaluations = classifier().to(accelerator.device), Record(), []
    optimizer: Any = ScheduleFreeSGD(model.parameters(), lr=config["lr"])
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    for _ in range(config["num_epochs"]):
        model.train()
        optimizer.train()
        for batch in train_dataloader:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            record.add(batch, loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            evaluations.append(model(rows(5, seed=1).tensors[0]).tolist())
    accelerator.end_training()
    return {"batches": record.batches, "losses": record.losses, "evaluations": evaluations}
