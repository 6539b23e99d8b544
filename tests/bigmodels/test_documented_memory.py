"""Accelerate's page on running out of memory, block by block: the same calls in the same order, on small models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Accelerator, find_executable_batch_size

pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.mark.slow
def test_a_training_function_tries_smaller_batches_until_one_fits() -> None:
    tried: list[int] = []
    models: list[Any] = []

    def get_model() -> nn.Module:
        torch.manual_seed(0)
        models.append(nn.Linear(4, 1))
        return models[-1]

    def get_dataloaders(accelerator: Accelerator, batch_size: int) -> tuple[Any, Any]:
        data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
        return DataLoader(data, batch_size=batch_size, shuffle=True), DataLoader(data, batch_size=batch_size)

    def train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, schedule: Any) -> None:
        for x, y in loader:
            tried.append(len(x))
            if len(x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    def training_function(args: Any) -> int:
        accelerator = Accelerator(cpu=True)

        @find_executable_batch_size(starting_batch_size=args.batch_size)
        def inner_training_loop(batch_size: int) -> int:
            nonlocal accelerator
            accelerator.free_memory()
            model: Any = get_model()
            model.to(accelerator.device)
            optimizer: Any = torch.optim.AdamW(model.parameters())
            train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
            lr_scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=len(train_dataloader))
            model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
                model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
            )
            train(accelerator, model, optimizer, train_dataloader, lr_scheduler)
            with torch.no_grad():
                return sum(len(accelerator.gather_for_metrics(model(x))) for x, _ in eval_dataloader)

        return int(inner_training_loop())

    assert training_function(SimpleNamespace(batch_size=16)) == 16
    assert tried == [16, 8, 4, 4, 4, 4]
    assert len(models) == 3
