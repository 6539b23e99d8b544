"""Text classification, complete: accumulation, mixed precision, checkpoints, resume, trackers and metrics.

trainwright launch --num_processes 2 docs/examples/complete_nlp.py --mixed_precision bf16 --with_tracking
… --checkpointing_steps epoch --output_dir run
… --checkpointing_steps epoch --output_dir run --resume_from_checkpoint run/epoch_0
"""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from trainwright import Accelerator
from trainwright.utils import set_seed

WORDS = ["<pad>", "the", "a", "film", "book", "was", "is", "very", "so", "good", "great", "fine", "bad", "poor", "dull"]
GOOD = range(WORDS.index("good"), WORDS.index("bad"))
BAD = range(WORDS.index("bad"), len(WORDS))


def make_texts(num: int, seed: int) -> Any:
    """Return a list of texts of 4 to 9 words, as numbers, with one good word (class 1) or one bad word (class 0)."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for index in range(num):
        length = int(torch.randint(4, 10, (), generator=generator))
        text = torch.randint(1, GOOD.start, (length,), generator=generator)
        words = GOOD if index % 2 else BAD
        place = int(torch.randint(0, length, (), generator=generator))
        text[place] = words[int(torch.randint(0, len(words), (), generator=generator))]
        texts.append((text, index % 2))
    return texts


def collate(texts: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """Pad the texts of a batch to the longest one."""
    tokens = pad_sequence([text for text, _ in texts], batch_first=True)
    return {"tokens": tokens, "labels": torch.tensor([label for _, label in texts])}


class Classifier(nn.Module):
    """A Transformer encoder whose outputs are averaged over the words of a text."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), width, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=64, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        padding = tokens == 0
        outputs = self.layer(self.embedding(tokens), src_key_padding_mask=padding)
        real = (~padding).unsqueeze(-1)
        logits: torch.Tensor = self.head((outputs * real).sum(1) / real.sum(1))
        return logits


def training_function(config: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate after each epoch. A resumed run starts at the batch after the checkpoint."""
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with="tensorboard" if args.with_tracking else None,
        project_dir=args.output_dir,
    )
    if args.with_tracking:
        accelerator.init_trackers("complete_nlp", config)
    set_seed(config["seed"])
    size = config["batch_size"]
    train: Any = DataLoader(make_texts(96, seed=0), batch_size=size, shuffle=True, collate_fn=collate)
    test: Any = DataLoader(make_texts(25, seed=1), batch_size=size, collate_fn=collate)
    model: Any = Classifier()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    num_steps = config["num_epochs"] * math.ceil(len(train) / args.gradient_accumulation_steps)  # of the optimizer
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=num_steps)
    scheduler = accelerator.prepare(scheduler)

    batches = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        kind, number = os.path.basename(args.resume_from_checkpoint).split("_")
        batches = (int(number) + 1) * len(train) if kind == "epoch" else int(number)

    losses = []
    metric: dict[str, float] = {}
    for epoch in range(batches // len(train), config["num_epochs"]):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch["tokens"]), batch["labels"])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            batches += 1
            if args.checkpointing_steps.isdigit() and batches % int(args.checkpointing_steps) == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{batches}"))
        model.eval()
        right = []
        for batch in test:
            with torch.no_grad():
                predicted = model(batch["tokens"]).argmax(-1)
            right.append(accelerator.gather_for_metrics(predicted == batch["labels"]))
        metric = {"accuracy": torch.cat(right).float().mean().item(), "num": len(torch.cat(right))}
        accelerator.print(f"epoch {epoch}: {metric}")
        if args.with_tracking:
            accelerator.log({**metric, "loss": losses[-1], "epoch": epoch}, step=batches)
        if args.checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    accelerator.end_training()
    return {"losses": losses, "metric": metric, "step": batches}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Read the options and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--checkpointing_steps", default="", help="a number of batches, or 'epoch'")
    parser.add_argument("--resume_from_checkpoint", default="", help="folder of a checkpoint")
    parser.add_argument("--with_tracking", action="store_true", help="log to TensorBoard")
    parser.add_argument("--output_dir", default=".", help="folder of checkpoints and logs")
    return training_function({"lr": 0.01, "num_epochs": 3, "seed": 3, "batch_size": 8}, parser.parse_args(argv))


if __name__ == "__main__":
    main()
