"""What the framework adds to a step of shards or split layers: the cost of a loop written by hand, and little more."""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.strategies.fsdp.sharded import Blocks, batches
from trainwright.callbacks.callback import Callback
from trainwright.core.task import TaskModule

_FIRST, _LAST = 3, 6  # the steps that are counted: caches are warm, and none of them is a run's last
_STEPS = _LAST - _FIRST + 1


class Plain(Blocks):
    """Blocks whose step logs nothing, and whose micro-batches all weigh the same."""

    num_items = TaskModule.num_items

    def __init__(self) -> None:
        super().__init__()
        self.outputs.weight = nn.Parameter(self.outputs.weight.detach().contiguous())  # by hand nobody makes it so

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return functional.mse_loss(self(batch), batch.flip(1))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Calls:
    """Counts calls of Python functions, without those that free what earlier runs have left.

    Comparisons are left out too. Torch keeps DTensors' layouts in dictionaries, and how many of them land in one place
    and must be compared depends on Python's hash seed and on addresses: tens of calls in each step, from run to run.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Calls:
        gc.collect()
        gc.disable()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and not _compares(frame) and not _compares(frame.f_back):
            self.counts[frame.f_code.co_name] += 1


def _compares(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_name == "__eq__"


class Counting(Callback):
    def __init__(self, counter: Any) -> None:
        self.counter = counter

    def on_train_step_start(self, trainer: Any, task: Any, group: Any) -> None:
        if trainer.global_step == _FIRST:
            self.counter.__enter__()

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.global_step == _LAST + 1:
            self.counter.__exit__(None, None, None)


def _by_hand(counter: Any, accumulated: int, clip: float | None) -> None:
    net: Any = Plain()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    optimizer = net.configure_optimizers()
    data = batches(accumulated * (_LAST + 2))
    for step in range(_LAST + 2):
        if step == _FIRST:
            counter.__enter__()
        for i, batch in enumerate(data[accumulated * step : accumulated * (step + 1)]):
            if accumulated > 1:
                net.set_requires_gradient_sync(i == accumulated - 1)
            loss = functional.mse_loss(net(batch), batch.flip(1))
            if accumulated > 1:
                loss = loss / accumulated
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if step == _LAST:
            counter.__exit__(None, None, None)


def _by_trainer(counter: Any, accumulated: int, clip: float | None) -> None:
    options = {"accumulate_grad_batches": accumulated, "gradient_clip_val": clip, "use_distributed_sampler": False}
    trainer = quiet_trainer(devices="auto", strategy="fsdp", max_epochs=1, callbacks=[Counting(counter)], **options)
    data: Any = batches(accumulated * (_LAST + 2))
    trainer.fit(Plain(), DataLoader(data, batch_size=None))


_KINDS: dict[str, tuple[int, float | None]] = {"plain": (1, None), "accumulated": (3, None), "clipped": (1, 0.1)}


def _count_in(loop: Callable[[Any], None]) -> tuple[Counter[str], float]:
    """Return the operators of all steps of a loop by name, and the Python calls in each step."""
    operators, calls = Operators(), Calls()
    loop(operators)
    loop(calls)
    return operators.counts, sum(calls.counts.values()) / _STEPS


def _count() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for kind, (accumulated, clip) in _KINDS.items():
        for name, loop in (("hand", _by_hand), ("ours", _by_trainer)):
            found[kind, name] = _count_in(functools.partial(loop, accumulated=accumulated, clip=clip))
    return found


@pytest.fixture(scope="module")
def counted() -> dict[Any, Any]:
    """Operators by name, in all of the steps, and Python calls in each; of rank 0."""
    by_rank = run_distributed(_count, 2, timeout=240)
    return dict(by_rank[0])


def _collectives(counts: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if name.startswith("c10d")}


def _computed(counts: Counter[str]) -> int:
    return sum(count for name, count in counts.items() if name.startswith("aten"))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.exhaustive
def test_a_sharded_step_sends_what_a_hand_written_one_sends(kind: str, counted: dict[Any, Any]) -> None:
    sent, by_hand = (_collectives(counted[kind, name][0]) for name in ("ours", "hand"))
    assert sum(sent.values()) >= 8 * _STEPS  # four units are gathered at least once, and their gradients averaged
    if kind == "clipped":  # the norm is one number from each rank; by hand DTensor adds it up out of sight
        assert sent.pop("c10d.allreduce_.default") == _STEPS
    assert sent == by_hand


@pytest.mark.distributed
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.requires("torch>=2.13", reason="torch 2.9 itself makes more calls and operations")
def test_a_sharded_step_computes_what_a_hand_written_one_computes(kind: str, counted: dict[Any, Any]) -> None:
    ours, hand = (_computed(counted[kind, name][0]) for name in ("ours", "hand"))
    accumulated, clip = _KINDS[kind]
    # Each micro-batch's loss is detached, and those of a group are added up. The norm is squared in float64 and back.
    assert ours <= hand + (2 * accumulated - 1 + 5 * (clip is not None)) * _STEPS


# Split layers
