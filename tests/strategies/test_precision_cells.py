"""Which precisions each strategy trains in: every cell of the first table of docs/precision.md."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.helpers.sources import ROOT
from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule
from trainwright.strategies import STRATEGIES, FSDPStrategy, Precision
from trainwright.strategies.engine_settings import EngineSettings

_PAGE = (ROOT / "docs" / "precision.md").read_text()
_STAGES = ["deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
_OF_COLUMN: dict[str, list[Any]] = {"deepspeed": _STAGES, "FSDPStrategy(tp=2)": [FSDPStrategy(tp=2)]}
_ALONE = ("single", "offload", "xla")
_HARDWARE = {"GPU", "GPU with float64", "CUDA", "CUDA 8.9", "torch_xla"}
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_REASONS = dict(re.findall(r"^- \((\d+)\) \"([^\"]+)\"", _PAGE, re.MULTILINE))


def _read() -> tuple[dict[str, torch.dtype], dict[str, dict[str, tuple[str, str]]]]:
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


DTYPES, TABLE = _read()


def _reason(cell: str) -> str | None:
    """Return the words of a refusal's footnote; None: the cell is not a refusal."""
    found = re.fullmatch(r"refused \((\d+)\)", cell)
    return found and _REASONS[found[1]]


def _cells(place: int) -> list[tuple[str, str, str]]:
    return [(column, name, cells[place]) for column, row in TABLE.items() for name, cells in row.items()]


class Layers(TaskModule):
    """Notes the loss and the dtype of the parameters in a step."""

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


def _batches() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(4, 16, generator=generator) for _ in range(2)] for _ in range(2)]


def _train(column: str) -> list[tuple[Any, str, list[float], set[torch.dtype], bool]]:
    """Train one step with every precision that runs on the CPU; return what was noted, and if weights changed."""
    found = []
    for strategy in _OF_COLUMN.get(column, [column]):
        for precision, (cell, _) in TABLE[column].items():
            if cell == "runs":
                task, before = Layers(), Layers().model[1].weight
                devices = 1 if column in _ALONE else "auto"
                quiet_trainer(strategy=strategy, precision=precision, devices=devices, max_steps=1).fit(
                    task, _batches()
                )
                changed = not torch.equal(task.model[1].weight, before.to(task.model[1].weight.dtype))
                found.append((repr(strategy), precision, task.losses, task.dtypes, changed))
    return found


_RUN = [column for column, row in TABLE.items() if any(cell == "runs" for cell, _ in row.values())]


@pytest.mark.requires("torchao", reason="fp8 converts layers")
@pytest.mark.filterwarnings("ignore:cpu has no float8 matrix products")
@pytest.mark.parametrize(
    "column",
    [
        *[column for column in _RUN if column in _ALONE],
        *[pytest.param(column, marks=pytest.mark.distributed) for column in _RUN if column not in _ALONE],
    ],
)
def test_what_runs_on_the_cpu_trains_a_step_in_the_stated_dtype(column: str) -> None:
    if column in _ALONE:
        by_rank = [_train(column)]
    else:
        by_rank = run_distributed(lambda: _train(column), 2, init=False, timeout=240)
    expected = [name for name, (cell, _) in TABLE[column].items() if cell == "runs"]
    for found in by_rank:
        assert [precision for _, precision, *_ in found] == expected * len(_OF_COLUMN.get(column, [column]))
        for strategy, precision, losses, dtypes, changed in found:
            narrow = column == "deepspeed" and precision.startswith("bf16")  # beside copies in float32
            assert dtypes == {torch.bfloat16 if narrow else DTYPES[precision]}, (strategy, precision)
            assert len(losses) == 1
            assert torch.tensor(losses).isfinite().all(), (strategy, precision)
            assert changed, (strategy, precision)


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
