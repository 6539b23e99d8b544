"""Gradient accumulation for samples of variable length: `gradient_accumulation_for_autoregressive_models.py`."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tests.accelerator.programs.synthetic import Record, sentences
from trainwright import Accelerator
from trainwright.utils import set_seed


def make_model() -> Any:
    sizes: Any = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes))


def collate_fn(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad tokens with 0 and labels with -100."""
    longest = max(len(example["input_ids"]) for example in examples)

    def pad(tokens: list[int], value: int) -> list[int]:
        return tokens + [value] * (longest - len(tokens))

    return {
        "input_ids": torch.tensor([pad(example["input_ids"], 0) for example in examples]),
        "attention_mask": torch.tensor([pad(example["attention_mask"], 0) for example in examples]),
        "labels": torch.tensor([pad(example["input_ids"], -100) for example in examples]),
    }


def sum_of_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of all tokens."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def training_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train with a loss that is divided by the tokens of each step on all processes."""
    gradient_accumulation_steps = config["gradient_accumulation_steps"]
    accelerator = Accelerator(gradient_accumulation_steps=gradient_accumulation_steps, **options)
    set_seed(config["seed"])
    data: Any = sentences(config["num"])
    train_dataloader: Any = DataLoader(data, shuffle=True, collate_fn=collate_fn, batch_size=2)
    model, record = make_model(), Record()
    optimizer: Any = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    for _ in range(config["num_epochs"]):
        model.train()
        training_iterator = iter(train_dataloader)
        num_samples_in_epoch = len(train_dataloader)
        remainder = num_samples_in_epoch % gradient_accumulation_steps
        remainder = remainder if remainder != 0 else gradient_accumulation_steps
        total_gradient_updates = math.ceil(num_samples_in_epoch / gradient_accumulation_steps)
        for update_step in range(total_gradient_updates):
            # The tokens of all micro-batches of a step are counted before the first one is trained on.
            batch_samples: list[Any] = []
            last = update_step == total_gradient_updates - 1
            num_batches_in_step = remainder if last else gradient_accumulation_steps
            for _ in range(num_batches_in_step):
                batch_samples += [next(training_iterator)]
            num_items: Any = sum((batch["labels"][:, 1:].ne(-100)).sum() for batch in batch_samples)
            num_items_in_batch = accelerator.gather(num_items).sum().item()
            for i, batch in enumerate(batch_samples):
                ctx: Any = contextlib.nullcontext
                if i < len(batch_samples) - 1 and accelerator.num_processes > 1:
                    ctx = model.no_sync
                with ctx():
                    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
                    loss = sum_of_losses(outputs.logits, batch["labels"])
                    record.add(batch, loss)
                    loss = (loss * gradient_accumulation_steps * accelerator.num_processes) / num_items_in_batch
                    accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    return {"batches": record.batches, "losses": record.losses}
