"""Gradient accumulation with Accelerator: weights of micro-batches, short groups, interrupted groups."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.accelerator.test_accelerator import _net
from tests.helpers.calls import Operators
from tests.helpers.distributed import run_distributed
from trainwright import Accelerator, DDPStrategy, GradientAccumulationPlugin
from trainwright.accelerator.handlers import GradScalerKwargs
from trainwright.core.errors import ConfigurationError, TaskError, TrainwrightWarning

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_a_short_group_whose_gradient_is_too_small_is_warned_of_once() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    net, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(torch.ones(6, 1)))
    with pytest.warns(TrainwrightWarning, match=r"2 .* of 4, .*short_group='mean'.*num_items=") as caught:
        _run_micro_batches(accelerator, net, itertools.chain(loader, loader))
    assert len(caught) == 1


def test_counted_items_do_not_overflow_fp16() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    net = nn.Linear(4, 1, bias=False)
    nn.init.ones_(net.weight)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(net, optimizer)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((2, 4), 0.25)).mean(), num_items=100_000)
            optimizer.step()
            optimizer.zero_grad()
    assert not accelerator.optimizer_step_was_skipped
    assert net.weight.tolist()[0] == pytest.approx([0.75] * 4, rel=1e-3)


def test_misuse_of_num_items_is_an_error_before_backward() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = _net()

    def loss() -> torch.Tensor:
        return net(torch.ones(1, 4)).square().mean()

    for wrong in (-1, "3", torch.ones(2), True):
        with pytest.raises(TaskError, match="num_items"):
            accelerator.backward(loss(), num_items=wrong)  # type: ignore[arg-type]
    assert net[0].weight.grad is None  # type: ignore[index]
    model = accelerator.prepare(net)
    with accelerator.accumulate(model):
        accelerator.backward(loss(), num_items=3)
        with pytest.raises(TaskError, match="Add the losses"):
            accelerator.backward(loss(), num_items=3)
    with accelerator.accumulate(model), pytest.raises(TaskError, match="every micro-batch"):
        accelerator.backward(loss())


def test_invalid_arguments_of_the_plugin_are_errors() -> None:
    with pytest.raises(ConfigurationError, match="short_group"):
        GradientAccumulationPlugin(num_steps=2, short_group="men")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="completes a short group"):
        GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False, short_group="mean")
    with pytest.raises(ConfigurationError, match="num_steps=0"):
        GradientAccumulationPlugin(num_steps=0)
    with pytest.raises(ConfigurationError, match="both"):
        Accelerator(cpu=True, gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(3))


def _run_micro_batches(accelerator: Accelerator, model: Any, loader: Any, fails_at: int | None = None) -> None:
    for i, x in enumerate(loader):
        with contextlib.suppress(MemoryError), accelerator.accumulate(model):
            if i == fails_at:
                raise MemoryError
            accelerator.backward(model(x).mean())


def test_an_interrupted_group_continues_with_another_number_of_steps() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    net, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(torch.ones(4, 1)))
    _run_micro_batches(accelerator, net, itertools.islice(loader, 1))
    accelerator.gradient_accumulation_steps = 2
    _run_micro_batches(accelerator, net, itertools.islice(loader, 1))
    assert net.weight.grad.item() == 1.0


def test_gradients_of_a_group_are_freed_if_its_last_micro_batch_fails() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(torch.ones(4, 1)))
    _run_micro_batches(accelerator, net, itertools.islice(loader, 2), fails_at=1)
    with pytest.warns(TrainwrightWarning, match="last of 2 micro-batch.* raised an error.* were freed"):
        _run_micro_batches(accelerator, net, itertools.islice(loader, 1))
    assert net.weight.grad.item() == 0.5


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_gradients_of_a_group_whose_last_block_was_left_count_in_the_next_step(precision: str, tmp_path: Path) -> None:
    scaling = GradScalerKwargs(init_scale=256.0)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=precision, kwargs_handlers=[scaling]
    )
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(net, optimizer)
    for x, num_items in ((1.0, 1), (None, 0), (None, 0), (2.0, 3)):
        with accelerator.accumulate(model):
            if x is None:
                continue
            accelerator.backward(model(torch.tensor([[x]])).mean(), num_items=num_items)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
    assert net.weight.item() == pytest.approx(-(1.0 * 1 + 2.0 * 3) / 4, rel=1e-3)
    for x in (1.0, None):
        with accelerator.accumulate(model):
            if x is not None:
                accelerator.backward(model(torch.tensor([[x]])).mean(), num_items=1)
    with pytest.raises(ConfigurationError, match="within a group"):
        accelerator.save_state(tmp_path / "state")
    with pytest.raises(TaskError, match="without a backward in the last"):
        optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state(tmp_path / "state")


def test_zero_grad_between_two_passes_ends_an_interrupted_group() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(torch.ones(6, 1)))  # type: ignore
    for _ in range(2):
        optimizer.zero_grad()
        _run_micro_batches(accelerator, net, itertools.islice(loader, 2))
    assert net.weight.grad.item() == 0.5


@pytest.mark.parametrize(
    "options", [{"sync_with_dataloader": False}, {"adjust_scheduler": False, "short_group": "steps"}]
)
def test_a_group_continues_in_the_next_pass_without_sync_with_dataloader(options: dict[str, Any]) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, **options)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    net = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=1.0)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule, loader = accelerator.prepare(net, optimizer, schedule, DataLoader(torch.ones(3, 1)))
    state, steps = accelerator.gradient_state, []
    for _ in range(2):
        assert (state.in_dataloader, state.end_of_dataloader, state.remainder) == (False, False, -1)
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            assert (state.active_dataloader, state.remainder) == (loader, 0)
            assert state.end_of_dataloader == (len(steps) % 3 == 2)
            steps.append(state.sync_gradients)
    assert steps == ([False, True] * 3 if "sync_with_dataloader" in options else [False, True, True] * 2)
    assert schedule.get_last_lr() == [0.5 ** sum(steps)]


def test_counts_after_a_loss_without_one_are_an_error() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).mean())
    with accelerator.accumulate(model), pytest.raises(TaskError, match="earlier losses had none"):
        accelerator.backward(model(torch.ones(1, 1)).mean(), num_items=4)


def test_a_group_is_stepped_at_its_own_end_beside_and_around_other_groups() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    (outer, inner), stepped = (nn.Linear(1, 1, bias=False) for _ in range(2)), []
    outer, inner, of_outer, of_inner = accelerator.prepare(
        outer, inner, *(torch.optim.SGD(net.parameters(), lr=1.0) for net in (outer, inner))
    )
    for _ in range(2):
        with accelerator.accumulate(outer):
            for _ in range(2):
                with accelerator.accumulate(inner):
                    accelerator.backward(inner(torch.ones(1, 1)).mean())
                    of_inner.step()
            before = outer.weight.item()
            accelerator.backward(outer(torch.ones(1, 1)).mean())
            of_outer.step()
            stepped.append(outer.weight.item() != before)
    assert stepped == [False, True]
    of_inner.zero_grad()
    with accelerator.accumulate(outer):
        accelerator.backward(outer(torch.ones(1, 1)).mean(), num_items=5)
    for _ in range(2):
        with accelerator.accumulate(inner):
            accelerator.backward(inner(torch.ones(1, 1)).mean())
    with pytest.raises(TaskError, match="without a backward in the last micro-batch"):
        of_outer.step()


def test_load_state_drops_the_gradients_of_a_group_that_was_left(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    start = net.weight.item()
    accelerator.save_state(tmp_path / "state")
    for load in (True, False, False):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), 100.0 if load else 1.0)).sum())
            optimizer.step()
            optimizer.zero_grad()
        if load:
            accelerator.load_state(tmp_path / "state")
    assert net.weight.item() == pytest.approx(start - 1.0)


@pytest.mark.parametrize("repeats", [True, False])
def test_a_loop_that_sets_where_a_group_ends_may_count_items(repeats: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    for value, num_items in ((1.0, 1), (3.0, 2), (6.0, 3)):
        if repeats or num_items != 2:
            accelerator.gradient_state._set_sync_gradients(num_items == 3)
        accelerator.backward(model(torch.full((1, 1), value)).mean(), num_items=num_items)
    assert model.weight.grad.item() == pytest.approx((1 + 2 * 3 + 3 * 6) / 6)


def _exchanges_and_weights(accelerator: Accelerator, hold_back: str = "") -> tuple[int, torch.Tensor]:
    """Train two steps of three micro-batches; returns the exchanges of gradients, and the weights."""
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(accelerator.process_index)
    held_back = model.no_sync if hold_back == "model" else partial(accelerator.no_sync, model)
    with Operators() as operators:
        for number in range(6):
            x = torch.randn(2, 3, generator=generator)
            if hold_back in ("", "all models"):
                with accelerator.accumulate(*() if hold_back else (model,)):
                    accelerator.backward(model(x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                continue
            last = number % 3 == 2
            with contextlib.nullcontext() if last or hold_back == "backward" else held_back():
                loss = model(x).square().mean() / 3
                with contextlib.nullcontext() if last else held_back():
                    accelerator.backward(loss)
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return operators.counts["c10d.allreduce_.default"], torch.cat([p.detach().flatten() for p in net.parameters()])


def _loops_that_sync_each_batch() -> dict[str, Any]:
    return {
        "held back": _exchanges_and_weights(Accelerator(cpu=True, gradient_accumulation_steps=3)),
        "plugin": _exchanges_and_weights(
            Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(3, sync_each_batch=True))
        ),
        "no_sync": _exchanges_and_weights(Accelerator(cpu=True, strategy=DDPStrategy(sync_each_batch=True)), "both"),
        "no_sync of the model": _exchanges_and_weights(Accelerator(cpu=True), "model"),
        "no_sync of backward alone": _exchanges_and_weights(Accelerator(cpu=True), "backward"),
        "all models": _exchanges_and_weights(Accelerator(cpu=True, gradient_accumulation_steps=3), "all models"),
    }


def _gradient_after_zero_grad(strategy: str) -> float:
    """Drop the gradients of a group between the forward and the backward of its last micro-batch."""
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
    net = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(net.weight)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=1.0), DataLoader(torch.ones(8, 2))
    )
    for x in itertools.islice(loader, 2):
        with accelerator.accumulate(model):
            loss = model(x).sum()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    state = accelerator.get_state_dict(model)
    return -float(state["weight"].mean()) if state else 0.5


def _gradients_after_zero_grad() -> list[float]:
    return [_gradient_after_zero_grad(strategy) for strategy in ("ddp", "fsdp")]


@pytest.mark.distributed
def test_zero_grad_before_the_last_backward_drops_the_gradients_of_the_group() -> None:
    assert run_distributed(_gradients_after_zero_grad, 2, init=False, timeout=120) == [[0.5, 0.5]] * 2


@pytest.mark.distributed
def test_gradients_cross_once_per_step_or_micro_batch_and_train_the_same() -> None:
    for found in run_distributed(_loops_that_sync_each_batch, 2, init=False, timeout=120):
        assert {name: count for name, (count, _) in found.items()} == {
            "held back": 2, "plugin": 6, "no_sync": 2, "no_sync of the model": 2,
            "no_sync of backward alone": 6, "all models": 2,
        }  # fmt: skip
        for _, weights in found.values():
            torch.testing.assert_close(weights, found["held back"][1])
