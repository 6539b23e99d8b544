"""In which dtype everything is kept, computed, sent and saved: what docs/precision.md says, read from real steps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import ALL_GATHER, REDUCE_SCATTER, quiet_trainer
from tests.helpers.selection import mostly_exhaustive
from tests.helpers.sources import ROOT
from trainwright.callbacks.callback import Callback
from trainwright.checkpoint import read_checkpoint
from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule
from trainwright.strategies import STRATEGIES, DDPStrategy
from trainwright.strategies.shards import local_shard

_HEAD = ["strategy", "precision", "stored", "used", "product", "norm", "loss", "crosses", "gradient", "state", "saved"]
_PROCESSES = {
    "single": 1,
    "ddp": 2,
    "fsdp": 2,
    "fsdp_cpu_offload": 2,
    "tp": 2,
    "deepspeed_stage_1": 2,
    "deepspeed_stage_3": 2,
}
_NOT_ON_THE_CPU = ("64-true", "16-true", "16-mixed")  # with DeepSpeed


def documented() -> dict[str, dict[str, dict[str, str]]]:
    """Return the page's table: strategy → precision → column → dtype."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for line in (ROOT / "docs" / "precision.md").read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if len(cells) == len(_HEAD) and not re.fullmatch(r"-+", cells[0]) and cells[0] != "strategy":
            row = dict(zip(_HEAD, cells, strict=True))
            found.setdefault(row["strategy"], {})[row["precision"]] = row
    return found


TABLE = documented()


class Probe(TaskModule):
    """Notes the dtypes that its forward meets."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 1)
        self.seen: dict[str, torch.dtype] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return a loss so small that no scale overflows it."""
        hidden = self.block(batch[0])
        product = self.head(hidden)
        loss = nn.functional.mse_loss(product, batch[1])
        self.seen |= {"input": batch[0].dtype, "norm": hidden.dtype, "product": product.dtype, "loss": loss.dtype}
        self.seen["used"] = self.head.weight.dtype
        return 1e-3 * loss

    def shard_units(self) -> Any:
        return [self.block]

    def tensor_parallel_plan(self, mesh: Any) -> Any:
        return {"block.0": "colwise_gathered", "head": RowwiseParallel(input_layouts=Replicate())}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Dtypes(Callback):
    """Notes the dtypes of what is kept between steps, and of what crosses ranks in them (see `watch_exchanges`)."""

    def __init__(self, crossing: dict[str, set[torch.dtype]], checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.seen: dict[str, torch.dtype] = {}
        self.crossing = crossing
        self.reduced: set[torch.dtype] = set()
        self.gathered: set[torch.dtype] = set()

    def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        for dtypes in self.crossing.values():
            dtypes.clear()  # of what others have asked for

    def on_after_backward(self, trainer: Any, task: Any) -> None:
        self.reduced |= self.crossing["reduced"]

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        if trainer.strategy.capabilities.gradients == "hidden":
            self.seen["gradient"] = only({g.dtype for g in trainer.strategy.state.full_gradients().values()})
        else:
            self.seen["gradient"] = only({local_shard(p.grad).dtype for p in task.parameters()})

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        self.gathered |= self.crossing["gathered"]
        if trainer.strategy.capabilities.gradients == "hidden":
            self.seen["stored"] = only({p.dtype for p in trainer.optimizers[0].state})  # the vectors that it steps
        else:
            self.seen["stored"] = only({local_shard(p).dtype for p in task.parameters()})
        states = trainer.optimizers[0].state.values()
        self.seen["state"] = only({local_shard(value).dtype for state in states for value in state.values()})

    def on_train_end(self, trainer: Any, task: Any) -> None:
        trainer.save_checkpoint(self.checkpoint)


def only(dtypes: set[torch.dtype]) -> torch.dtype:
    """Return the one dtype there is."""
    (dtype,) = dtypes
    return dtype


def watch_exchanges(crossing: dict[str, set[torch.dtype]]) -> None:
    """Note what sharded training sends, and what split layers do; for the rest of this process."""

    def watch(kind: str, name: str, where: Any = dist) -> None:
        original = getattr(where, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            crossing[kind] |= {value.dtype for value in tensors if value.numel() > 1}  # others are norms and counts
            return original(*args, **kwargs)

        setattr(where, name, noting)

    watch("gathered", ALL_GATHER)
    watch("reduced", REDUCE_SCATTER)
    watch("reduced", "all_reduce")
    watch("reduced", "reduce")
    watch("reduced", "all_reduce", _functional_collectives)


def measure(strategy: str, folder: Path) -> dict[str, dict[str, str]]:
    """Train and save with every precision of a strategy's rows; returns precision → column → dtype."""
    found = {}
    crossing: dict[str, set[torch.dtype]] = {"gathered": set(), "reduced": set()}
    if strategy.startswith(("fsdp", "deepspeed", "tp")):
        watch_exchanges(crossing)

    def noting(state: Any, bucket: Any) -> Any:
        crossing["reduced"].add(bucket.buffer().dtype)
        return allreduce_hook(state, bucket)

    for precision in TABLE[strategy]:
        task, callback = Probe(), Dtypes(crossing, folder / f"{strategy}-{precision}")
        trainer = quiet_trainer(
            devices="auto" if _PROCESSES[strategy] > 1 else 1,
            strategy=DDPStrategy(ddp_comm_hook=noting) if strategy == "ddp" else strategy,
            precision=precision,
            max_steps=2,
            callbacks=[callback],
        )
        trainer.fit(task, [[torch.randn(2, 4), torch.randn(2, 1)] for _ in range(4)])
        if strategy.startswith(("fsdp", "deepspeed")):
            assert only(callback.gathered) is task.seen["used"]
        crosses = name_of(only(callback.reduced)) if callback.reduced else "–"
        saved = read_checkpoint(callback.checkpoint)
        assert only({tensor.dtype for tensor in (saved.model or {}).values()}) is callback.seen["stored"]
        states = saved.optimizers[0]["state"].values()
        assert only({value.dtype for state in states for value in state.values()}) is callback.seen["state"]
        columns = {column: name_of(dtype) for column, dtype in {**task.seen, **callback.seen}.items()}
        found[precision] = {**columns, "crosses": crosses, "saved": columns["stored"]}
    return found


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name as the page writes it."""
    return {
        torch.float64: "fp64",
        torch.float32: "fp32",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
    }[dtype]


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", mostly_exhaustive(list(TABLE), keep=["fsdp"]))
def test_every_cell_of_the_table_is_what_a_step_does(strategy: str, tmp_path: Path) -> None:
    processes = _PROCESSES[strategy]
    if processes == 1:
        by_rank = [measure(strategy, tmp_path)]
    else:
        by_rank = run_distributed(lambda: measure(strategy, tmp_path), processes, init=False, timeout=280)
    for found in by_rank:
        said = {precision: {column: row[column] for column in _HEAD[2:]} for precision, row in TABLE[strategy].items()}
        assert {p: {c: row[c] for c in _HEAD[2:]} for p, row in found.items()} == said


def test_the_table_names_strategies_and_all_their_precisions() -> None:
    assert {"single", "ddp", "fsdp"} <= set(TABLE) <= set(STRATEGIES)
    for strategy, rows in TABLE.items():
        refused = _NOT_ON_THE_CPU if strategy.startswith("deepspeed") else ()
        everything = ["32-true", "64-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"]
        assert list(rows) == [precision for precision in everything if precision not in refused]
        for precision in refused:
            with pytest.raises(ConfigurationError, match=precision):
                quiet_trainer(strategy=strategy, precision=precision)
