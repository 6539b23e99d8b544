"""What a sharded step costs: communication, and what activation checkpointing recomputes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.data import DataLoader

from tests.helpers.calls import Operators
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer, weights_of
from tests.strategies.fsdp.sharded import Blocks, batches
from trainwright.callbacks.callback import Callback
from trainwright.strategies.fsdp.strategy import FSDPStrategy

_FIRST, _LAST = 3, 6  # the steps that are counted: caches are warm, and none of them is a run's last
_STEPS = _LAST - _FIRST + 1
_ACCUMULATED = 3


class Counting(Callback):
    def __init__(self, counter: Any) -> None:
        self.counter = counter

    def on_train_step_start(self, trainer: Any, task: Any, group: Any) -> None:
        if trainer.global_step == _FIRST:
            self.counter.__enter__()

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.global_step == _LAST + 1:
            self.counter.__exit__(None, None, None)


def _count() -> Counter[str]:
    counter = Operators()
    options = {"accumulate_grad_batches": _ACCUMULATED, "gradient_clip_val": 0.1, "use_distributed_sampler": False}
    trainer = quiet_trainer(devices="auto", strategy="fsdp", max_epochs=1, callbacks=[Counting(counter)], **options)
    data: Any = batches(_ACCUMULATED * (_LAST + 2))
    trainer.fit(Blocks(), DataLoader(data, batch_size=None))
    return counter.counts


@pytest.mark.distributed
def test_gradients_of_a_sharded_model_cross_ranks_once_a_step() -> None:
    counts = run_distributed(_count, 2, timeout=240)[0]
    averaged = sum(count for name, count in counts.items() if name.startswith("c10d") and "reduce_scatter" in name)
    assert averaged == 4 * _STEPS  # four units


class OpsInBackward(Operators, Callback):
    """Counts the operators of a backward pass: of an affine map's own there is none."""

    def on_before_backward(self, trainer: Any, task: Any, loss: Any) -> None:
        self.__enter__()

    def on_after_backward(self, trainer: Any, task: Any) -> None:
        self.__exit__(None, None, None)


class Counted(Blocks):
    """Knows how often each of its blocks was called while it trained, and whether with a cache of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0, 0, 0]
        self.config = SimpleNamespace(use_cache=True)
        for i, block in enumerate(self.blocks):
            block.mix.register_forward_pre_hook(lambda *_, i=i: self._count(i))

    def _count(self, i: int) -> None:
        self.calls[i] += 1

    def forward(self, inputs: torch.Tensor, use_cache: bool = True) -> torch.Tensor:
        self.uses_cache = use_cache
        return super().forward(inputs)


def keep_affine_maps(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_ALL: dict[str, Any] = {"activation_checkpointing": True}
_SAVE = "activation_checkpointing_save"
# name → options, how often each block runs, and how many affine maps and tanh run in backward
_VARIANTS: dict[str, tuple[dict[str, Any], list[int], tuple[int, int]]] = {
    "kept": ({}, [1, 1, 1], (0, 0)),
    "all": (_ALL, [2, 2, 2], (3, 3)),
    "every second": ({"activation_checkpointing": 2}, [1, 2, 1], (1, 1)),
    # What is recomputed stops at what backward needs, which is the input of a layer here.
    "a class": ({"activation_checkpointing_policy": {nn.LayerNorm, nn.Linear}}, [2, 2, 2], (0, 0)),
    "all but named operators": (_ALL | {_SAVE: ["aten.addmm"]}, [2, 2, 2], (0, 3)),
    "all but operators": (_ALL | {_SAVE: {torch.ops.aten.tanh, torch.ops.aten.addmm}}, [2, 2, 2], (0, 0)),
    "all but what a function says": (_ALL | {_SAVE: keep_affine_maps}, [2, 2, 2], (0, 3)),
}


def _train_in_all_variants() -> dict[str, tuple[list[int], Counter[str], dict[str, torch.Tensor], bool]]:
    found = {}
    for name, (options, _, _) in _VARIANTS.items():
        task, ops = Counted(), OpsInBackward()
        trainer = quiet_trainer(
            devices="auto", strategy=FSDPStrategy(**options), max_steps=1, callbacks=[ops], num_sanity_val_steps=0
        )
        trainer.fit(task, batches(2))
        found[name] = (task.calls, ops.counts, weights_of(task), task.uses_cache)
    return found


@pytest.fixture(scope="module")
def variants() -> dict[str, Any]:
    """One step of one micro-batch on each of two ranks; rank 0's calls, operators and weights."""
    by_rank: list[dict[str, Any]] = run_distributed(_train_in_all_variants, 2, timeout=120)
    return by_rank[0]


@pytest.mark.distributed
@pytest.mark.parametrize("name", _VARIANTS)
def test_what_is_computed_anew_is_what_was_asked_for_and_trains_to_the_same_bits(
    name: str, variants: dict[str, Any]
) -> None:
    (_, expected_calls, in_backward), (calls, counts, weights, uses_cache) = _VARIANTS[name], variants[name]
    assert calls == expected_calls
    assert uses_cache == (name == "kept")  # what runs again would append to it again
    assert (counts["aten.addmm.default"], counts["aten.tanh.default"]) == in_backward
    torch.testing.assert_close(weights, variants["kept"][2], rtol=0, atol=0)
