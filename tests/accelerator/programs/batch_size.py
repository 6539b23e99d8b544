"""Retry with half the batch size when memory runs out: `memory.py` and `automatic_gradient_accumulation.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.accelerator.programs.synthetic import Record, classifier, rows
from trainwright import Accelerator
from trainwright.utils import find_executable_batch_size, set_seed


def training_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train with the largest batch size that fits; more than `fits` rows are out of memory in the second step."""
    accelerator = Accelerator(**options)
    observed_batch_size, tried = int(config["batch_size"]), []

    @find_executable_batch_size(starting_batch_size=observed_batch_size)
    def inner_training_loop(batch_size: int) -> Record:
        nonlocal accelerator
        tried.append(batch_size)
        accelerator.free_memory()
        accelerator.gradient_accumulation_steps = observed_batch_size // batch_size
        set_seed(config["seed"])
        train_dataloader: Any = DataLoader(rows(64), shuffle=True, batch_size=batch_size)
        model, record = classifier().to(accelerator.device), Record()
        optimizer: Any = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
        model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
        for _ in range(config["num_epochs"]):
            model.train()
            for step, batch in enumerate(train_dataloader):
                with accelerator.accumulate(model):
                    if step == 1 and len(batch[0]) > config["fits"]:
                        raise RuntimeError("CUDA out of memory.")
                    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
                    record.add(batch, loss)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        return record

    record = inner_training_loop()
    accelerator.end_training()
    return {"batches": record.batches, "losses": record.losses, "tried": tried}
