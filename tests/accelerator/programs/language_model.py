"""Causal language modeling on packed blocks, and weights saved for transformers: `run_clm_no_trainer.py`."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator, get_scheduler

from tests.accelerator.programs.synthetic import Record, sentences
from trainwright import Accelerator
from trainwright.utils import set_seed

BLOCK_SIZE = 8


def make_model() -> Any:
    sizes: Any = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes))


def group_texts(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Concatenate sentences and split them into blocks; the first token of a sentence is not predicted."""
    tokens = list(chain(*(example["input_ids"] for example in examples)))
    labels = list(chain(*([-100, *example["input_ids"][1:]] for example in examples)))
    total = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
    starts = range(0, total, BLOCK_SIZE)
    return [{"input_ids": tokens[i : i + BLOCK_SIZE], "labels": labels[i : i + BLOCK_SIZE]} for i in starts]


def num_tokens(batch: Any) -> torch.Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def training_function(args: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train, and evaluate the perplexity after each epoch."""
    steps = args["gradient_accumulation_steps"]
    accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
    set_seed(args["seed"])
    data: Any = group_texts(sentences(60))[:32]
    train_dataloader: Any = DataLoader(data, shuffle=True, collate_fn=default_data_collator, batch_size=2)
    eval_dataloader: Any = DataLoader(data[:13], collate_fn=default_data_collator, batch_size=2)
    model, record, perplexities = make_model(), Record(), []
    named, no_decay = list(model.named_parameters()), ["norm.weight"]
    optimizer_grouped_parameters: Any = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer: Any = torch.optim.AdamW(optimizer_grouped_parameters, lr=args["lr"])
    total = len(train_dataloader) // steps * args["num_train_epochs"]
    lr_scheduler: Any = get_scheduler("linear", optimizer, 1, total)
    prepared = accelerator.prepare(model, optimizer, train_dataloader, eval_dataloader, lr_scheduler)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = prepared
    for _ in range(args["num_train_epochs"]):
        model.train()
        training_iterator = iter(train_dataloader)
        for _ in range(len(train_dataloader) // steps):
            batch_samples = [next(training_iterator) for _ in range(steps)]
            num_items = accelerator.gather(torch.stack([num_tokens(batch) for batch in batch_samples])).sum().item()
            for batch in batch_samples:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss * num_tokens(batch)
                    record.add(batch, loss)
                    accelerator.backward(loss * steps * accelerator.num_processes / num_items)
                    optimizer.step()
                    lr_scheduler.step()
                    optimizer.zero_grad()
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                losses.append(accelerator.gather_for_metrics(model(**batch).loss.repeat(2)))
        perplexities.append(math.exp(torch.cat(losses)[:13].mean()))
    accelerator.end_training()
    return {"batches": record.batches, "losses": record.losses, "perplexities": perplexities, "total": total}


def save_for_transformers(args: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train for an epoch and save the model, its configuration included."""
    accelerator = Accelerator(**options)
    set_seed(args["seed"])
    with accelerator.main_process_first():
        data: Any = group_texts(sentences(60))[:16]
    train_dataloader: Any = DataLoader(data, shuffle=True, collate_fn=default_data_collator, batch_size=2)
    model, record = make_model(), Record()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args["lr"])
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    for batch in train_dataloader:
        loss = model(**batch).loss
        record.add(batch, loss)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()
    unwrapped_model: Any = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        args["output_dir"],
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return {"batches": record.batches, "losses": record.losses}
