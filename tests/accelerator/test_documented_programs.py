"""The programs of Accelerate's pages on accumulation and synchronization, equal to loops by hand on two processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.distributed import run_distributed
from trainwright import (
    Accelerator,
    GradientAccumulationPlugin,
)

pytestmark = pytest.mark.distributed

Batches = list[tuple[torch.Tensor, torch.Tensor]]
loss_function = nn.MSELoss()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _data(num: int) -> TensorDataset:
    inputs = torch.randn(num, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def _objects(num: int, model: nn.Module | None = None) -> tuple[Any, Any, Any, Any]:
    """Return a model, its optimizer, a shuffled loader of `num` micro-batches of each rank, and a schedule."""
    model = _model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
    return model, optimizer, DataLoader(_data(num * 4), batch_size=2, shuffle=True), scheduler


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _by_hand(batches: Batches, accumulate: int = 1, *, syncs: bool = False) -> Any:
    """Train on a rank's micro-batches; with `syncs`, gradients are averaged after each, not after a group."""
    model, optimizer, _, scheduler = _objects(1)
    replica = DistributedDataParallel(model)
    for index, (inputs, targets) in enumerate(batches):
        steps = (index + 1) % accumulate == 0
        with contextlib.nullcontext() if steps or syncs else replica.no_sync():
            loss = loss_function(replica(inputs), targets)
            (loss / accumulate).backward()
        if steps:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return _weights(model)


def _run(program: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a program on two ranks and check that its weights are those of the loop by hand."""
    found = run_distributed(program, 2, *arguments, init=False, timeout=240)
    for weights, by_hand, *_ in found:
        torch.testing.assert_close(weights, by_hand, rtol=0, atol=0)
        torch.testing.assert_close(weights, found[0][0], rtol=0, atol=0)
    return found


def _accumulate(plugin: dict[str, Any] | None, num: int, num_epochs: int) -> Any:
    """The finished code of the page."""
    model, optimizer, training_dataloader, scheduler = _objects(num)
    if plugin is None:
        accelerator = Accelerator(gradient_accumulation_steps=2)
    else:
        accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, **plugin))
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )
    batches: Batches = []
    steps: list[bool] = []
    state = accelerator.gradient_state
    for _ in range(num_epochs):
        assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (False, False, -1)
        for batch in training_dataloader:
            with accelerator.accumulate(model):
                inputs, targets = batch
                batches.append((inputs, targets))
                outputs = model(inputs)
                loss = loss_function(outputs, targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            assert state.active_dataloader is training_dataloader
            assert state.end_of_dataloader == (len(steps) % num == num - 1)
            assert state.remainder == 0
            steps.append(state.sync_gradients)
    every = bool(plugin and plugin.get("sync_each_batch"))
    by_hand = _by_hand(batches, 2, syncs=every)
    accelerator.end_training()
    return _weights(model), by_hand, steps, scheduler.get_last_lr()


@pytest.mark.parametrize("plugin", [None, {"adjust_scheduler": False}, {"sync_each_batch": True}])
def test_the_accumulation_page_accumulates_two_micro_batches(plugin: dict[str, Any] | None) -> None:
    for *_, steps, (rate,) in _run(_accumulate, plugin, 4, 1):
        assert steps == [False, True] * 2
        assert rate == pytest.approx(0.05 * 0.8**2)


def test_a_group_continues_in_the_next_pass_without_sync_with_dataloader() -> None:
    for *_, steps, (rate,) in _run(_accumulate, {"sync_with_dataloader": False}, 3, 2):
        assert steps == [False, True] * 3
        assert rate == pytest.approx(0.05 * 0.8**3)


# Gradient synchronization


def _synchronize(way: str) -> Any:
    """The page's programs that are timed: gradients of four micro-batches cross ranks after each, or after the last."""
    loss_func = loss_function
    accelerator = Accelerator(gradient_accumulation_steps=4 if way == "accumulate" else 1)
    model, optimizer, dataloader, _ = _objects(4)
    ddp_model, dataloader, optimizer = accelerator.prepare(model, dataloader, optimizer)
    batches: Batches = []
    gradients: list[torch.Tensor] = []
    for index, batch in enumerate(dataloader):
        inputs, targets = batch
        batches.append((inputs, targets))
        last = index == len(dataloader) - 1
        if way == "accumulate":
            with accelerator.accumulate(ddp_model):
                accelerator.backward(loss_func(ddp_model(inputs), targets))
                gradients.append(next(model.parameters()).grad.clone())
                optimizer.step()
                optimizer.zero_grad()
            continue
        if way == "improper" and not last:
            loss = loss_func(ddp_model(inputs), targets) / 4
            with accelerator.no_sync(ddp_model):
                accelerator.backward(loss)
        elif way in ("ddp_model.no_sync", "accelerator.no_sync") and not last:
            with ddp_model.no_sync() if way == "ddp_model.no_sync" else accelerator.no_sync(model):
                outputs = ddp_model(inputs)
                loss = loss_func(outputs, targets) / 4
                accelerator.backward(loss)
        else:
            outputs = ddp_model(inputs)
            loss = loss_func(outputs, targets) / 4
            accelerator.backward(loss)
        gradients.append(next(model.parameters()).grad.clone())
        if last:
            optimizer.step()
            optimizer.zero_grad()
    by_hand = _by_hand(batches, 4, syncs=way in ("baseline", "improper"))
    accelerator.end_training()
    return _weights(model), by_hand, gradients


@pytest.mark.parametrize("way", ["baseline", "improper", "ddp_model.no_sync", "accelerator.no_sync", "accumulate"])
def test_the_synchronization_page_s_ways_train_as_by_hand(way: str) -> None:
    (_, _, first), (_, _, second) = _run(_synchronize, way)
    alike = [torch.equal(one, other) for one, other in zip(first, second, strict=True)]
    assert alike == ([True] * 4 if way in ("baseline", "improper") else [False] * 3 + [True])
