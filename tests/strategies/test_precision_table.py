"""Number formats by name, and which of them each strategy trains in by docs/precision.md."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.runs import quiet_trainer
from tests.helpers.sources import ROOT
from trainwright.core.errors import ConfigurationError
from trainwright.strategies import STRATEGIES, FSDPStrategy
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.precision_names import parse_precision

_PAGE = (ROOT / "docs" / "precision.md").read_text()
_STAGES = ["deepspeed_stage_1", "deepspeed_stage_3"]
_OF_COLUMN: dict[str, list[Any]] = {"deepspeed": _STAGES, "FSDPStrategy(tp=2)": [FSDPStrategy(tp=2)]}
_ALONE = ("single", "offload", "xla")
_HARDWARE = {"GPU", "GPU with float64", "CUDA", "CUDA 8.9", "torch_xla"}
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_REASONS = dict(re.findall(r"^- \((\d+)\) \"([^\"]+)\"", _PAGE, re.MULTILINE))


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


@pytest.mark.parametrize(("column", "precision", "cell"), [one for one in _cells(0) if one[2] != "runs"])
def test_what_is_refused_on_the_cpu_says_why(
    column: str, precision: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwright.strategies.xla.strategy.check_versions", lambda: None)
    reason = _reason(cell)
    for strategy in _OF_COLUMN.get(column, [column]):
        with pytest.raises(ConfigurationError, match=re.escape(reason)):
            quiet_trainer(strategy=strategy, precision=precision, devices=1 if column in _ALONE else 2)


@pytest.mark.slow
@pytest.mark.parametrize(("column", "precision", "cell"), _cells(1))
def test_what_is_refused_on_accelerators_says_why_and_nothing_else_is(
    column: str, precision: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwright.strategies.xla.strategy.check_versions", lambda: None)
    kind, devices = "xla" if column == "xla" else "cuda", [0] if column in _ALONE else [0, 1]
    settings = EngineSettings(kind, devices, 1, parse_precision(precision))
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


@pytest.mark.parametrize(
    ("spec", "near"), [("bf16-mixd", "bf16-mixed"), (17, ""), ("transformer-engine-float16", "'transformer-engine'?")]
)
def test_an_unknown_name_is_an_error_with_the_nearest_and_all_others(spec: Any, near: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Known: 32-true, 64-true, 16-true") as caught:
        parse_precision(spec)
    assert near in str(caught.value)
    assert f"precision={spec!r}" in str(caught.value)


@pytest.mark.filterwarnings("ignore:cpu has no float8 matrix products")
@pytest.mark.parametrize(
    "name", ["bf16-mixed", pytest.param("fp8", marks=pytest.mark.requires("torchao", reason="fp8"))]
)
def test_an_evaluation_of_torchs_encoder_computes_as_training_does(name: str) -> None:
    precision, fast = parse_precision(name), torch.backends.mha.get_fastpath_enabled()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2)
    model, x = nn.Sequential(nn.Linear(32, 32), encoder, nn.Linear(32, 32)), torch.randn(2, 4, 32)
    with ExitStack() as undo, torch.no_grad():
        precision.convert([model], x.device, undo)
        with precision.autocast("cpu"):
            expected, found = model(x), model.eval()(x)
    assert torch.equal(found, expected)
    assert torch.backends.mha.get_fastpath_enabled() == fast
