"""A generator and a discriminator with an optimizer each, as programs for DCGAN and CycleGAN train them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.accelerator.programs.synthetic import Record, rows
from trainwright import Accelerator
from trainwright.utils import set_seed


def make_models() -> tuple[Any, Any]:
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
    return generator, nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))


def adversarial_loss(discriminator: Any, samples: torch.Tensor, real: bool) -> torch.Tensor:
    """Return the discriminator's loss for samples that are taken as real, or as generated."""
    logits = discriminator(samples)
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def training_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    accelerator = Accelerator(gradient_accumulation_steps=config["accumulate"], **options)
    set_seed(config["seed"])
    dataloader: Any = DataLoader(rows(32), shuffle=True, batch_size=4)
    generator, discriminator = make_models()
    record, record_g = Record(), Record()
    optimizer_g: Any = torch.optim.Adam(generator.parameters(), lr=config["lr"], betas=(0.5, 0.999))
    optimizer_d: Any = torch.optim.Adam(discriminator.parameters(), lr=config["lr"], betas=(0.5, 0.999))
    generator, discriminator, optimizer_g, optimizer_d, dataloader = accelerator.prepare(
        generator, discriminator, optimizer_g, optimizer_d, dataloader
    )
    noise = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(config["num_epochs"]):
        for real, _ in dataloader:
            latent = torch.randn(len(real), 4, generator=noise).to(accelerator.device)
            with accelerator.accumulate(discriminator):
                fake = generator(latent)
                loss_d = adversarial_loss(discriminator, real, True)
                loss_d = loss_d + adversarial_loss(discriminator, fake.detach(), False)
                accelerator.backward(loss_d)
                optimizer_d.step()
                optimizer_d.zero_grad()
            with accelerator.accumulate(generator):
                loss_g = adversarial_loss(discriminator, generator(latent), True)
                accelerator.backward(loss_g)
                optimizer_g.step()
                optimizer_g.zero_grad()
                optimizer_d.zero_grad()
            record.add((real, latent), loss_d)
            record_g.add((real, latent), loss_g)
    accelerator.end_training()
    return {"batches": record.batches, "losses": record.losses, "losses_g": record_g.losses}
