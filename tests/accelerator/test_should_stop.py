"""Preemption signals in user-written loops: every rank leaves at one step, and a second run continues exactly."""

from __future__ import annotations

import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.contracts.test_own_loop import Net, data, make_optimizer
from tests.helpers.distributed import run_distributed
from trainwright.accelerator.accelerator import Accelerator
from trainwright.accelerator.gradient_state import GradientAccumulationPlugin
from trainwright.core.errors import TrainwrightWarning

STEPS = 20


def _train(folder: str, signals: dict[tuple[int, int], int], load: bool) -> dict[str, Any]:
    """Train until a signal, which a (rank, micro-batch) sends itself, or the end."""
    accelerator = Accelerator(
        seed=0, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, short_group="mean")
    )
    torch.manual_seed(1)
    net = Net()
    loader = DataLoader(data(4 * STEPS), batch_size=2 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, make_optimizer(net), loader)
    if load:
        accelerator.load_state(folder)
    count = 0
    for x, y, _ in loader:
        number = signals.get((accelerator.process_index, count))
        if number is not None:
            os.kill(os.getpid(), number)
        count += 1
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.should_stop:
            accelerator.save_state(folder)
            break
    stopped = accelerator.should_stop
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return {"stopped": stopped, "count": count, "weights": weights}


@pytest.mark.distributed
@pytest.mark.slow
def test_all_ranks_leave_at_one_step_and_a_second_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    def run(signals: Any, load: bool = False) -> list[dict[str, Any]]:
        return run_distributed(_train, 2, str(tmp_path / "state"), signals, load, init=False, timeout=120)

    first = run({(1, 3): signal.SIGTERM})
    assert [of_rank["stopped"] for of_rank in first] == [True, True]
    assert first[0]["count"] == first[1]["count"] < 2 * STEPS
    assert first[0]["count"] % 2 == 0  # an optimizer step has followed
    resumed, uninterrupted = run({}, load=True), run({})
    assert resumed[0]["count"] == 2 * STEPS - first[0]["count"]
    assert not resumed[0]["stopped"]
    for one, other in zip(resumed, uninterrupted, strict=True):
        torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)


def _stops(accelerator: Accelerator) -> bool:
    return accelerator.should_stop


def _loop() -> tuple[Accelerator, torch.nn.Parameter]:
    return Accelerator(cpu=True), torch.nn.Parameter(torch.ones(()))


@pytest.mark.usefixtures("fresh_state")
def test_handlers_are_set_when_it_is_read_call_the_users_and_are_restored() -> None:
    called = []
    signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    accelerator, weight = _loop()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    assert not _stops(accelerator)
    os.kill(os.getpid(), signal.SIGTERM)
    assert not _stops(accelerator)  # until the next step
    accelerator.backward(weight * 2)
    assert _stops(accelerator)
    assert called == [signal.SIGTERM]
    pickle.dumps(accelerator)
    accelerator.end_training()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    assert _stops(accelerator)  # for the exit code


@pytest.mark.usefixtures("fresh_state")
def test_outside_of_the_main_thread_it_warns() -> None:
    accelerator, _ = _loop()
    with ThreadPoolExecutor(1) as pool, pytest.warns(TrainwrightWarning, match="outside of the main thread") as said:
        pool.submit(_stops, accelerator).result()
    assert len(said) == 1
