"""What a rank holds, gathers and computes with, and which modules are called where."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.strategies.fsdp.sharded import Blocks, assert_trained_alike, batches, train
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import TaskError
from trainwright.core.task import TaskModule
from trainwright.strategies.fsdp.strategy import FSDPStrategy
from trainwright.strategies.shards import _split, local_shard


class Adapted(nn.Module):
    """A frozen layer beside a trained correction of rank one, whose first dimension no two ranks can share."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 7)
        self.down, self.up = nn.Linear(7, 1, bias=False), nn.Linear(1, 7, bias=False)
        self.base.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = inputs + torch.tanh(self.base(inputs) + self.up(self.down(inputs)))
        return outputs


class AdaptedBlocks(Blocks):
    """Every block is frozen but for its correction; one is frozen altogether; two units share one."""

    def __init__(self) -> None:
        super().__init__(own_units=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            self.blocks = nn.ModuleList([Adapted() for _ in range(4)])
        self.blocks[1].requires_grad_(False)
        self.blocks[3].down = self.blocks[2].down


class Sizes(Callback):
    """Counts the bytes of a rank's pieces of what training keeps."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def on_train_start(self, trainer: Any, task: Any) -> None:
        self.sizes["parameters"] = _bytes(task.parameters())

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        self.sizes["gradients"] = _bytes(p.grad for p in task.parameters() if p.grad is not None)

    def on_train_end(self, trainer: Any, task: Any) -> None:
        states = trainer.optimizers[0].state.values()
        self.sizes["states"] = _bytes(state[key] for state in states for key in ("exp_avg", "exp_avg_sq"))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = [local_shard(tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class Watcher(Sizes):
    """Counts the bytes that a rank holds where an optimizer is about to step, and looks at dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}
        self.hooks: list[Any] = []

    def on_train_start(self, trainer: Any, task: Any) -> None:
        def note(name: str, *tensors: torch.Tensor) -> None:
            self.dtypes.setdefault(name, set()).update(tensor.dtype for tensor in tensors)

        def within(module: nn.Module, inputs: Any) -> None:  # where FSDP's own hooks of the unit have run
            note("gathered", *task.blocks[1].parameters())
            note("inputs", *inputs)

        block = task.blocks[1]
        self.hooks = [
            block.norm.register_forward_pre_hook(within),
            block.register_forward_hook(lambda module, inputs, outputs: note("outputs", outputs)),
        ]
        super().on_train_start(trainer, task)

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        super().on_before_optimizer_step(trainer, task, optimizer)
        self.dtypes["gradients"] = {p.grad.dtype for p in task.parameters() if p.grad is not None}

    def on_train_end(self, trainer: Any, task: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        super().on_train_end(trainer, task)
        self.dtypes["pieces"] = {p.dtype for p in task.parameters()}
        self.hooks = []


_MEMORY: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
}
_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


def _watch(strategy: Any, task: Any, watcher: Any, **arguments: Any) -> Any:
    trainer = quiet_trainer(
        devices="auto", strategy=strategy, max_steps=1, num_sanity_val_steps=0, callbacks=[watcher], **arguments
    )
    trainer.fit(task, batches(2))
    return watcher


def _look() -> dict[Any, Any]:
    found: dict[Any, Any] = {name: _watch(FSDPStrategy(**o), Blocks(), Watcher()).sizes for name, o in _MEMORY.items()}
    found["policy"] = _watch(FSDPStrategy(mixed_precision=_POLICY), Blocks(), Watcher(), precision="bf16-mixed").dtypes
    return found | {"adapted": train(FSDPStrategy(), 2, AdaptedBlocks())}


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_distributed(_look, 2, timeout=240)


def _shard_bytes(parameters: list[torch.Tensor], num_shards: int) -> int:
    """The formula of docs/fsdp.md: the first dimension is filled up to a multiple of the number of pieces."""
    return sum(-(-p.shape[0] // num_shards) * p[0].numel() * p.element_size() for p in parameters)


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "num_shards"), [("FULL_SHARD", 2), ("NO_SHARD", 1)])
def test_a_rank_holds_the_bytes_that_the_formula_says(name: str, num_shards: int, seen: list[dict[str, Any]]) -> None:
    parameters = list(Blocks().parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for rank in seen:
        sizes = rank[name]
        assert sizes["parameters"] == _shard_bytes(parameters, num_shards)
        assert sizes["gradients"] == _shard_bytes(trained, num_shards)
    total = sum(rank[name]["states"] for rank in seen)
    assert total == (3 - num_shards) * 2 * 4 * sum(parameter.numel() for parameter in trained)


@pytest.mark.distributed
def test_mixed_precision_gathers_in_half_and_keeps_pieces_and_gradients_in_full(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        dtypes = rank["policy"]
        assert dtypes["gathered"] == dtypes["inputs"] == {torch.bfloat16}
        assert dtypes["pieces"] == dtypes["gradients"] == dtypes["outputs"] == {torch.float32}


@pytest.mark.distributed
def test_frozen_shared_and_tiny_parameters_are_clipped_and_trained_as_in_one_process(
    seen: list[dict[str, Any]],
) -> None:
    alone = train("single", 1, AdaptedBlocks())
    assert float(alone["norms"].max()) > 0.5  # something is clipped
    assert_trained_alike([rank["adapted"] for rank in seen], alone)


# Which indices of a full tensor a rank holds


def indices(runs: list[tuple[int, int]]) -> list[int]:
    return [start + i for start, length in runs for i in range(length)]


def chunk(values: list[int], num: int, which: int) -> list[int]:
    """Return what torch.chunk gives, and nothing where it gives fewer chunks."""
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
        inputs = torch.ones(2, 5)
        hidden = self.inputs(inputs)
        found = [self(inputs), hidden, self.blocks[0](hidden)]
        self.samples += [tensor.detach().float().clone() for tensor in found]

    def on_train_start(self) -> None:
        self.sample()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.sample()

    def on_validation_epoch_end(self) -> None:
        self.sample()


class Experts(TaskModule):
    """Each batch says which expert computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.spare = nn.Linear(5, 5)  # used by nobody, which is no harm
        self.units: Any = None

    def shard_units(self) -> Any:
        return self.units

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.experts[int(batch[1])](batch[0]).square().mean()
        return loss

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
