"""What docs/precision.md says: which precisions each strategy trains in, and the dtype of everything in real steps."""

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
from trainwright.strategies import STRATEGIES, DDPStrategy, FSDPStrategy, Precision
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.shards import local_shard

_PAGE = (ROOT / "docs" / "precision.md").read_text()
_STAGES = ["deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
_OF_COLUMN: dict[str, list[Any]] = {"deepspeed": _STAGES, "FSDPStrategy(tp=2)": [FSDPStrategy(tp=2)]}
_ALONE = ("single", "offload", "xla")
_HARDWARE = {"GPU", "GPU with float64", "CUDA", "CUDA 8.9", "torch_xla"}
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_REASONS = dict(re.findall(r"^- \((\d+)\) \"([^\"]+)\"", _PAGE, re.MULTILINE))

# Every cell of the second table

_HEAD = ["strategy", "precision", "stored", "used", "product", "norm", "loss", "crosses", "gradient", "state", "saved"]
_NOT_ON_THE_CPU = ("64-true", "16-true", "16-mixed")  # with DeepSpeed


def documented() -> dict[str, dict[str, dict[str, str]]]:
    """Return the page's table: strategy → precision → column → dtype."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for line in _PAGE.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if len(cells) == len(_HEAD) and not re.fullmatch(r"-+", cells[0]) and cells[0] != "strategy":
            row = dict(zip(_HEAD, cells, strict=True))
            found.setdefault(row["strategy"], {})[row["precision"]] = row
    return found


TABLE = documented()


class Probe(TaskModule):
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
            devices=1 if strategy == "single" else "auto",
            strategy=DDPStrategy(ddp_comm_hook=noting) if strategy == "ddp" else strategy,
            precision=precision,
            max_steps=2,
            callbacks=[callback],
        )
        trainer.fit(task, [[torch.randn(2, 4), torch.randn(2, 1)] for _ in range(4)])
        if strategy.startswith(("fsdp", "deepspeed")):
            assert only(callback.gathered) is task.seen["used"]
        crosses = _NAMES[only(callback.reduced)] if callback.reduced else "–"
        saved = read_checkpoint(callback.checkpoint)
        assert only({tensor.dtype for tensor in (saved.model or {}).values()}) is callback.seen["stored"]
        states = saved.optimizers[0]["state"].values()
        assert only({value.dtype for state in states for value in state.values()}) is callback.seen["state"]
        columns = {column: _NAMES[dtype] for column, dtype in {**task.seen, **callback.seen}.items()}
        found[precision] = {**columns, "crosses": crosses, "saved": columns["stored"]}
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", mostly_exhaustive(list(TABLE), keep=["fsdp"]))
def test_every_cell_of_the_table_is_what_a_step_does(strategy: str, tmp_path: Path) -> None:
    if strategy == "single":
        by_rank = [measure(strategy, tmp_path)]
    else:
        by_rank = run_distributed(lambda: measure(strategy, tmp_path), 2, init=False, timeout=280)
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


# Every cell of the first table


def _read_cells() -> tuple[dict[str, torch.dtype], dict[str, dict[str, tuple[str, str]]]]:
    """Return the dtype of each precision, and strategy → precision → the cells of the CPU and of accelerators."""
    lines = iter(_PAGE.splitlines())
    head = next(line for line in lines if line.startswith("| precision (parameters)"))
    columns = [cell.strip(" `") for cell in head.strip("|").split("|")[1:]]
    dtypes: dict[str, torch.dtype] = {}
    found: dict[str, dict[str, tuple[str, str]]] = {column: {} for column in columns}
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            break
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        precision, dtype = first.strip("`)").split("` (")
        dtypes[precision] = _DTYPES[dtype]
        for column, cell in zip(columns, cells, strict=True):
            cpu, accelerators = cell.split(" / ")
            found[column][precision] = (cpu, accelerators)
    return dtypes, found


DTYPES, CELLS = _read_cells()


def _reason(cell: str) -> str | None:
    """Return the words of a refusal's footnote; None: the cell is not a refusal."""
    found = re.fullmatch(r"refused \((\d+)\)", cell)
    return found and _REASONS[found[1]]


def _cells(place: int) -> list[tuple[str, str, str]]:
    return [(column, name, cells[place]) for column, row in CELLS.items() for name, cells in row.items()]


class Layers(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16))
        self.losses: list[float] = []
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return a loss so small that its scale does not overflow."""
        loss = 0.1 * nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.dtypes = {parameter.dtype for parameter in self.parameters()}

    def shard_units(self) -> Any:
        return list(self.model)

    def tensor_parallel_plan(self, mesh: Any) -> Any:
        return {"model.0": "colwise_gathered", "model.1": "colwise_gathered"}

    def configure_optimizers(self) -> Any:
        """Return an optimizer whose steps are not lost to rounding."""
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize(("column", "precision", "cell"), [one for one in _cells(0) if one[2] != "runs"])
def test_what_is_refused_on_the_cpu_says_why(
    column: str, precision: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwright.strategies.xla.strategy.check_versions", lambda: None)
    reason = _reason(cell)
    assert reason is not None
    for strategy in _OF_COLUMN.get(column, [column]):
        with pytest.raises(ConfigurationError, match=re.escape(reason)):
            quiet_trainer(strategy=strategy, precision=precision, devices=1 if column in _ALONE else 2)


@pytest.mark.parametrize(("column", "precision", "cell"), _cells(1))
def test_what_is_refused_on_accelerators_says_why_and_nothing_else_is(
    column: str, precision: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwright.strategies.xla.strategy.check_versions", lambda: None)
    kind, devices = "xla" if column == "xla" else "cuda", [0] if column in _ALONE else [0, 1]
    settings = EngineSettings(kind, devices, 1, Precision.parse(precision))
    reason = _reason(cell)
    for one in _OF_COLUMN.get(column, [column]):
        strategy = STRATEGIES.get(one)() if isinstance(one, str) else one
        if reason is None:
            assert cell.removeprefix("needs ") in _HARDWARE
            strategy.check(settings)
        else:
            with pytest.raises(ConfigurationError, match=re.escape(reason)):
                strategy.check(settings)


def test_the_table_has_all_precisions_and_uses_all_footnotes() -> None:
    assert set(DTYPES) == {"32-true", "64-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed", "fp8"}
    used = {number for place in (0, 1) for *_, cell in _cells(place) for number in re.findall(r"\((\d+)\)", cell)}
    assert used == set(_REASONS)
