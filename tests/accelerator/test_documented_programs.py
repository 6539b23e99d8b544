"""The programs of Accelerate's pages on two processes, equal to loops written by hand.

Each program makes the calls of its page in the page's order, with the import changed. It returns this rank's results
and those of a loop in plain PyTorch, which trains on the micro-batches that the program received.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.distributed import run_distributed
from trainwright import (
    Accelerator,
    GradientAccumulationPlugin,
    LocalSGD,
    ProjectConfiguration,
    load_checkpoint_in_model,
    seed_everything,
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


def _by_hand(batches: Batches, accumulate: int = 1, *, last_steps: bool = True, syncs: bool = False) -> Any:
    """Train on this rank's micro-batches with DistributedDataParallel and return the weights.

    Args:
        batches: Of this rank.
        accumulate: Micro-batches of a step.
        last_steps: A step follows the last micro-batch, whether or not it completes a group.
        syncs: Average gradients after each micro-batch, not after a group.
    """
    model, optimizer, _, scheduler = _objects(1)
    replica = DistributedDataParallel(model)
    for index, (inputs, targets) in enumerate(batches):
        steps = (index + 1) % accumulate == 0 or (last_steps and index == len(batches) - 1)
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


# Quicktour


def _quicktour(folder: str) -> Any:
    model, optimizer, training_dataloader, scheduler = _objects(4)
    accelerator = Accelerator()
    device = accelerator.device
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )
    batches: Batches = []
    for batch in training_dataloader:
        optimizer.zero_grad()
        inputs, targets = batch
        batches.append((inputs, targets))
        assert inputs.device == device
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()

    validation_dataloader = accelerator.prepare(DataLoader(_data(7), batch_size=2))
    results = []
    model.eval()
    for inputs, targets in validation_dataloader:
        with torch.no_grad():
            predictions = model(inputs)
        all_predictions, all_targets = accelerator.gather_for_metrics((predictions, targets))
        results.append((all_predictions, all_targets))

    accelerator.wait_for_everyone()
    accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    loaded = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    load_checkpoint_in_model(loaded, folder)
    by_hand = _by_hand(batches)
    accelerator.end_training()
    return _weights(loaded), by_hand, batches, [torch.cat(each) for each in zip(*results, strict=True)]


def test_the_quicktour_trains_evaluates_and_saves(tmp_path: Path) -> None:
    found = _run(_quicktour, str(tmp_path / "model"))
    seen = torch.cat([inputs for *_, batches, _ in found for inputs, _ in batches])
    assert sorted(seen[:, 0].tolist()) == sorted(_data(16).tensors[0][:, 0].tolist())
    inputs, targets = _data(7).tensors
    model = _model()
    for parameter, value in zip(model.parameters(), found[0][1], strict=True):
        parameter.data = value
    for *_, (all_predictions, all_targets) in found:
        torch.testing.assert_close(all_targets, targets, rtol=0, atol=0)
        torch.testing.assert_close(all_predictions, model(inputs).detach())  # in batches of another size


# Gradient accumulation


def _accumulate_by_hand() -> Any:
    """The page's first program, without `accumulate`: a last short group is not used."""
    gradient_accumulation_steps = 2
    model, optimizer, training_dataloader, scheduler = _objects(5)
    accelerator = Accelerator()
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )
    batches: Batches = []
    for index, batch in enumerate(training_dataloader):
        inputs, targets = batch
        batches.append((inputs, targets))
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
        loss = loss / gradient_accumulation_steps
        accelerator.backward(loss)
        if (index + 1) % gradient_accumulation_steps == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    by_hand = _by_hand(batches, 2, last_steps=False, syncs=True)
    accelerator.end_training()
    return _weights(model), by_hand


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
    by_hand = _by_hand(batches, 2, last_steps=False, syncs=every)
    accelerator.end_training()
    return _weights(model), by_hand, steps, scheduler.get_last_lr()


def test_the_accumulation_page_converts_a_loop_by_hand() -> None:
    _run(_accumulate_by_hand)


@pytest.mark.parametrize("plugin", [None, {"adjust_scheduler": False}, {"sync_each_batch": True}])
def test_the_accumulation_page_accumulates_two_micro_batches(plugin: dict[str, Any] | None) -> None:
    for *_, steps, (rate,) in _run(_accumulate, plugin, 4, 1):
        assert steps == [False, True] * 2
        assert rate == pytest.approx(0.05 * 0.8**2)


def test_a_group_continues_in_the_next_pass_without_sync_with_dataloader() -> None:
    for *_, steps, (rate,) in _run(_accumulate, {"sync_with_dataloader": False}, 3, 2):
        assert steps == [False, True] * 3
        assert rate == pytest.approx(0.05 * 0.8**3)


def _items(num: int) -> Any:
    """The page's program for samples of variable size: the loss is a sum, divided by the items of the whole step."""
    gradient_accumulation_steps = 2
    criterion = nn.MSELoss(reduction="none")
    model, optimizer, _, scheduler = _objects(1)
    inputs, targets = _data(num * 4).tensors
    items = torch.arange(num * 4)[:, None] % 3 + 1  # the weight of a row, as if it had so many tokens
    dataloader: Any = DataLoader(TensorDataset(inputs, targets, items), batch_size=2)
    plugin = GradientAccumulationPlugin(gradient_accumulation_steps, short_group="steps")  # no warning of it
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model, optimizer, dataloader, scheduler = accelerator.prepare(model, optimizer, dataloader, scheduler)
    training_iterator = iter(dataloader)
    num_samples_in_epoch = len(dataloader)
    remainder = num_samples_in_epoch % gradient_accumulation_steps or gradient_accumulation_steps
    total_updates = math.ceil(num_samples_in_epoch / gradient_accumulation_steps)
    for update_step in range(total_updates):
        num_batches_in_step = gradient_accumulation_steps if update_step != total_updates - 1 else remainder
        batch_samples = [next(training_iterator) for _ in range(num_batches_in_step)]
        local_num_items_in_batch = sum(batch[2].sum() for batch in batch_samples)
        num_items_in_batch = accelerator.gather(local_num_items_in_batch).sum().item()
        for i, batch in enumerate(batch_samples):
            ctx = model.no_sync if i < len(batch_samples) - 1 else contextlib.nullcontext
            with ctx():
                loss = (criterion(model(batch[0]), batch[1]) * batch[2]).sum()
                loss = (loss * gradient_accumulation_steps * accelerator.num_processes) / num_items_in_batch
                accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    weights = _weights(model)
    model, optimizer, _, scheduler = _objects(1)
    for start in range(0, num * 4, 8):  # a step of both ranks
        x, y, n = (each[start : start + 8] for each in (inputs, targets, items))
        ((criterion(model(x), y) * n).sum() / n.sum()).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return weights, _weights(model)


def test_the_accumulation_page_weighs_samples_of_variable_size() -> None:
    for weights, by_hand in run_distributed(_items, 2, 5, init=False):
        torch.testing.assert_close(weights, by_hand, rtol=1e-5, atol=1e-6)  # one process adds in another order


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


# Local SGD


def _local_sgd() -> Any:
    local_sgd_steps = 2
    model, optimizer, training_dataloader, scheduler = _objects(10)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )
    batches: Batches = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=local_sgd_steps, enabled=True) as local_sgd:
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
                local_sgd.step()
    weights = _weights(model)
    model, optimizer, _, scheduler = _objects(1)
    for index, (inputs, targets) in enumerate(batches, start=1):
        (loss_function(model(inputs), targets) / 2).backward()
        if index % 2 == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if index % 4 == 0 or index == len(batches):
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= 2
    accelerator.end_training()
    return weights, _weights(model)


def test_the_local_sgd_page_averages_parameters() -> None:
    _run(_local_sgd)


# Checkpointing


def _checkpoint(folder: str) -> Any:
    seed_everything(0)
    configuration = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=configuration)
    my_model, my_optimizer, my_training_dataloader, my_scheduler = _objects(4)
    my_model, my_optimizer, my_training_dataloader = accelerator.prepare(my_model, my_optimizer, my_training_dataloader)
    accelerator.register_for_checkpointing(my_scheduler)
    accelerator.save_state()
    device = accelerator.device
    my_model.to(device)
    passes: list[Batches] = []

    def train() -> list[torch.Tensor]:
        for _ in range(2):
            passes.append([])
            for batch in my_training_dataloader:
                my_optimizer.zero_grad()
                inputs, targets = batch
                inputs = inputs.to(device)
                targets = targets.to(device)
                passes[-1].append((inputs, targets))
                outputs = my_model(inputs)
                loss = loss_function(outputs, targets)
                accelerator.backward(loss)
                my_optimizer.step()
            my_scheduler.step()
        return _weights(my_model)

    start = _weights(my_model)
    first = train()
    accelerator.load_state(f"{folder}/checkpoints/checkpoint_0")
    restored, epoch = _weights(my_model), my_scheduler.last_epoch
    second = train()
    for _ in range(2):
        accelerator.save_state()
    kept = sorted(path.name for path in Path(folder, "checkpoints").iterdir() if not path.name.startswith("."))
    model, optimizer, _, scheduler = _objects(1)
    replica = DistributedDataParallel(model)
    for batches in passes[:2]:
        for inputs, targets in batches:
            loss_function(replica(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    accelerator.end_training()
    torch.testing.assert_close((restored, second, passes[2:]), (start, first, passes[:2]), rtol=0, atol=0)
    return second, _weights(model), epoch, kept


def test_the_checkpointing_page_restores_and_names_states(tmp_path: Path) -> None:
    for *_, epoch, kept in _run(_checkpoint, str(tmp_path)):
        assert epoch == 0
        assert kept == ["checkpoint_1", "checkpoint_2"]


def _skip(folder: str) -> Any:
    """Save within a pass, and continue there in another loop."""
    batches: Batches = []

    def train(resumes: bool) -> list[torch.Tensor]:
        accelerator = Accelerator(project_dir=folder, seed=3)
        model, optimizer, train_dataloader, scheduler = _objects(4)
        model, optimizer, train_dataloader, scheduler = accelerator.prepare(
            model, optimizer, train_dataloader, scheduler
        )
        loaders = [train_dataloader, train_dataloader]
        if resumes:
            accelerator.load_state(f"{folder}/my_state")
            loaders[0] = accelerator.skip_first_batches(train_dataloader, 3)
        for epoch, loader in enumerate(loaders):
            for step, (inputs, targets) in enumerate(loader):
                if not resumes:
                    batches.append((inputs, targets))
                accelerator.backward(loss_function(model(inputs), targets))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if not resumes and epoch == 0 and step == 2:
                    accelerator.save_state(f"{folder}/my_state")
        weights = _weights(model)
        accelerator.free_memory()
        return weights

    torch.testing.assert_close(train(False), weights := train(True), rtol=0, atol=0)
    return weights, _by_hand(batches)


def test_the_checkpointing_page_skips_the_batches_before_a_state(tmp_path: Path) -> None:
    _run(_skip, str(tmp_path))


# Executing and deferring jobs


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


def test_the_execution_page_s_early_stop_ends_all_ranks_at_once() -> None:
    assert run_distributed(_stop_early, 2, init=False) == [4, 4]
