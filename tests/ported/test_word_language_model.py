"""A word-level LSTM trained by truncated backpropagation: the hidden state crosses batches, the gradient does not."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import trainwright as L
from tests.ported.data import manual
from trainwright.callbacks import Callback, ModelCheckpoint

BATCH, BPTT, VOCABULARY = 16, 12, 1000


class Columns(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A text in `BATCH` columns, so that each batch continues the columns of the one before it."""

    def __init__(self, tokens: torch.Tensor) -> None:
        length = len(tokens) // BATCH
        self.columns = tokens[: length * BATCH].view(BATCH, length).t().contiguous()

    def __len__(self) -> int:
        return (len(self.columns) - 1) // BPTT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = index * BPTT
        return self.columns[at : at + BPTT], self.columns[at + 1 : at + BPTT + 1]


class WordData(L.DataModule):
    """The words of Python's manual, of which the rare ones are one."""

    def setup(self, stage: str) -> None:
        """Split it."""
        words = re.findall(r"\w+|[^\w\s]", manual()[:200_000])
        known = {word: i + 1 for i, (word, _) in enumerate(Counter(words).most_common(VOCABULARY - 1))}
        tokens = torch.tensor([known.get(word, 0) for word in words])
        cut = int(0.9 * len(tokens))
        self.train, self.val = Columns(tokens[:cut]), Columns(tokens[cut:])

    def train_dataloader(self) -> Any:
        """Return whole batches, in their order."""
        return DataLoader(self.train, batch_size=None)

    def val_dataloader(self) -> Any:
        """Return whole batches, in their order."""
        return DataLoader(self.val, batch_size=None)


class WordModel(L.TaskModule):
    """Its hidden state is kept between batches, and belongs to the checkpoint."""

    def __init__(self, width: int = 64, lr: float = 1e-2, dropout: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding, self.lstm = nn.Embedding(VOCABULARY, width), nn.LSTM(width, width)
        self.drop, self.decoder = nn.Dropout(dropout), nn.Linear(width, VOCABULARY)
        self.hidden: tuple[torch.Tensor, torch.Tensor] | None = None

    def step(self, batch: Any, hidden: Any) -> tuple[torch.Tensor, Any]:
        """Return the loss, and the hidden state after the batch."""
        tokens, targets = batch
        output, hidden = self.lstm(self.drop(self.embedding(tokens)), hidden)
        logits = self.decoder(self.drop(output))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), tuple(h.detach() for h in hidden)

    def on_train_epoch_start(self) -> None:
        """Begin the text with an empty memory."""
        if self.trainer.state.batch_in_epoch == 0:
            self.hidden = None

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        """Continue the text of the batch before."""
        loss, self.hidden = self.step(batch, self.hidden)
        self.log("train_ppl", loss.exp(), on_step=False, on_epoch=True)
        return {"loss": loss, "hidden": self.hidden[0]}

    def on_validation_epoch_start(self) -> None:
        """Begin the other text."""
        self.val_hidden = None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        loss, self.val_hidden = self.step(batch, self.val_hidden)
        self.log("val_loss", loss)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the memory."""
        if self.hidden is not None:
            checkpoint["hidden"] = [h.clone() for h in self.hidden]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the memory."""
        if "hidden" in checkpoint:
            self.hidden = tuple(checkpoint["hidden"])

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Seen(Callback):
    """Looks at what `training_step` returned."""

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["hidden"].shape == (1, BATCH, 64)
        assert not outputs["loss"].requires_grad


def train(folder: Path, ckpt_path: str | None = None, **settings: Any) -> tuple[L.Trainer, WordModel]:
    """Train and return trainer and model."""
    L.seed_everything(11)
    model = WordModel()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, logger=False, gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(every_n_train_steps=20, save_last=True), Seen()], enable_progress_bar=False,
        enable_model_summary=False, **settings,
    )  # fmt: skip
    trainer.fit(model, datamodule=WordData(), ckpt_path=ckpt_path)
    return trainer, model


@pytest.mark.slow
def test_it_learns_words(tmp_path: Path) -> None:
    trainer, _ = train(tmp_path, max_epochs=1)
    assert math.exp(trainer.callback_metrics["val_loss"].item()) < 150
    assert trainer.callback_metrics["train_ppl"] < 250


def test_it_continues_in_the_middle_of_an_epoch_with_its_memory(tmp_path: Path) -> None:
    _, expected = train(tmp_path / "uninterrupted", max_steps=50)
    train(tmp_path / "stopped", max_steps=40)
    trainer, model = train(tmp_path / "stopped", max_steps=50, ckpt_path="last")
    assert trainer.global_step == 50
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert model.hidden is not None
    torch.testing.assert_close(model.hidden, expected.hidden, rtol=0, atol=0)
