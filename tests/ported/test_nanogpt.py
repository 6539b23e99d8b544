"""A small GPT on characters, configured as nanoGPT's is for a CPU: alone, and after a kill."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import trainwright as L
from tests.helpers.distributed import RankError, run_distributed
from tests.ported.data import Blocks, characters
from trainwright.callbacks import ModelCheckpoint

BLOCK, BATCH = 64, 12


class GPT(L.TaskModule):
    """A decoder whose input and output embeddings are one."""

    def __init__(
        self, vocab_size: int, iterations: int, dropout: float = 0.0, learning_rate: float = 3e-3, warmup: int = 90
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token, self.position = nn.Embedding(vocab_size, 64), nn.Embedding(BLOCK, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout, "gelu", batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, vocab_size, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of the next token at each position."""
        time = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time)
        x = self.token(tokens) + self.position(torch.arange(time))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the mean cross-entropy in nats."""
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Log and return it."""
        loss = self.loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log it."""
        self.log("val/loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW that decays matrices alone, and a warm-up followed by a cosine."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.learning_rate, betas=(0.9, 0.99))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_factor(self, step: int) -> float:
        """Return what the learning rate is multiplied by at a step."""
        if step < self.hparams.warmup:
            return (step + 1) / (self.hparams.warmup + 1)
        done = (step - self.hparams.warmup) / max(1, self.hparams.iterations - self.hparams.warmup)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def train(folder: Path, iterations: int, *, dropout: float = 0.0, ckpt_path: str | None = None, **settings: Any) -> Any:
    """Train on nine tenths of the text, validate on the rest, and return the trainer and the model."""
    L.seed_everything(1337)
    tokens, vocab_size = characters()
    cut = int(0.9 * len(tokens))
    batch = BATCH // settings.get("devices", 1)
    trainer = L.Trainer(
        **{
            "accelerator": "cpu", "devices": 1, "max_steps": iterations, "gradient_clip_val": 1.0,
            "limit_val_batches": 20, "num_sanity_val_steps": 0, "default_root_dir": folder,
            "enable_progress_bar": False, "enable_model_summary": False, "logger": L.CSVLogger(folder),
            "val_check_interval": iterations, **settings,
        }
    )  # fmt: skip
    model = GPT(vocab_size, iterations, dropout=dropout)
    trainer.fit(
        model,
        DataLoader(Blocks(tokens[:cut], BLOCK), batch_size=batch, shuffle=True),
        DataLoader(Blocks(tokens[cut:], BLOCK, stride=BLOCK), batch_size=batch),
        ckpt_path=ckpt_path,
    )
    return trainer, model


class Batches(L.Callback):
    """Keeps what the model is trained on."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([tensor.clone() for tensor in batch])


@pytest.mark.slow
def test_it_is_the_loop_of_the_script_to_the_last_bit(tmp_path: Path) -> None:
    batches = Batches()
    trainer, model = train(tmp_path, 20, callbacks=[batches])
    L.seed_everything(1337)
    script = GPT(characters()[1], 20)
    configured = script.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for batch in batches.seen:
        loss = script.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
    assert trainer.callback_metrics["train/loss"] == loss.item()
    torch.testing.assert_close(model.state_dict(), script.state_dict(), rtol=0, atol=0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the validation loss and the weights after a short run of one process."""
    trainer, model = train(tmp_path_factory.mktemp("alone"), 20)
    return trainer.callback_metrics["val/loss"].item(), model.state_dict()


class Kill(L.Callback):
    """Ends its process as a machine that fails does.

    Args:
        at: the step after which.
    """

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def train_with_checkpoints(folder: Path, killed: bool, ckpt_path: str | None = None) -> Any:
    """Train with dropout, saving after every eighth step."""
    saver = ModelCheckpoint(every_n_train_steps=8, save_last=True)
    return train(folder, 24, dropout=0.1, callbacks=[saver, *[Kill(17)] * killed], ckpt_path=ckpt_path)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.exhaustive
def test_a_killed_run_continues_as_if_it_had_not_been_killed(tmp_path: Path) -> None:
    trainer, model = train_with_checkpoints(tmp_path / "uninterrupted", False)
    with pytest.raises(RankError, match=r"SIGKILL|-9"):
        run_distributed(train_with_checkpoints, 1, tmp_path / "killed", True, init=False)
    again, resumed = train_with_checkpoints(tmp_path / "killed", False, "last")
    assert again.state.step == 24
    assert again.callback_metrics["val/loss"] == trainer.callback_metrics["val/loss"]
    torch.testing.assert_close(resumed.state_dict(), model.state_dict(), rtol=0, atol=0)
