"""Layers split over ranks: they train as one process would, on the data of one, and are whole again afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import StepRecorder, quiet_trainer, weights_of
from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.fsdp.layers.known_models import check_plan
from trainwright.strategies.fsdp.layers.styles import LossParallel
from trainwright.strategies.fsdp.strategy import FSDPStrategy
from trainwright.strategies.fsdp.tensor_parallel import ModelParallelStrategy, TensorParallelStrategy
from trainwright.strategies.precision_names import parse_precision

_VOCABULARY, _LENGTH, _WIDTH = 24, 8, 16


class Attention(nn.Module):
    """Causal attention with queries, keys and values in one layer; (batch, length, width) → the same."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.head_width = _WIDTH // heads
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        query, key, value = self.qkv(x).view(batch, length, 3, -1, self.head_width).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attention = Attention(heads)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm_1(x)))
        return x + self.mlp(self.norm_2(x))


_PLAN: dict[str, Any] = {
    "tokens": "embedding",
    "blocks.*.attention.qkv": "fused_colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.0": "colwise",
    "blocks.*.mlp.2": "rowwise",
    "head": "colwise_gathered",
}
_SEQUENCE_PLAN: dict[str, Any] = {
    **_PLAN,
    "blocks.0": "split_sequence",
    "blocks.*.norm_1": "sequence",
    "blocks.*.norm_2": "sequence",
    "blocks.*.attention": "gather_sequence",
    "blocks.*.mlp": "gather_sequence",
    "blocks.*.attention.out": "rowwise_to_sequence",
    "blocks.*.mlp.2": "rowwise_to_sequence",
    "norm": ["sequence"],
    "head": LossParallel(input_layouts=Shard(1)),
}
_LOSS_PLAN = {**_PLAN, "head": "loss"}


class Gpt(TaskModule):
    """A small language model whose embedding and head are one weight; its first norm is frozen."""

    def __init__(self, plan: Any = None, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.plan = _PLAN if plan is None else plan
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
            self.places = nn.Embedding(_LENGTH, _WIDTH)
            self.blocks = nn.ModuleList([Block(heads, dropout)])
            self.norm = nn.LayerNorm(_WIDTH)
            self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks[0].norm_1.requires_grad_(False)
        self.total = SumMetric()
        self.seen: list[int] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (ids,) = batch
        self.seen += ids[:, 0].tolist()
        loss = self.loss(ids)
        self.log("loss", loss)
        self.log("rows", float(len(ids)), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def num_items(self, batch: Any) -> int:
        return len(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]), batch_size=len(batch[0]))
        self.total.update(batch[0].float().sum())
        self.log("total", self.total)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits: torch.Tensor = self(batch[0][:, :-1])
        return logits[:, -1]

    def shard_units(self) -> Any:
        return self.blocks

    def tensor_parallel_plan(self, mesh: Any) -> Any:
        assert mesh["tp"].size() > 1
        return self.plan

    def configure_optimizers(self) -> Any:
        """Return AdamW over what is not frozen; a key's bias has no gradient but noise, which `eps` drowns."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02, eps=1e-3)


def rows(num: int) -> torch.Tensor:
    """Return `num` rows of tokens; the first of each is its number."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(_VOCABULARY, (num, _LENGTH + 1), generator=generator)
    ids[:, 0] = torch.arange(num)
    return ids


def train(
    strategy: Any, dp_size: int = 1, task: Gpt | None = None, ckpt_path: Path | None = None, **arguments: Any
) -> dict[str, Any]:
    """Train on 12 rows in steps of 8, validate and predict; return what can be compared."""
    torch.manual_seed(1)  # of the data's order
    recorder, task = StepRecorder(), task or Gpt()
    settings = {"gradient_clip_val": 0.1, "max_epochs": 1, "accumulate_grad_batches": 2, **arguments}
    callbacks = [recorder, *settings.pop("callbacks", [])]
    trainer = quiet_trainer(
        devices="auto" if strategy != "single" else 1,
        strategy=strategy,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        **settings,
    )
    loaders = [DataLoader(TensorDataset(rows(num)), batch_size=4 // dp_size, shuffle=num == 12) for num in (12, 5)]
    trainer.fit(task, *loaders, ckpt_path=ckpt_path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "loss"}
    found = {
        "losses": torch.tensor(recorder.losses), "norms": torch.tensor(recorder.norms), "weights": weights_of(task),
        "metrics": metrics, "reported": torch.tensor([n or 0.0 for n in recorder.reported]), "seen": task.seen,
        "samples": trainer.state.samples, "hooks": sum(len(m._forward_pre_hooks) for m in task.modules()),
        "tied": task.head.weight is task.tokens.weight,
    }  # fmt: skip
    predicted = trainer.predict(task, loaders[1])
    return {**found, "predicted": torch.cat(predicted or [])}


def assert_trained_alike(by_rank: list[dict[str, Any]], alone: dict[str, Any], dp_size: int, atol: float) -> None:
    """Compare everything with one process; ranks next to each other share their data."""
    tp = len(by_rank) // dp_size
    losses = torch.stack([found["losses"] for found in by_rank[::tp]]).mean(0)
    torch.testing.assert_close(losses, alone["losses"], rtol=0, atol=atol)
    assert sorted(row for found in by_rank[::tp] for row in found["seen"]) == sorted(alone["seen"])
    for rank, found in enumerate(by_rank):
        assert found["seen"] == by_rank[rank - rank % tp]["seen"]
        torch.testing.assert_close(found["norms"], alone["norms"], rtol=0, atol=10 * atol)
        torch.testing.assert_close(found["reported"], alone["reported"], rtol=0, atol=10 * atol)
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=0, atol=10 * atol)
        torch.testing.assert_close(found["predicted"], alone["predicted"], rtol=0, atol=100 * atol)
        assert found["metrics"] == pytest.approx(alone["metrics"], abs=10 * atol)
        assert found["samples"] == alone["samples"]
        assert found["tied"]
        assert found["hooks"] == 0


_PLANS = {"layers": _PLAN, "sequence": _SEQUENCE_PLAN, "loss": _LOSS_PLAN}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train("single")


def _train_all() -> dict[str, Any]:
    found = {name: train("tp", task=Gpt(plan)) for name, plan in _PLANS.items()}
    return found | {"one data rank": train(FSDPStrategy(tp=2)), "dropout": train("tp", task=Gpt(dropout=0.2))}


@pytest.fixture(scope="module")
def split() -> list[dict[str, Any]]:
    return run_distributed(_train_all, 2, init=False, timeout=300)


@pytest.mark.distributed
@pytest.mark.parametrize("plan", [*_PLANS, "one data rank"])
def test_a_split_model_trains_evaluates_and_predicts_as_one_process_does(
    plan: str, split: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert alone["norms"].max() > 0.1  # something is clipped
    assert_trained_alike([found[plan] for found in split], alone, 1, 1e-5)


@pytest.mark.distributed
def test_ranks_draw_the_same_numbers(split: list[dict[str, Any]]) -> None:
    first, second = (found["dropout"] for found in split)
    torch.testing.assert_close(first["losses"], second["losses"], rtol=0, atol=0)
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)


def lengths(strategy: Any, processes: int, num_nodes: int = 1) -> tuple[int, int, int]:
    settings = EngineSettings("cpu", list(range(processes)), num_nodes, parse_precision("32-true"))
    strategy.check(settings)
    shape = strategy.mesh_shape(settings)
    return shape.dp_replicate, shape.dp_shard, shape.tp


@pytest.mark.parametrize(
    ("make", "processes", "text"),
    [
        (lambda: FSDPStrategy(tp=3), 4, r"does not divide the run's 4 process\(es\). Use tp=1 or 2 or 4, or 6 proc"),
        (lambda: FSDPStrategy(tp=2, device_mesh=(1, 4)), 4, r"2 group\(s\) of tp=2 .* Use device_mesh=\(1, 2\)"),
        (lambda: TensorParallelStrategy(tp=2), 4, r"Use tp=4, or FSDPStrategy\(tp=2\)"),
        (lambda: TensorParallelStrategy(tp=3), 2, r"tp=3 with 2 process\(es\).*Use tp=2\."),
    ],
)
def test_sizes_that_do_not_make_up_the_run_are_refused_with_those_that_would(
    make: Any, processes: int, text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        lengths(make(), processes)


@pytest.mark.parametrize(
    ("sizes", "processes", "num_nodes", "tp"),
    [(("auto", 2), 4, 1, 2), ((4, "auto"), 8, 1, 2), (("auto", "auto"), 4, 2, 4)],
)
def test_lightnings_sizes_say_over_how_many_ranks_layers_are_split(
    sizes: Any, processes: int, num_nodes: int, tp: int
) -> None:
    assert lengths(ModelParallelStrategy(*sizes), processes, num_nodes)[-1] == tp


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(rows(4)), batch_size=4)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            {"blocks.*.attention.ou": "rowwise"},
            r"'blocks.*.attention.ou', which matches no module.*Did you mean 'blocks.\*.attention.out'",
        ),
        ({"head": "colwize"}, "style 'colwize', which is unknown. Did you mean 'colwise'"),
        ({"norm": "colwise"}, "splits norm with ColwiseParallel, which does not support LayerNorm"),
        ({"odd": "colwise"}, r"odd: its width 9 is not divisible by tp=2. Use a width that is a multiple of 2 \(10\)"),
        ({"odd": "rowwise"}, "odd: its width 15"),
        ({"blocks.0.attention.out": "fused_colwise"}, "its width 16 of 3 blocks is not divisible by tp=2"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_a_process_starts(plan: Any, text: str) -> None:
    task = Gpt(plan)
    task.odd = nn.Linear(15, 9)
    before = {name: id(p) for name, p in task.named_parameters()}
    with pytest.raises(ConfigurationError, match=text):
        quiet_trainer(devices=2, strategy="tp", max_epochs=1).fit(task, _loader())
    assert {name: id(p) for name, p in task.named_parameters()} == before


class _NoPlan(Gpt):
    def tensor_parallel_plan(self, mesh: Any) -> Any:
        return None


class _EarlyOptimizer(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.optimizer


def _refusals() -> list[str]:
    found = []
    tasks = [_NoPlan(), _EarlyOptimizer(), Gpt({"tokens": "embedding"}), Gpt({**_PLAN, "head": "rowwise"})]
    for task in tasks:
        trainer = quiet_trainer(devices="auto", strategy="tp", max_epochs=1)
        with pytest.raises(ConfigurationError) as caught:
            trainer.fit(task, _loader())
        found.append(str(caught.value))
    return found


@pytest.mark.distributed
def test_a_missing_plan_an_early_optimizer_and_ties_that_part_are_refused() -> None:
    for no_plan, early, half_tied, parted in run_distributed(_refusals, 2, init=False, timeout=120):
        assert "needs a tensor-parallel plan for _NoPlan" in no_plan
        assert "Build the optimizer in configure_optimizers" in early
        for text in (half_tied, parted):
            assert "tokens.weight and head.weight are one tied weight" in text


def test_lightnings_sizes_that_do_not_make_up_the_run_are_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"does not equal the run's 4 process\(es\). Use 1 × 4 or 2 × 2 or 4 × 1"
    ):
        lengths(ModelParallelStrategy(3, 2), 4)
    with pytest.raises(ConfigurationError, match="data_parallel_size=0: use a number of ranks"):
        ModelParallelStrategy(0)


class _AsksForRanks(Gpt):
    def tensor_parallel_plan(self, mesh: Any) -> Any:
        return {"nowhere": "colwise"} if mesh["tp"].get_local_rank() else {}


class _AsksForTwoAxes(Gpt):
    def tensor_parallel_plan(self, mesh: Any) -> Any:
        return {"nowhere": "colwise"} if mesh["dp_shard", "tp"].ndim else {}


class _Broken(Gpt):
    def tensor_parallel_plan(self, mesh: Any) -> Any:
        return self.no_such_thing


def test_a_plan_that_asks_for_ranks_is_left_until_there_are_some() -> None:
    for task in (_AsksForRanks(), _AsksForTwoAxes()):
        check_plan(task, None, {"dp_replicate": 1, "dp_shard": 1, "tp": 2})
    with pytest.raises(AttributeError, match="no_such_thing"):
        check_plan(_Broken(), None, {"dp_replicate": 1, "dp_shard": 1, "tp": 2})
