"""What a rank holds, gathers and computes with, and which modules are called where."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.strategies.fsdp.sharded import Blocks, assert_trained_alike, batches, train
from trainwright.core.errors import TaskError
from trainwright.core.task import TaskModule
from trainwright.strategies.fsdp.strategy import FSDPStrategy
from trainwright.strategies.shards import _split


def indices(runs: list[tuple[int, int]]) -> list[int]:
    return [start + i for start, length in runs for i in range(length)]


def chunk(values: list[int], num: int, which: int) -> list[int]:
    chunks = torch.tensor(values, dtype=torch.int64).chunk(num) if values else ()
    return [int(value) for value in chunks[which]] if which < len(chunks) else []


_RANKS = st.integers(1, 4)


@given(st.integers(1, 5), st.integers(1, 3), _RANKS, _RANKS)
def test_what_ranks_hold_of_blocks_is_cut_as_torch_cuts_and_covers_the_whole_once(
    width: int, blocks: int, split: int, shards: int
) -> None:
    size = width * blocks * split  # only what is divisible is split by a plan; shards may be of unequal length
    whole = list(range(size))
    seen: list[int] = []
    for rank in range(split):
        runs = _split([(0, size)], blocks, split, rank)
        expected = [i for block in range(blocks) for i in chunk(chunk(whole, blocks, block), split, rank)]
        assert indices(runs) == expected
        for shard in range(shards):
            held = indices(_split(runs, 1, shards, shard))
            assert held == chunk(expected, shards, shard)
            seen += held
    assert sorted(seen) == whole


pytestmark = pytest.mark.distributed


class Sampling(Blocks):
    """Calls itself, and its parts, in hooks: before the first step, between steps and after an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[torch.Tensor] = []

    def sample(self) -> None:
        inputs, kind = torch.ones(2, 5), type(self.inputs.weight)
        hidden = self.inputs(inputs)
        found = [self.blocks[0](hidden.float()), hidden, self(inputs)]  # a part before the whole
        self.samples += [tensor.detach().clone() for tensor in found]
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            self.inputs(torch.ones(2, 4))
        assert type(self.inputs.weight) is kind  # sharded again

    def on_train_start(self) -> None:
        self.sample()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.sample()

    def on_validation_epoch_end(self) -> None:
        self.sample()


class Experts(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.spare = nn.Linear(5, 5)  # used by nobody, which is no harm
        self.units: Any = None

    def shard_units(self) -> Any:
        return self.units

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.experts[int(batch[1])](batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _chosen(*experts: int) -> list[Any]:
    return [(torch.ones(2, 5), torch.tensor(expert)) for expert in experts]


def _error(experts: list[int], *, own_units: bool) -> tuple[str, int]:
    task = Experts()
    task.units = task.experts if own_units else None
    trainer = quiet_trainer(devices="auto", strategy=FSDPStrategy(), max_epochs=1)
    with pytest.raises(TaskError) as failed:
        trainer.fit(task, _chosen(*experts))
    return str(failed.value), trainer.global_step


def _try_all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    task = Sampling()
    found["sampled"] = train(FSDPStrategy(), 2, task) | {"samples": task.samples}
    task = Sampling()
    quiet_trainer(devices="auto", strategy=FSDPStrategy(), max_steps=1, precision="bf16-mixed").fit(task, batches(2))
    found["mixed"] = task.samples[1].dtype
    found["parts"] = _error([0, 1], own_units=False)
    found["units"] = _error([0, 1], own_units=True)
    task = Experts()
    trainer = quiet_trainer(devices="auto", strategy=FSDPStrategy(), max_epochs=1)
    trainer.fit(task, _chosen(0, 0, 1, 1))
    gc.collect()
    ours = {id(parameter) for parameter in trainer.optimizers[0].param_groups[0]["params"]}
    found["kept"] = [
        tuple(tensor.shape)
        for tensor in gc.get_objects()
        if isinstance(tensor, DTensor) and tensor.requires_grad and id(tensor) not in ours
    ]
    return found


@pytest.fixture(scope="module")
def tried() -> list[dict[str, Any]]:
    return run_distributed(_try_all, 2, timeout=120, init=False)


def test_a_task_and_its_parts_can_be_called_in_hooks(tried: list[dict[str, Any]]) -> None:
    task = Sampling()
    alone = train("single", 1, task)
    for found in tried:
        samples = found["sampled"]["samples"]
        # One process has micro-batch 1 in the first of two steps; two ranks end theirs with it.
        torch.testing.assert_close(samples[:3], task.samples[:3], rtol=0, atol=1e-6)
        torch.testing.assert_close(samples[-3:], task.samples[-3:], rtol=0, atol=1e-5)
        assert not any(sample.requires_grad for sample in samples)
        assert found["mixed"] is torch.bfloat16
    assert_trained_alike([found["sampled"] for found in tried], alone)


def test_a_trainer_that_is_kept_after_a_fit_keeps_no_pieces(tried: list[dict[str, Any]]) -> None:
    assert [found["kept"] for found in tried] == [[], []]


@pytest.mark.parametrize("name", ["parts", "units"])
def test_other_parameters_on_one_rank_than_on_another_are_an_error_before_the_step(
    name: str, tried: list[dict[str, Any]]
) -> None:
    for found in tried:
        message, steps = found[name]
        assert "rank 1 used experts.1.weight, and rank 0 did not" in message
        assert steps == 0
