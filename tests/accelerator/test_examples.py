"""The examples of `docs/examples/`: each runs as a script, and what their pages say of them is true."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from docs.examples import checkpointing

from tests.helpers.distributed import run_distributed
from tests.helpers.selection import mostly_exhaustive
from tests.helpers.sources import ROOT

_EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
_KEPT = [path for path in _EXAMPLES if path.stem in ("accumulation", "early_stopping", "trackers")]
_SMALL = {"lr": 0.02, "num_epochs": 2, "seed": 3}
one_and_two_ranks = pytest.mark.parametrize(
    "num_ranks", [1, pytest.param(2, marks=[pytest.mark.distributed, pytest.mark.exhaustive])]
)


def _recorded(program: Callable[..., dict[str, Any]], config: dict[str, Any]) -> dict[str, Any]:
    """Run an example; also return the micro-batches and losses of its steps."""
    batches: list[Any] = []
    losses: list[float] = []

    def on_step(batch: Any, loss: torch.Tensor) -> None:
        batches.append(tuple(batch))
        losses.append(loss.item())

    return {**program(config, on_step=on_step), "batches": batches, "losses": losses}


def _on_ranks(num_ranks: int, call: Callable[..., Any], *arguments: Any) -> list[Any]:
    return [call(*arguments)] if num_ranks == 1 else run_distributed(call, 2, *arguments, init=False, timeout=240)


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.filterwarnings("ignore:cpu has no float8")
@pytest.mark.slow
@pytest.mark.parametrize("path", mostly_exhaustive(_EXAMPLES, keep=_KEPT), ids=lambda path: path.stem)
def test_an_example_runs_as_a_script(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN", str(tmp_path))
    runpy.run_path(str(path), run_name="__main__")


def test_examples_are_short_and_listed() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    for path in _EXAMPLES:
        most = 120 if path.stem.startswith("complete") else 60
        assert len([line for line in path.read_text().splitlines() if line.strip()]) <= most, path
        assert f"(examples/{path.name})" in page


@pytest.mark.slow
@one_and_two_ranks
@pytest.mark.parametrize(("checkpointing_steps", "path"), [("epoch", "newest"), ("3", "step_3")])
def test_a_program_resumes_by_epoch_and_by_step(
    checkpointing_steps: str, path: str, num_ranks: int, tmp_path: Path
) -> None:
    config = {**_SMALL, "output_dir": str(tmp_path), "checkpointing_steps": checkpointing_steps}
    first = {**config, "resume_from_checkpoint": None}
    found = _on_ranks(num_ranks, _recorded, checkpointing.training_function, first)
    if path == "newest":
        states = sorted(tmp_path.iterdir(), key=os.path.getctime)
        start = (int(states[-1].name.split("_")[1]) + 1) * found[0]["step"] // 2
        config["num_epochs"] = 3
    else:
        start = 3
        path = str(tmp_path / path)
    second = {**config, "resume_from_checkpoint": path}
    resumed = _on_ranks(num_ranks, _recorded, checkpointing.training_function, second)
    for rank, again in zip(found, resumed, strict=True):
        assert again["step"] == found[0]["step"] // 2 * config["num_epochs"]
        rest = rank["losses"][start:]
        assert again["losses"][: len(rest)] == rest
        assert len(again["losses"]) == again["step"] - start
