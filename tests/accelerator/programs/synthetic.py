"""Small synthetic data sets, models and metrics of the programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

_VOCABULARY = 32


def sentences(num: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return tokenized sentences of 3 to 9 tokens, each with the label of its first token."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num):
        length = int(torch.randint(3, 10, (), generator=generator))
        tokens = torch.randint(1, _VOCABULARY, (length,), generator=generator).tolist()
        found.append({"input_ids": tokens, "attention_mask": [1] * length, "labels": tokens[0] % 2})
    return found


def rows(num: int, seed: int = 0) -> TensorDataset:
    """Return `num` inputs of 8 numbers with a class of 2."""
    inputs = torch.randn(num, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


class Record:
    """The micro-batches of a rank, in order, and their losses."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.losses: list[float] = []

    def add(self, batch: Any, loss: torch.Tensor) -> None:
        self.batches.append({**batch} if hasattr(batch, "keys") else tuple(batch))
        self.losses.append(loss.item())
