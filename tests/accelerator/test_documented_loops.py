"""Accelerate's pages on loops, block by block: the same calls in the same order, on small models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.distributed import run_distributed
from trainwright import Accelerator, seed_everything


class SimpleLinearModel(nn.Module):
    """The page's model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((1, 1)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        return inputs @ self.weight


def test_the_accumulation_page_s_self_contained_example_gives_its_numbers() -> None:
    seed_everything(0)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    y = torch.tensor([2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0])
    gradient_accumulation_steps = 4
    dataloader: Any = DataLoader(TensorDataset(x, y), batch_size=len(x) // gradient_accumulation_steps)
    model: Any = SimpleLinearModel()
    model_clone = copy.deepcopy(model)
    criterion = nn.MSELoss()
    model_optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=gradient_accumulation_steps)
    model, model_optimizer, dataloader = accelerator.prepare(model, model_optimizer, dataloader)
    model_clone_optimizer = torch.optim.SGD(model_clone.parameters(), lr=0.02)
    for inputs, labels in dataloader:
        with accelerator.accumulate(model):
            loss = criterion(model(inputs.view(-1, 1)), labels.view(-1, 1))
            accelerator.backward(loss)
            model_optimizer.step()
            model_optimizer.zero_grad()
    loss = criterion(x.view(-1, 1) @ model_clone.weight, y.view(-1, 1))
    model_clone_optimizer.zero_grad()
    loss.backward()
    model_clone_optimizer.step()
    assert f"{model.weight.mean().item():.5f}" == f"{model_clone.weight.mean().item():.5f}" == "2.04000"


def _synchronize_late() -> list[list[float]]:
    """Return this rank's gradient after each micro-batch, held back by each of the page's three ways."""
    found = []
    for way in ("model", "original", "accelerator"):
        model = SimpleLinearModel()
        accelerator = Accelerator(cpu=True)
        data = TensorDataset(torch.tensor([[1.0], [10.0], [100.0], [1000.0]]))
        ddp_model, dataloader = accelerator.prepare(model, DataLoader(data))
        gradients = []
        for index, (inputs,) in enumerate(dataloader):
            if index != len(dataloader) - 1:
                held: Any = {"model": None, "original": model, "accelerator": ddp_model}[way]
                with ddp_model.no_sync() if held is None else accelerator.no_sync(held):
                    accelerator.backward(ddp_model(inputs).sum())
            else:
                accelerator.backward(ddp_model(inputs).sum())
            assert model.weight.grad is not None
            gradients.append(float(model.weight.grad))
        accelerator.free_memory()
        found.append(gradients)
    return found


@pytest.mark.distributed
def test_the_synchronization_page_s_ways_hold_gradients_back() -> None:
    first, second = run_distributed(_synchronize_late, 2, init=False)
    assert first == [[1.0, 555.5]] * 3
    assert second == [[10.0, 555.5]] * 3


def _stop_early() -> int:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(20), batch_size=1))  # type: ignore[arg-type]
    done = 0
    for batch in loader:
        done += 1
        if int(batch) == 7:  # on one rank alone
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    return done


@pytest.mark.distributed
def test_the_execution_page_s_early_stop_ends_all_ranks_at_once() -> None:
    assert run_distributed(_stop_early, 2, init=False) == [4, 4]
