"""A transformers model fine-tuned with LoRA: a tiny model from a configuration, adapters by PEFT."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import trainwright as L
from trainwright.callbacks import LearningRateMonitor, ModelCheckpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what these packages warn of when they are imported
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT's to mend
]


class Sentences(Dataset[dict[str, Any]]):
    """Sentences of 6 to 12 tokens; the class says whether token 7 is in them."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for index in range(size):
            length = int(torch.randint(6, 13, (), generator=generator))
            tokens = torch.randint(8, 40, (length,), generator=generator)
            if index % 2:
                tokens[int(torch.randint(1, length, (), generator=generator))] = 7
            tokens[0] = 1
            self.rows.append({"input_ids": tokens.tolist(), "labels": index % 2})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest sentence."""
    longest = max(len(row["input_ids"]) for row in rows)
    padded = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    ids = torch.tensor(padded)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([r["labels"] for r in rows])}


def small_bert() -> Any:
    """Return a model with random weights."""
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, num_labels=2,
    )  # fmt: skip
    return BertForSequenceClassification(config)


class FineTuned(L.TaskModule):
    """A model that returns its own loss."""

    def __init__(self, lora: bool, lr: float = 3e-3, warmup_steps: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = small_bert()
        if lora:
            config = LoraConfig(
                task_type=TaskType.SEQ_CLS, r=8, lora_alpha=32, lora_dropout=0.05,
                target_modules=["query", "key", "value", "dense"],
            )  # fmt: skip
            self.model = get_peft_model(self.model, config)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the model's loss."""
        outputs = self.model(**batch)
        self.log("train_loss", outputs.loss, prog_bar=True)
        return outputs.loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Log loss and accuracy, and return the model's output."""
        outputs = self.model(**batch)
        accuracy = (outputs.logits.argmax(dim=1) == batch["labels"]).float().mean()
        self.log_dict({"val_loss": outputs.loss, "val_acc": accuracy}, batch_size=len(batch["labels"]))
        return outputs

    def configure_optimizers(self) -> Any:
        """Return AdamW over what is trained, without decay of biases and norms, and a linear schedule."""
        spared = ("bias", "LayerNorm.weight")
        named = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for n, p in named if not n.endswith(spared)], "weight_decay": 0.01},
            {"params": [p for n, p in named if n.endswith(spared)], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=self.hparams.lr, eps=1e-8)
        total = self.trainer.estimated_stepping_batches
        scheduler = get_linear_schedule_with_warmup(optimizer, self.hparams.warmup_steps, total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


def train(folder: Path, lora: bool, epochs: int, stop_after: int | None = None, **fit: Any) -> Any:
    """Train and return trainer and model."""
    L.seed_everything(42)
    model = FineTuned(lora)

    class Stop(L.Callback):
        def on_train_epoch_end(self, trainer: Any, task: Any) -> None:
            trainer.should_stop = trainer.current_epoch + 1 == stop_after

    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, default_root_dir=folder, logger=L.CSVLogger(folder),
        callbacks=[LearningRateMonitor("step"), ModelCheckpoint(save_last=True), Stop()], gradient_clip_val=1.0,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loaders = (
        DataLoader(Sentences(512, 0), batch_size=32, shuffle=True, collate_fn=collate),
        DataLoader(Sentences(128, 1), batch_size=64, collate_fn=collate),
    )
    trainer.fit(model, *loaders, **fit)
    return trainer, model


def test_adapters_learn_and_the_base_stays(tmp_path: Path) -> None:
    L.seed_everything(42)
    before = FineTuned(lora=True).state_dict()
    trainer, model = train(tmp_path, True, 8)
    assert trainer.callback_metrics["val_acc"] >= 0.9
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name or "classifier" in name for name in changed)

    model.model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    loaded = FineTuned.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.exhaustive
def test_it_continues_where_it_was_stopped(tmp_path: Path, lora: bool) -> None:
    _, expected = train(tmp_path / "uninterrupted", lora, 3)
    train(tmp_path / "stopped", lora, 3, stop_after=2)
    trainer, model = train(tmp_path / "stopped", lora, 3, ckpt_path="last")
    assert trainer.global_step == 48
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
