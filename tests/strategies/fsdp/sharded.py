"""A small model whose parts are cut in many ways, and what its training gives under any strategy."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.helpers.runs import StepRecorder, quiet_trainer, weights_of
from trainwright.core.task import TaskModule


class Block(nn.Module):
    """A residual layer of an odd width, which no number of ranks divides."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.tanh(self.mix(self.norm(inputs)))


class Blocks(TaskModule):
    """A stack of blocks between two layers that share their weights; one bias is frozen."""

    def __init__(self, own_units: bool = True, lr: float = 0.05) -> None:
        super().__init__()
        self.own_units, self.lr = own_units, lr
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.inputs = nn.Linear(5, 7)
            self.blocks = nn.ModuleList([Block() for _ in range(3)])
            self.outputs = nn.Linear(7, 5)
            self.tied = nn.Linear(5, 7)
        self.outputs.weight = nn.Parameter(self.inputs.weight.detach().T.clone())
        self.tied.weight = self.inputs.weight
        self.inputs.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inputs(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.outputs(hidden + self.tied(inputs))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = functional.mse_loss(self(batch), batch.flip(1))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", functional.mse_loss(self(batch), batch.flip(1)), batch_size=len(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch)

    def num_items(self, batch: Any) -> int:
        return len(batch)

    def shard_units(self) -> Any:
        return self.blocks if self.own_units else None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def batches(num: int = 8) -> list[torch.Tensor]:
    """Return micro-batches of 1 to 4 rows of 5 numbers."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1 + i % 4, 5, generator=generator) for i in range(num)]


def train(
    strategy: Any,
    processes: int,
    task: TaskModule | None = None,
    *,
    ckpt_path: Path | None = None,
    save_to: Path | None = None,
    data: tuple[Any, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Train two epochs of steps of four micro-batches, save if told; return what can be compared."""
    recorder, task = StepRecorder(), task or Blocks(own_units=not getattr(strategy, "auto_wrap_policy", None))
    settings = {"accumulate_grad_batches": 4 // processes, "gradient_clip_val": 0.5, "max_epochs": 2, **arguments}
    settings |= {"callbacks": [recorder, *settings.get("callbacks", [])], "num_sanity_val_steps": 1}
    trainer = quiet_trainer(devices="auto" if processes > 1 else 1, strategy=strategy, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(generators start from scratch|holds the state of a callback)")
        trainer.fit(task, *(data or (batches(), batches(7))), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return {
        "losses": torch.tensor(recorder.losses), "norms": torch.tensor(recorder.norms), "weights": weights_of(task),
        "val": float(trainer.callback_metrics["val_loss"]), "reported": recorder.reported, "step": trainer.global_step,
        "rates": [rates[0] for rates in recorder.lrs],
        "hidden": trainer.strategy.capabilities.gradients == "hidden",
    }  # fmt: skip


def assert_trained_alike(by_rank: list[dict[str, Any]], alone: dict[str, Any], atol: float = 1e-6) -> None:
    losses = torch.stack([found["losses"] for found in by_rank]).mean(0)
    torch.testing.assert_close(losses, alone["losses"], rtol=0, atol=atol)
    for found in by_rank:
        if not found.get("hidden"):  # where this rank sees all gradients
            torch.testing.assert_close(found["norms"], alone["norms"], rtol=0, atol=atol)
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=0, atol=10 * atol)
        assert float(found["val"]) == pytest.approx(float(alone["val"]), abs=10 * atol)
