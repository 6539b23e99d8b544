"""Image classification, complete: mixed precision, checkpoints, resume, trackers and metrics.

trainwright launch --num_processes 2 docs/examples/complete_cv.py --mixed_precision bf16 --with_tracking
… --checkpointing_steps epoch --output_dir run
… --checkpointing_steps epoch --output_dir run --resume_from_checkpoint run/epoch_0
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainwright import Accelerator
from trainwright.utils import set_seed


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Noisy images of 3 x 16 x 16 with a horizontal bar (class 0) or a vertical one (class 1)."""

    def __init__(self, num: int, first: int) -> None:
        self.num = num
        self.first = first

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        image = 0.5 * torch.randn(3, 16, 16, generator=generator)
        place = int(torch.randint(1, 14, (), generator=generator))
        label = index % 2
        image[:, place : place + 2] += 1 - label
        image[:, :, place : place + 2] += label
        return image, label


def make_model() -> nn.Sequential:
    """Return a small convolutional network."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(32, 2)),
    )


def training_function(config: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate after each epoch. A resumed run starts at the batch after the checkpoint."""
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        log_with="tensorboard" if args.with_tracking else None,
        project_dir=args.output_dir,
    )
    if args.with_tracking:
        accelerator.init_trackers("complete_cv", config)
    set_seed(config["seed"])
    size = config["batch_size"]
    train: Any = DataLoader(Images(96, first=0), batch_size=size, shuffle=True)
    test: Any = DataLoader(Images(25, first=1000), batch_size=size)
    model: Any = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    num_steps = config["num_epochs"] * len(train)  # after prepare: batches of one process
    scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=config["lr"], total_steps=num_steps)
    scheduler = accelerator.prepare(scheduler)

    step = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        kind, number = os.path.basename(args.resume_from_checkpoint).split("_")
        step = (int(number) + 1) * len(train) if kind == "epoch" else int(number)

    losses = []
    metric: dict[str, float] = {}
    for epoch in range(step // len(train), config["num_epochs"]):
        model.train()
        for images, labels in train:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
            if args.checkpointing_steps.isdigit() and step % int(args.checkpointing_steps) == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{step}"))
        model.eval()
        right = []
        for images, labels in test:
            with torch.no_grad():
                predicted = model(images).argmax(-1)
            right.append(accelerator.gather_for_metrics(predicted == labels))
        metric = {"accuracy": torch.cat(right).float().mean().item(), "num": len(torch.cat(right))}
        accelerator.print(f"epoch {epoch}: {metric}")
        if args.with_tracking:
            accelerator.log({**metric, "loss": losses[-1], "epoch": epoch}, step=step)
        if args.checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    accelerator.end_training()
    return {"losses": losses, "metric": metric, "step": step}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Read the options and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"], default="no")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--checkpointing_steps", default="", help="a number of steps, or 'epoch'")
    parser.add_argument("--resume_from_checkpoint", default="", help="folder of a checkpoint")
    parser.add_argument("--with_tracking", action="store_true", help="log to TensorBoard")
    parser.add_argument("--output_dir", default=".", help="folder of checkpoints and logs")
    return training_function({"lr": 0.02, "num_epochs": 3, "seed": 3, "batch_size": 8}, parser.parse_args(argv))


if __name__ == "__main__":
    main()
