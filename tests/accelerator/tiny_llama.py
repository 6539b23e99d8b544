"""A tiny Llama, its data, and a hand-written training loop, to compare libraries with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, SequentialSampler

STEPS, GROUP, LR = 6, 16, 1e-3  # of two epochs; samples of an optimizer step
WORDS = 64


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sentences of random tokens, of which some are padding without a label."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, WORDS, (16,), generator=generator)
        labels = tokens.clone()
        labels[: index % 5] = -100
        return {"input_ids": tokens, "labels": labels}


def language_model(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **{**sizes, **options}))


def in_order(trainer: type[Any]) -> type[Any]:
    """Return a sub-class of a Trainer of transformers that does not shuffle its data."""

    class InOrder(trainer):  # type: ignore[misc]  # a variable
        def _get_train_sampler(self, *args: object) -> Any:
            return SequentialSampler(self.train_dataset)

    return InOrder


def arguments_of(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the arguments of `TrainingArguments` for steps of `GROUP` samples in two micro-batches."""
    size = GROUP // (2 * dist.get_world_size())
    quiet = {"logging_steps": 1, "save_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    steps = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 2, "learning_rate": LR}
    return {"output_dir": str(folder), **steps, **quiet, **options}


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def loss_of(model: Any, rows: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
    tokens, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    scores = model(input_ids=tokens).logits[:, :-1]
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), labels[:, 1:].flatten())


def train_by_hand(model: Any, loss: Callable[[int], torch.Tensor] | None = None, steps: int = STEPS) -> list[float]:
    data, losses = Sentences(), []
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        rows = [data[i % len(data)] for i in range(step * GROUP, (step + 1) * GROUP)]
        value = loss_of(model, rows) if loss is None else loss(step)
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(value.detach()))
    return losses
