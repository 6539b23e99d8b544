"""Correct accumulation of samples of different length: each step is the mean over all tokens of all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from trainwright import Accelerator
from trainwright.utils import set_seed


def make_sentences(num: int) -> list[torch.Tensor]:
    """Return sentences of 3 to 9 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 10, (num,), generator=generator).tolist()
    return [torch.randint(1, 32, (length,), generator=generator) for length in lengths]


def collate(sentences: list[torch.Tensor]) -> torch.Tensor:
    """Pad with -100."""
    return nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=-100)


def training_function(
    config: dict[str, Any], on_step: Callable[[Any, torch.Tensor], None] = lambda batch, loss: None, **options: Any
) -> dict[str, Any]:
    """Train a model that predicts the next token from the last one."""
    accelerator = Accelerator(gradient_accumulation_steps=2, **options)
    set_seed(config["seed"])
    data: Any = make_sentences(config["num"])
    loader: Any = DataLoader(data, shuffle=True, batch_size=2, collate_fn=collate)
    model: Any = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(config["num_epochs"]):
        for tokens in loader:
            with accelerator.accumulate(model):
                logits, labels = model(tokens[:, :-1].clamp(min=0)), tokens[:, 1:]
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())  # a mean over tokens
                on_step({"tokens": tokens}, loss)
                accelerator.backward(loss, num_items=labels.ne(-100).sum())
                optimizer.step()
                optimizer.zero_grad()
    accelerator.print(f"last loss: {loss.item():.3f}")
    accelerator.end_training()
    return {}


if __name__ == "__main__":
    training_function({"lr": 0.02, "num_epochs": 2, "seed": 3, "num": 24})
