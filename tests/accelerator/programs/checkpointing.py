"""Checkpoints by epoch or by step, and a script that resumes from one: `complete_nlp_example.py`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.accelerator.programs.synthetic import Record, classifier, rows
from trainwright import Accelerator
from trainwright.utils import set_seed


def training_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train from the start, or from the state of `resume_from_checkpoint`; "newest" finds it by its time."""
    accelerator = Accelerator(cpu=True, project_dir=config["output_dir"], **options)
    checkpointing_steps: Any = config["checkpointing_steps"]
    if hasattr(checkpointing_steps, "isdigit"):
        if checkpointing_steps.isdigit():
            checkpointing_steps = int(checkpointing_steps)
        elif checkpointing_steps != "epoch":
            raise ValueError(f"checkpointing_steps={checkpointing_steps!r} is neither a number nor 'epoch'")
    set_seed(config["seed"])
    train_dataloader: Any = DataLoader(rows(32), shuffle=True, batch_size=4)
    model, record = classifier(), Record()
    optimizer: Any = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=12)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    overall_step, starting_epoch, resume_step = 0, 0, None
    if config["resume_from_checkpoint"]:
        path = config["resume_from_checkpoint"]
        if path == "newest":
            dirs = [f.path for f in os.scandir(config["output_dir"]) if f.is_dir()]
            dirs.sort(key=os.path.getctime)
            path = dirs[-1]
        accelerator.load_state(path)
        training_difference = os.path.splitext(os.path.basename(path))[0]
        if "epoch" in training_difference:
            starting_epoch = int(training_difference.replace("epoch_", "")) + 1
            resume_step = None
        else:
            resume_step = int(training_difference.replace("step_", ""))
            starting_epoch = resume_step // len(train_dataloader)
            resume_step -= starting_epoch * len(train_dataloader)
        overall_step = starting_epoch * len(train_dataloader)
    for epoch in range(starting_epoch, config["num_epochs"]):
        model.train()
        if config["resume_from_checkpoint"] and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
            overall_step += resume_step
        else:
            active_dataloader = train_dataloader
        for batch in active_dataloader:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            record.add(batch, loss)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if isinstance(checkpointing_steps, int) and overall_step % checkpointing_steps == 0:
                accelerator.save_state(os.path.join(config["output_dir"], f"step_{overall_step}"))
        if checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(config["output_dir"], f"epoch_{epoch}"))
    accelerator.end_training()
    return {"batches": record.batches, "losses": record.losses, "step": overall_step}
