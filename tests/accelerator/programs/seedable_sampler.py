"""Shuffled data in the order of a seed, in every epoch another, with the sampler of Accelerate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.accelerator.programs.synthetic import Record, classifier, rows
from trainwright import Accelerator
from trainwright.data_loader import SeedableRandomSampler
from trainwright.utils import DataLoaderConfiguration, set_seed


def training_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train with a sampler of the script's own, or a shuffled loader whose order Accelerate draws."""
    configuration = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=configuration, **options)
    set_seed(config["seed"])
    data: Any = rows(32)
    model, record = classifier().to(accelerator.device), Record()
    if config["sampler"]:
        generator = torch.Generator().manual_seed(config["seed"])
        sampler = SeedableRandomSampler(data, generator=generator, data_seed=config["seed"])
        train_dataloader: Any = DataLoader(data, sampler=sampler, batch_size=4, drop_last=True)
    else:
        train_dataloader = DataLoader(data, shuffle=True, batch_size=4, drop_last=True)
    optimizer: Any = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    for epoch in range(config["num_epochs"]):
        train_dataloader.set_epoch(epoch)
        for batch in train_dataloader:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            record.add(batch, loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    return {"batches": record.batches, "losses": record.losses}
