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
from docs.examples import checkpointing, multi_process_metrics, schedule_free
from torch import nn

from tests.helpers.distributed import run_distributed
from tests.helpers.sources import ROOT
from trainwright.utils import set_seed

_EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
_SMALL = {"lr": 0.02, "num_epochs": 2, "seed": 3}
one_and_two_ranks = pytest.mark.parametrize(
    "num_ranks", [1, pytest.param(2, marks=[pytest.mark.distributed, pytest.mark.slow])]
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


def _classifier() -> nn.Sequential:
    set_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def _rows(num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(num, 8, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs.sum(1) > 0).long()


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.filterwarnings("ignore:cpu has no float8")
@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: path.stem)
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


@one_and_two_ranks
@pytest.mark.parametrize(("num", "gather"), [(11, False), (25, True)])
def test_metrics_count_each_sample_once(num_ranks: int, num: int, gather: bool) -> None:
    inputs, labels = _rows(num, 0)
    right = (_classifier()(inputs).argmax(-1) == labels).float().mean().item()
    config = {**_SMALL, "num": num, "gather": gather}
    for rank in _on_ranks(num_ranks, multi_process_metrics.evaluation_function, config):
        assert rank["metric"] == {"accuracy": pytest.approx(right), "num": num}
        assert sorted(rank["seen"][:, 0].tolist()) == sorted(inputs[:, 0].tolist())


def test_a_schedule_free_optimizer_has_weights_of_its_own_for_evaluation() -> None:
    inputs, _ = _rows(5, 1)
    found = _recorded(schedule_free.training_function, {**_SMALL, "lr": 0.5, "eval_rows": inputs})
    model = _classifier()
    optimizer = schedule_free.ScheduleFreeSGD(model.parameters(), lr=0.5)
    half = len(found["batches"]) // 2
    losses, evaluations = [], []
    for epoch in (found["batches"][:half], found["batches"][half:]):
        optimizer.train()
        for x, y in epoch:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.eval()
        evaluations.append(model(inputs).detach())
    assert found["losses"] == losses
    torch.testing.assert_close(torch.tensor(found["evaluations"]), torch.stack(evaluations), atol=0, rtol=0)
