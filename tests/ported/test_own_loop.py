"""A loop of one's own with Accelerator: accumulation, clipping, a schedule, evaluation over all, a saved state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.ported.data import digits
from trainwright import Accelerator, seed_everything


def train(folder: Path, epochs: range, resume: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """Train over these of six epochs, and return (accuracy, weights)."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    seed_everything(6)
    model: Any = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, 10)
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_loader: Any = DataLoader(digits(), batch_size=50, shuffle=True)
    eval_loader: Any = DataLoader(digits(train=False), batch_size=100)
    scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6 * 14)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    if resume:
        accelerator.load_state(folder / "state")

    accuracy = 0.0
    for _ in epochs:
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(images), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        correct = []
        for images, labels in eval_loader:
            with torch.no_grad():
                predicted = model(images).argmax(dim=-1)
            predicted, labels = accelerator.gather_for_metrics((predicted, labels))
            correct.append(predicted == labels)
        assert len(torch.cat(correct)) == 397
        accuracy = torch.cat(correct).float().mean().item()
    accelerator.save_state(folder / "state")
    return accuracy, accelerator.unwrap_model(model).state_dict()


def test_it_learns_and_continues_where_it_was_stopped(tmp_path: Path) -> None:
    accuracy, expected = train(tmp_path / "uninterrupted", range(6))
    assert accuracy >= 0.86
    train(tmp_path / "stopped", range(2))
    again, weights = train(tmp_path / "stopped", range(2, 6), resume=True)
    assert again == accuracy
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
