"""A small mixture of experts, and what its training gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.strategies.fsdp import sharded
from tests.strategies.fsdp.sharded import batches
from trainwright.core.task import TaskModule


class Experts(nn.Module):
    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, width, width) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(num_experts, width))
        self.computed: set[int] = set()  # numbers of experts that forwards have computed with

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        self.computed.add(len(self.up))
        found = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            rows, places = torch.where(top_k_index == expert)
            each = torch.tanh(functional.linear(hidden_states[rows], self.up[expert], self.bias[expert]))
            found = found.index_add(0, rows, each * top_k_weights[rows, places, None])
        return found


class Mixture(nn.Module):
    """A residual layer of experts with a router; `only` sends all tokens to one expert."""

    def __init__(self, num_experts: int, width: int = 6, top_k: int = 2, only: int | None = None) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, num_experts), Experts(num_experts, width)
        self.top_k, self.only = top_k, only

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(inputs).softmax(-1).topk(self.top_k, dim=-1)
        if self.only is not None:
            index, weights = torch.full_like(index[:, :1], self.only), weights[:, :1]
        return inputs + self.experts(inputs, index, weights)


class MixtureTask(TaskModule):
    def __init__(self, num_experts: int = 4, only: int | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 5)
            self.blocks = nn.ModuleList([Mixture(num_experts, only=only) for _ in range(2)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = functional.mse_loss(self(batch), batch.flip(1))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", functional.mse_loss(self(batch), batch.flip(1)), batch_size=len(batch))

    def num_items(self, batch: Any) -> int:
        return len(batch)

    def shard_units(self) -> Any:
        return self.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-4)


def train(task: TaskModule, strategy: Any = "single", processes: int = 1, **arguments: Any) -> dict[str, Any]:
    """Train three steps of four micro-batches; return what can be compared."""
    found = sharded.train(strategy, processes, task, data=(batches(12), batches(5)), **{"max_epochs": 1, **arguments})
    return found | {"computed": [module.computed for module in task.modules() if isinstance(module, Experts)]}
