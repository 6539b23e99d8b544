"""Sequence classification with padding, a linear warm-up and metrics: `nlp_example.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from tests.accelerator.programs.synthetic import Accuracy, Record, sentences
from trainwright import Accelerator
from trainwright.utils import set_seed

MAX_GPU_BATCH_SIZE, EVAL_BATCH_SIZE = 4, 4


def make_model() -> Any:
    sizes: Any = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=32, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(config)


def get_dataloaders(batch_size: int, num: int) -> tuple[Any, Any]:
    """Return loaders that pad each batch to its longest sentence."""

    def collate_fn(examples: list[dict[str, Any]]) -> BatchEncoding:
        longest = max(len(example["input_ids"]) for example in examples)
        padded: dict[str, Any] = {
            name: torch.tensor([example[name] + [0] * (longest - len(example[name])) for example in examples])
            for name in ("input_ids", "attention_mask")
        }
        return BatchEncoding({**padded, "labels": torch.tensor([example["labels"] for example in examples])})

    train: Any = sentences(num)
    evaluation: Any = sentences(11, seed=1)
    return (
        DataLoader(train, shuffle=True, collate_fn=collate_fn, batch_size=batch_size, drop_last=True),
        DataLoader(evaluation, shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE),
    )


def training_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    accelerator = Accelerator(**options)
    metric, record, metrics, gradient_accumulation_steps = Accuracy(), Record(), [], 1
    num_epochs, batch_size = config["num_epochs"], config["batch_size"]
    if batch_size > MAX_GPU_BATCH_SIZE:
        gradient_accumulation_steps, batch_size = batch_size // MAX_GPU_BATCH_SIZE, MAX_GPU_BATCH_SIZE
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(batch_size, config["num"])
    model = make_model().to(accelerator.device)
    optimizer: Any = AdamW(params=model.parameters(), lr=config["lr"])
    total = (len(train_dataloader) * num_epochs) // gradient_accumulation_steps
    lr_scheduler: Any = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=total)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for _ in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch.to(accelerator.device)
            loss = model(**batch).loss
            record.add(batch, loss)
            accelerator.backward(loss / gradient_accumulation_steps)
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        for batch in eval_dataloader:
            batch.to(accelerator.device)
            with torch.no_grad():
                outputs = model(**batch)
            metric.add_batch(*accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"])))
        metrics.append(metric.compute())
    accelerator.end_training()
    return {"batches": record.batches, "losses": record.losses, "metrics": metrics, "total": total}
