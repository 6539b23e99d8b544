"""The states and wrappers that a script may create itself, beside an Accelerator."""

from __future__ import annotations

import gc
import inspect

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from trainwright import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    Accelerator,
    AcceleratorState,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from trainwright.accelerator.gradient_state import GradientState
from trainwright.core.errors import ConfigurationError, TrainwrightWarning

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_the_state_checks_a_precision_and_leaves_plugins_to_the_accelerator() -> None:
    with pytest.raises(ConfigurationError, match=r"Create Accelerator\(mixed_precision='bf16'\) first"):
        AcceleratorState(mixed_precision="bf16", cpu=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert AcceleratorState("bf16", True).mixed_precision == "bf16"
    with pytest.raises(ConfigurationError, match=r"Pass it to Accelerator\(fsdp_plugin=…\)"):
        AcceleratorState(fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator.end_training()


def test_a_gradient_state_shows_the_newest_accelerator() -> None:
    GradientState._reset_state()
    alone = GradientState()
    assert (alone.sync_gradients, alone.num_steps, alone.end_of_dataloader, alone.remainder) == (True, 1, False, -1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    shown = GradientState()
    with accelerator.accumulate():
        assert (shown.num_steps, shown.sync_gradients) == (2, False)
    with pytest.raises(ConfigurationError, match=r"Accelerator\(gradient_accumulation_plugin=…\)"):
        GradientState(GradientAccumulationPlugin(num_steps=4))
    newer = Accelerator(cpu=True, gradient_accumulation_steps=4)
    assert GradientState().num_steps == 4
    del newer
    gc.collect()
    assert GradientState().num_steps == 2
    del accelerator, shown
    gc.collect()
    assert GradientState().num_steps == 1


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_an_optimizer_that_the_script_wraps_follows_the_accelerators_groups() -> None:
    model = nn.Linear(1, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = AcceleratedOptimizer(inner, True)
    scheduler = AcceleratedScheduler(StepLR(inner, 1, 0.5), optimizer, split_batches=True)
    each_call = AcceleratedScheduler(StepLR(inner, 1, 1.0), [optimizer], step_with_optimizer=False)
    for _ in range(4):
        with accelerator.accumulate():
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            scheduler.step()
            each_call.step()
            optimizer.zero_grad()
    assert (optimizer.num_steps, optimizer.step_was_skipped) == (2, False)
    assert (scheduler.scheduler.last_epoch, each_call.scheduler.last_epoch) == (2, 4)
    assert optimizer.gradient_state.num_steps == scheduler.gradient_state.num_steps == 2
    assert (scheduler.split_batches, each_call.split_batches) == (True, False)
    accelerator.end_training()


def test_the_accelerator_takes_its_arguments_in_the_order_of_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    theirs = list(inspect.signature(accelerate.Accelerator).parameters)
    parameters = inspect.signature(Accelerator).parameters.values()
    assert [one.name for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY] == theirs
    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(True, False, "bf16", 2, True, config)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 2)
    assert accelerator.even_batches is False
    accelerator.end_training()


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_loop_may_be_longer_than_its_schedule() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = AcceleratedScheduler(OneCycleLR(inner, max_lr=1.0, total_steps=2), inner)
    schedule.step()
    schedule.step()
    with pytest.warns(TrainwrightWarning, match="OneCycleLR has ended after total_steps=2"):
        schedule.step()
    schedule.step()
    assert schedule.scheduler.last_epoch == 2


def test_a_schedule_prints_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    AcceleratedScheduler(StepLR(inner, 1), AcceleratedOptimizer(inner)).print_lr(True, 0, 0.5, 3)
    assert capsys.readouterr().out == "Epoch 3: Adjusting learning rate of group 0 to 5.0000e-01.\n"
