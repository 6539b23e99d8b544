"""Two small models and the training loop that anybody would write for them by hand: the numerics tests' oracle."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.runs import weights_of
from trainwright.core.task import TaskModule

_VOCABULARY = 32
_LENGTH = 12


@dataclass(frozen=True)
class Case:
    """One combination of what a user may set; `str` of it names the test."""

    model: str = "mlp"
    accumulate: int = 1
    clip: float | None = None
    schedule: str = "constant"
    precision: str = "32-true"

    def __str__(self) -> str:
        clip = "unclipped" if self.clip is None else f"clip{self.clip:g}"
        return f"{self.model}-{self.accumulate}x-{clip}-{self.schedule}-{self.precision}"


ALL_CASES = [
    Case(*values)
    for values in itertools.product(
        ("mlp", "gpt"), (1, 4), (None, 1.0), ("constant", "cosine"), ("32-true", "bf16-mixed")
    )
]


def cosine_with_warm_up(step: int, warm_up: int = 3, total: int = 20) -> float:
    """Return the factor on the learning rate after `step` steps: linear up, then half a cosine down to 0."""
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / (total - warm_up))))


class Mlp(nn.Module):
    """(batch, 4) → loss against (batch, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))

    def forward(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return functional.mse_loss(self.layers(inputs).float(), targets)


class Block(nn.Module):
    """Pre-norm causal attention and an MLP; (batch, length, width) → the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a key bias has no gradient but noise
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + self.mlp(self.norm_2(x))
        return x


class Gpt(nn.Module):
    """Tokens (batch, length + 1) → mean cross-entropy of the next token."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, width)
        self.places = nn.Embedding(_LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads=2) for _ in range(2))
        self.norm = nn.LayerNorm(width)

    def forward(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        (tokens,) = batch
        x = self.tokens(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)  # tied to the embedding
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def make_model(case: Case) -> nn.Module:
    """Return the case's model, with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Mlp() if case.model == "mlp" else Gpt()


def make_optimizer(case: Case, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Return the case's optimizer, and its schedule (None when constant)."""
    optimizer: torch.optim.Optimizer
    if case.model == "mlp":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.8)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if case.schedule == "constant":
        return optimizer, None
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_with_warm_up)


def make_loader(case: Case, num_samples: int, batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    if case.model == "mlp":
        inputs = torch.randn(num_samples, 4, generator=generator)
        data = TensorDataset(inputs, 2 * inputs.sum(dim=1, keepdim=True))
    else:
        starts = torch.randint(_VOCABULARY, (num_samples, 1), generator=generator)
        strides = torch.randint(1, 4, (num_samples, 1), generator=generator)
        data = TensorDataset((starts + strides * torch.arange(_LENGTH + 1)) % _VOCABULARY)
    return DataLoader(data, batch_size=batch_size)


class ReferenceTask(TaskModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.model = make_model(case)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> Any:
        optimizer, schedule = make_optimizer(self.case, self.model)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@dataclass
class Trace:
    """What a run did: per optimizer step the loss, the learning rate and the gradient norm; and the weights left."""

    losses: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train_by_hand(case: Case, batches: Iterable[Any], *, accumulate: int, epochs: int) -> Trace:
    """Train as one would without a framework, reading `batches` in order once per epoch.

    Args:
        case: model, optimizer, schedule, clipping and precision; its `accumulate` is not used.
        batches: micro-batches.
        accumulate: of them in one optimizer step; the last step of an epoch may have fewer.
        epochs: how often.
    """
    model, trace = make_model(case), Trace()
    optimizer, schedule = make_optimizer(case, model)
    mixed = case.precision == "bf16-mixed"
    for _ in range(epochs):
        remaining = iter(batches)
        while group := list(itertools.islice(remaining, accumulate)):
            optimizer.zero_grad()
            total = 0.0
            for batch in group:
                with torch.autocast("cpu", dtype=torch.bfloat16) if mixed else nullcontext():
                    loss = model(batch)
                share = loss / len(group)
                share.backward()
                total = total + share.detach()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            trace.losses.append(float(total))
            trace.lrs.append(optimizer.param_groups[0]["lr"])
            trace.norms.append(float(norm))
            optimizer.step()
            if schedule is not None:
                schedule.step()
    trace.weights = weights_of(model)
    return trace
