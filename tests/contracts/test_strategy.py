"""What every strategy promises: training as one device would, and checkpoints that any other can read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.contracts.documented import documented_strategy
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import SaveAtEnd, StepRecorder, assert_equal_weights, quiet_trainer, weights_of
from trainwright.checkpoint import read_checkpoint
from trainwright.core.errors import TrainwrightWarning
from trainwright.core.task import TaskModule
from trainwright.strategies.fsdp.strategy import FSDPStrategy
from trainwright.strategies.fsdp.tensor_parallel import TensorParallelStrategy
from trainwright.strategies.megatron.strategy import MegatronStrategy
from trainwright.strategies.offload.training import OffloadStrategy

# name → (the Trainer's argument, or what makes it, processes); a further strategy is one line
STRATEGIES: dict[str, tuple[str | Callable[[], Any], int]] = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 2),
    "zero1": ("deepspeed_stage_1", 2),
    "zero2": ("deepspeed_stage_2", 2),
    "zero3": ("deepspeed_stage_3", 2),
    "documented": (documented_strategy, 2),
    "offload": (lambda: OffloadStrategy("disk", "disk", min_num_params=1, stream=True), 1),
    "tp": ("tp", 2),
    "pp": (lambda: MegatronStrategy(pp=2), 2),
    "hsdp": (lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 1)), 2),
    "ddp_4": ("ddp", 4),
    "fsdp_4": ("fsdp", 4),
    "hsdp_4": (lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)), 4),
    "tp_4": (lambda: TensorParallelStrategy(tp=4), 4),
    "fsdp_tp_4": (lambda: FSDPStrategy(tp=2), 4),
    "pp_4": (lambda: MegatronStrategy(pp=2, dp_shard=2), 4),
    "pp_tp_4": (lambda: MegatronStrategy(pp=2, tp=2), 4),
    "zero1_4": ("deepspeed_stage_1", 4),
    "zero2_4": ("deepspeed_stage_2", 4),
    "zero3_4": ("deepspeed_stage_3", 4),
}
# where several processes see the same data
_DATA_RANKS = {"tp": 1, "tp_4": 1, "fsdp_tp_4": 2, "pp": 1, "pp_4": 2, "pp_tp_4": 1}

NAMES = list(STRATEGIES)
_FOUR = [name for name in NAMES if STRATEGIES[name][1] == 4]
_UP_TO_TWO = [name for name in NAMES if name not in _FOUR]
# Every strategy reads every other's checkpoint on as many processes, and on more or fewer its own and one in pieces.
PAIRS = [
    *itertools.permutations(_UP_TO_TWO, 2),
    *itertools.permutations([*_FOUR, "single"], 2),
    *((reader, f"{reader}_4") for reader in _UP_TO_TWO if f"{reader}_4" in _FOUR),
    *((f"{writer}_4", writer) for writer in _UP_TO_TWO if f"{writer}_4" in _FOUR),
    *((reader, "fsdp_tp_4") for reader in _UP_TO_TWO if reader != "single"),
]


# Pairs of two sharded strategies that `make test` keeps; the other pairs without "single" are exhaustive.
_KEPT_PAIRS = {*itertools.permutations(("fsdp", "zero3")), *itertools.permutations(("fsdp", "pp"))}
_KEPT_PAIRS |= {("tp", "fsdp"), ("fsdp", "fsdp_tp_4")}


def _is_kept(reader: str, writer: str) -> bool:
    """Return whether `make test` lets `reader` continue a checkpoint of `writer`."""
    if {reader, writer} & set(_FOUR) - {"fsdp_tp_4"}:
        return False
    return reader == writer or "single" in (reader, writer) or (reader, writer) in _KEPT_PAIRS


def _group(reader: str, writer: str) -> str:
    """Return which checkpoints a reader continues in the same processes as that of `writer`."""
    return "kept" if _is_kept(reader, writer) else "of four" if writer in _FOUR else "of up to two"


def _marked(names: str | tuple[str, str]) -> Any:
    """Return the parameters of a test, marked as slow if one of them takes four processes, and as exhaustive."""
    names = (names,) if isinstance(names, str) else names
    marks = [pytest.mark.slow] if set(names) & set(_FOUR) else []
    kept = _is_kept(names[0], names[-1])
    return pytest.param(*names, marks=marks if kept else [*marks, pytest.mark.exhaustive])


ALL = [_marked(name) for name in NAMES]
OTHERS = [_marked(name) for name in NAMES if name != "single"]

_ITEMS = [3, 1, 2, 4, 1, 3, 2, 2, 4, 1, 1, 3, 2, 4, 3, 1]  # of the 16 micro-batches of an epoch
_ACCUMULATE = 4  # micro-batches in one step, over all ranks
_EPOCHS = 4
_HALF = 2


def micro_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return micro-batches with unequal numbers of items, (items, 4) and (items, 1)."""
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(count, 4, generator=generator) for count in _ITEMS]
    return [(x, torch.sin(x.sum(dim=1, keepdim=True))) for x in inputs]


class ContractTask(TaskModule):
    """Weighs by items; its optimizer, schedule and buffer all have a state."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.net = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        self.calls += 1
        return functional.mse_loss(self.net(inputs), targets)

    def num_items(self, batch: Any) -> int:
        return len(batch[0])

    def tensor_parallel_plan(self, mesh: Any) -> dict[str, Any]:
        return {"net.0": "colwise", "net.2": "rowwise"}

    def configure_optimizers(self) -> Any:
        """Return AdamW with decay on the weights only, and a schedule by steps."""
        weights = [p for p in self.net.parameters() if p.dim() > 1]
        biases = [p for p in self.net.parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.02)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(
    name: str, epochs: int = _EPOCHS, *, ckpt_path: Path | None = None, save_to: Path | None = None
) -> tuple[StepRecorder, dict[str, torch.Tensor]]:
    """Train on this process's rank; the losses are this rank's shares."""
    strategy, processes = STRATEGIES[name]
    recorder, task = StepRecorder(), ContractTask()
    trainer = quiet_trainer(
        devices="auto" if processes > 1 else 1,
        strategy=strategy if isinstance(strategy, str) else strategy(),
        max_epochs=epochs,
        accumulate_grad_batches=_ACCUMULATE // _DATA_RANKS.get(name, processes),
        gradient_clip_val=0.3,
        callbacks=[recorder] if save_to is None else [recorder, SaveAtEnd(save_to)],
    )
    trainer.fit(task, micro_batches(), ckpt_path=ckpt_path)
    # Where this rank does not see all gradients there is the engine's word alone.
    if trainer.strategy.capabilities.gradients == "hidden" or name.startswith("pp"):
        recorder.norms = [float("nan") if norm is None else norm for norm in recorder.reported]
    return recorder, weights_of(task)


Result = tuple[list[float], list[float], dict[str, torch.Tensor]]


def run(name: str, *each: dict[str, Any]) -> list[Result]:
    """Train under a strategy in as many processes as it takes, once with each of some options for `train`.

    All runs are in the same processes. Returns the mean losses, the norms and the weights of each.
    """
    _, processes = STRATEGIES[name]
    if processes == 1:
        alone = [train(name, **options) for options in each]
        return [(recorder.losses, recorder.norms, weights) for recorder, weights in alone]
    by_rank = run_distributed(
        lambda: [train(name, **options) for options in each], processes, timeout=120 + 40 * len(each)
    )
    return [_of_ranks(found, processes) for found in zip(*by_rank, strict=True)]


def _of_ranks(by_rank: Any, processes: int) -> Result:
    recorders = [recorder for recorder, _ in by_rank]
    losses = [sum(shares) / processes for shares in zip(*(r.losses for r in recorders), strict=True)]
    for recorder, weights in by_rank[1:]:
        assert recorder.norms == recorders[0].norms
        assert_equal_weights(
            {k: v for k, v in weights.items() if k != "calls"}, {k: v for k, v in by_rank[0][1].items() if k != "calls"}
        )
    return losses, recorders[0].norms, by_rank[0][1]


def assert_like(found: Any, wanted: Any) -> None:
    """Compare losses, norms and parameters to what summing in another order allows."""
    assert found[0] == pytest.approx(wanted[0], abs=1e-6)
    assert found[1] == pytest.approx(wanted[1], abs=1e-6)
    torch.testing.assert_close(_parameters(found[2]), _parameters(wanted[2]), rtol=0, atol=1e-5)


def _parameters(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if name != "calls"}  # it counts one rank's calls


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint after half of the epochs, by each strategy; and what the whole run did."""
    folder = tmp_path_factory.mktemp("contract")
    return {name: folder / name for name in NAMES}


class WhenAsked(dict[Any, Any]):
    """What `make` gives for a name, made when it is first asked for: no test pays for all of them."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: Any) -> Any:
        self[name] = self.make(name)
        return self[name]


@pytest.fixture(scope="module")
def runs(checkpoints: dict[str, Path]) -> dict[str, list[Result]]:
    """What each strategy's uninterrupted run gave, and the first half of it, after which its checkpoint is written."""
    return WhenAsked(lambda name: run(name, {}, {"epochs": _HALF, "save_to": checkpoints[name]}))


def by_hand() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The same in plain PyTorch: each step is the mean over the items of its four micro-batches."""
    task = ContractTask()
    made = task.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    losses, norms = [], []
    for _ in range(_EPOCHS):
        for start in range(0, len(_ITEMS), _ACCUMULATE):
            group = micro_batches()[start : start + _ACCUMULATE]
            inputs, targets = (torch.cat(parts) for parts in zip(*group, strict=True))
            optimizer.zero_grad()
            loss = functional.mse_loss(task.net(inputs), targets)
            loss.backward()
            losses.append(float(loss.detach()))
            norms.append(float(nn.utils.clip_grad_norm_(task.parameters(), 0.3)))
            optimizer.step()
            schedule.step()
    return losses, norms, weights_of(task)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ALL)
def test_losses_norms_and_parameters_are_those_of_plain_pytorch(name: str, runs: dict[str, Any]) -> None:
    expected = by_hand()
    assert max(expected[1]) > 0.3  # something is clipped
    assert_like(runs[name][0], expected)


@pytest.fixture(scope="module")
def continued(runs: dict[str, Any], checkpoints: dict[str, Path]) -> dict[tuple[str, str], dict[str, Result]]:
    """What each reader makes of its own and others' checkpoints, by the reader and the writer's group."""

    def read(key: tuple[str, str]) -> dict[str, Result]:
        reader, group = key
        pairs = [(reader, w) for w in NAMES if w == reader or (reader, w) in PAIRS]
        writers = [w for _, w in pairs if _group(reader, w) == group and runs[w]]
        return dict(zip(writers, run(reader, *({"ckpt_path": checkpoints[w]} for w in writers)), strict=True))

    return WhenAsked(read)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore:.*random number generators start from scratch:UserWarning")
def test_saving_loading_and_continuing_equals_the_uninterrupted_run(
    name: str, continued: dict[Any, Any], runs: dict[str, Any]
) -> None:
    whole, first = runs[name]
    losses, norms, weights = continued[name, _group(name, name)][name]
    assert first[0] + losses == whole[0]
    assert first[1] + norms == whole[1]
    assert_equal_weights(weights, whole[2])


@pytest.mark.distributed
@pytest.mark.parametrize(("reader", "writer"), [_marked(pair) for pair in PAIRS])
@pytest.mark.filterwarnings("ignore:.*random number generators start from scratch:UserWarning")
def test_a_checkpoint_of_one_strategy_continues_under_another(
    reader: str, writer: str, continued: dict[Any, Any], runs: dict[str, Any]
) -> None:
    losses, norms, weights = continued[reader, _group(reader, writer)][writer]
    first = runs[writer][1]
    assert_like((first[0] + losses, first[1] + norms, weights), runs["single"][0])


@pytest.mark.distributed
@pytest.mark.parametrize("name", OTHERS)
def test_every_strategy_writes_the_same_names_shapes_and_optimizer_state(
    name: str, runs: dict[str, Any], checkpoints: dict[str, Path]
) -> None:
    assert runs["single"]
    assert runs[name]
    single, other = (read_checkpoint(checkpoints[n]) for n in ("single", name))
    assert {k: (v.shape, v.dtype) for k, v in (single.model or {}).items()} == {
        k: (v.shape, v.dtype) for k, v in (other.model or {}).items()
    }
    ours, theirs = single.optimizers[0]["state"], other.optimizers[0]["state"]
    assert set(ours) == set(theirs) == {n for n, _ in ContractTask().named_parameters()}
    for parameter, state in ours.items():
        for key, value in state.items():
            torch.testing.assert_close(theirs[parameter][key], value, rtol=0, atol=1e-5)
    # Batches are counted on one rank; the samples of ragged batches are estimated from one rank.
    skipped = ("seconds", "batches", "batch_in_epoch", "samples", "samples_in_epoch")
    assert {k: v for k, v in single.state.items() if k not in skipped} == {
        k: v for k, v in other.state.items() if k not in skipped
    }


@pytest.mark.distributed
def test_another_number_of_processes_says_that_generators_start_anew(
    runs: dict[str, Any], checkpoints: dict[str, Path]
) -> None:
    assert runs["ddp"]
    with pytest.warns(TrainwrightWarning, match="written by 2 process"):
        run("single", {"ckpt_path": checkpoints["ddp"]})
