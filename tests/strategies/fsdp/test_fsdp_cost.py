"""What the framework adds to a step of shards or split layers: the cost of a loop written by hand, and little more."""

from __future__ import annotations

from collections import Counter
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
_ACCUMULATED, _CLIP = 3, 0.1


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


class Counting(Callback):
    def __init__(self, counter: Any) -> None:
        self.counter = counter

    def on_train_step_start(self, trainer: Any, task: Any, group: Any) -> None:
        if trainer.global_step == _FIRST:
            self.counter.__enter__()

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.global_step == _LAST + 1:
            self.counter.__exit__(None, None, None)


def _by_hand(counter: Any) -> None:
    net: Any = Plain()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    optimizer = net.configure_optimizers()
    data = batches(_ACCUMULATED * (_LAST + 2))
    for step in range(_LAST + 2):
        if step == _FIRST:
            counter.__enter__()
        for i, batch in enumerate(data[_ACCUMULATED * step : _ACCUMULATED * (step + 1)]):
            net.set_requires_gradient_sync(i == _ACCUMULATED - 1)
            loss = functional.mse_loss(net(batch), batch.flip(1)) / _ACCUMULATED
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        nn.utils.clip_grad_norm_(net.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step == _LAST:
            counter.__exit__(None, None, None)


def _by_trainer(counter: Any) -> None:
    options = {"accumulate_grad_batches": _ACCUMULATED, "gradient_clip_val": _CLIP, "use_distributed_sampler": False}
    trainer = quiet_trainer(devices="auto", strategy="fsdp", max_epochs=1, callbacks=[Counting(counter)], **options)
    data: Any = batches(_ACCUMULATED * (_LAST + 2))
    trainer.fit(Plain(), DataLoader(data, batch_size=None))


def _count() -> dict[str, Counter[str]]:
    """Return the operators of all steps of both loops, by name."""
    counters = {"hand": Operators(), "ours": Operators()}
    _by_hand(counters["hand"])
    _by_trainer(counters["ours"])
    return {name: counter.counts for name, counter in counters.items()}


@pytest.mark.distributed
@pytest.mark.requires("torch>=2.13", reason="torch 2.9 itself makes more operations")
def test_a_sharded_step_sends_and_computes_what_a_hand_written_one_does() -> None:
    counted = run_distributed(_count, 2, timeout=240)[0]
    sent, by_hand = (
        {name: count for name, count in counted[loop].items() if name.startswith("c10d")} for loop in ("ours", "hand")
    )
    assert sum(sent.values()) >= 8 * _STEPS  # four units are gathered at least once, and their gradients averaged
    # The norm is one number from each rank; by hand DTensor adds it up out of sight.
    assert sent.pop("c10d.allreduce_.default") == _STEPS
    assert sent == by_hand
    ours, hand = (
        sum(count for name, count in counted[loop].items() if name.startswith("aten")) for loop in ("ours", "hand")
    )
    # Each micro-batch's loss is detached, and those of a group are added up. The norm is squared in float64 and back.
    assert ours <= hand + (2 * _ACCUMULATED - 1 + 5) * _STEPS
