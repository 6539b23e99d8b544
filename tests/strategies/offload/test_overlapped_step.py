"""The optimizer steps while gradients still come and weights already go, and no bit changes by that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.strategies.offload.overlapped import LateStream, assert_same, train
from tests.strategies.offload.test_training import DEPTH, Tiny
from trainwright import OffloadStrategy
from trainwright.callbacks import EMAWeightAveraging
from trainwright.callbacks.callback import Callback
from trainwright.strategies.offload import prefetch, streaming
from trainwright.strategies.offload.step import can_be_split


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have all copies made as late as can be. Without it, they are made as early as can be."""
    for module in (streaming, prefetch):
        monkeypatch.setattr(module, "CopyStream", LateStream)
    yield
    LateStream.all.clear()


LISTENERS: dict[str, Callable[[], list[Callback]]] = {
    "nobody": list,
    "averages": lambda: [EMAWeightAveraging(decay=0.5)],
}


@functools.cache
def plainly(listener: str, accumulate: int, clip: float | None) -> Any:
    return train("single", *LISTENERS[listener](), accumulate_grad_batches=accumulate, gradient_clip_val=clip)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(
    ("parameters", "state", "listener"),
    [
        ("device", "cpu", "nobody"), ("disk", "disk", "nobody"), ("cpu", "disk", "nobody"),
        ("cpu", "cpu", "averages"), ("device", "cpu", "averages"),
    ],
)  # fmt: skip
def test_every_bit_is_that_of_training_in_one_place(parameters: Any, state: Any, listener: str, tmp_path: Path) -> None:
    for accumulate, clip in ((1, None), (3, None), (3, 0.5)):
        strategy = OffloadStrategy(parameters, state, stream=True, offload_folder=tmp_path)
        found = train(strategy, *LISTENERS[listener](), accumulate_grad_batches=accumulate, gradient_clip_val=clip)
        assert_same(found, plainly(listener, accumulate, clip))


# Order


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("event", ["on_after_backward", "on_before_optimizer_step"])
def test_who_looks_at_gradients_finds_all_of_them(event: str) -> None:
    def look(sums: list[float]) -> Callback:
        def note(self: Any, trainer: Any, task: Any, *_: Any) -> None:
            sums.append(sum(float(p.grad.sum()) for p in task.parameters() if p.grad is not None))

        found: Callback = type("Look", (Callback,), {event: note})()
        return found

    found, wanted = [], []  # type: ignore[var-annotated]  # floats
    assert_same(train(OffloadStrategy(stream=True), look(found)), train("single", look(wanted)))
    assert found == wanted
    assert wanted


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_device_holds_as_many_units_as_it_should_and_between_steps_those_of_the_next_forward(ahead: int) -> None:
    task = Tiny()
    seen: list[int] = []

    class Count(Callback):
        reads_only = True

        def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
            units = trainer.strategy.weight_stream.units
            seen.append(sum(unit.flats[0][1].untyped_storage().nbytes() > 0 for unit in units))

    def count(*_: Any) -> None:
        Count().on_train_step_end(task.trainer, task, None)

    for block in task.blocks:
        block.up.register_forward_hook(count)
        block.norm.weight.register_hook(count)
    train(OffloadStrategy(stream=True, prefetch=ahead), Count(), task=task, limit_val_batches=0)
    assert seen[2 * DEPTH] == ahead  # after the first step's forward and backward
    assert max(seen) == 1 + ahead
    assert len(seen) == 10 * (2 * DEPTH + 1)


# Failures, and optimizers that cannot be split


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("parameters", ["cpu", "device"])
def test_a_failure_amid_a_step_leaves_weights_at_home_and_all_gradients(
    parameters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = torch.optim.AdamW.step, 0

    @functools.wraps(own)
    def step(optimizer: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise ArithmeticError
        return own(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    gradients: list[list[torch.Tensor]] = []
    for strategy, fails_at in (("single", 1), (OffloadStrategy(parameters, stream=True), 3)):  # noqa: B007  # by step
        task, calls = Tiny(), 0
        with pytest.raises(ArithmeticError):
            train(strategy, task=task, limit_val_batches=0)
        gradients.append([parameter.grad for parameter in task.parameters() if parameter.grad is not None])
    for found, wanted in zip(gradients[1], gradients[0], strict=True):
        assert torch.equal(found, wanted)
    untouched = Tiny()
    stepped = [
        not torch.equal(found.up.weight, before.up.weight)
        for found, before in zip(task.blocks, untouched.blocks, strict=True)
    ]
    assert stepped == [False] * (DEPTH - 2) + [True, True]


class SharedNorm(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        return super().step(closure)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("state", ["cpu", "disk"])
def test_an_optimizer_that_joins_its_parameters_steps_once(state: Any) -> None:
    def task() -> Tiny:
        made = Tiny()
        made.configure_optimizers = lambda: SharedNorm(made.parameters(), lr=0.1, momentum=0.9)  # type: ignore[method-assign]
        return made

    assert_same(train(OffloadStrategy("device", state, stream=True), task=task()), train(task=task()))


def test_torchs_optimizers_are_split_unless_somebody_would_notice() -> None:
    def parameters() -> list[torch.Tensor]:
        return [torch.nn.Parameter(torch.zeros(2, 2))]

    class Renamed(torch.optim.AdamW):
        pass

    for kind in (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SGD, Renamed):
        assert can_be_split(kind(parameters()))
    for other in (torch.optim.LBFGS, SharedNorm):
        assert not can_be_split(other(parameters()))
    heard = torch.optim.SGD(parameters())
    heard.register_step_post_hook(lambda *_: None)
    assert not can_be_split(heard)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert not can_be_split(torch.optim.SGD(parameters()))
    finally:
        handle.remove()
