"""Whole programs written for Accelerate train to the losses of loops in plain PyTorch, under each engine.

The programs are the files of `programs/` and the examples of `docs/examples/`. A loop in one process trains on the
micro-batches that the ranks of a program received.
"""

from __future__ import annotations

import inspect
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from docs.examples import (
    batch_size,
    checkpointing,
    early_stopping,
    multi_process_metrics,
    schedule_free,
)
from torch import nn

from tests.accelerator.programs import autoregressive
from tests.accelerator.programs.synthetic import Record, classifier, rows
from tests.helpers.distributed import run_distributed
from tests.helpers.sources import ROOT
from trainwright import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from trainwright.utils import set_seed

on_two_ranks = [pytest.mark.distributed, pytest.mark.slow]
Program = Callable[..., dict[str, Any]]
Loss = Callable[[Any, Any], torch.Tensor]
_ENGINES = ["ddp", "fsdp", "zero2"]
_TOLERANCES = {"ddp": 1e-6, "fsdp": 1e-6, "zero2": 2e-5}


def _options(program: Program, engine: str) -> dict[str, Any]:
    if engine == "fsdp":
        policy = "TRANSFORMER_BASED_WRAP" if program is autoregressive.training_function else "NO_WRAP"
        return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=policy)}
    return {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)} if engine == "zero2" else {}


def _rank(program: Program, engine: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    return _call(program, *arguments, **_options(program, engine))


def _call(program: Program, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Call a program; the micro-batches and losses that an example passes to `on_step` are added to its result."""
    if "on_step" not in inspect.signature(program).parameters:
        return program(*arguments, **options)
    record = Record()
    found = program(*arguments, on_step=record.add, **options)
    return {**found, "batches": record.batches, "losses": record.losses}


def _run(program: Program, engine: str, *arguments: Any) -> list[dict[str, Any]]:
    return run_distributed(_rank, 2, program, engine, arguments, init=False, timeout=240)


def _by_hand(
    found: list[dict[str, Any]],
    model: Any,
    optimizer: Any,
    loss_of: Loss,
    *,
    scheduler: Any = None,
    accumulate: int = 1,
    num_items: Callable[[Any], Any] | None = None,
    weight_of: Callable[[int, int], float] = lambda rank, index: 1.0,
) -> list[list[float]]:
    """Train on the micro-batches of all ranks of a program, and return each rank's losses.

    With `num_items` the loss of a batch is a sum, which is divided by the items of a step; without it, a mean.
    """
    losses: list[list[float]] = [[] for _ in found]
    num = len(found[0]["batches"])
    for start in range(0, num, accumulate):
        group = [rank["batches"][start : start + accumulate] for rank in found]
        divisor = len(found) * accumulate
        if num_items is not None:
            divisor = sum(int(num_items(batch)) for batches in group for batch in batches)
        for rank, batches in enumerate(group):
            for index, batch in enumerate(batches, start=start):
                loss = loss_of(model, batch)
                losses[rank].append(loss.item())
                (loss * weight_of(rank, index) / divisor).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    return losses


def _check(found: list[dict[str, Any]], by_hand: list[list[float]], engine: str | None = None) -> None:
    """Compare the losses of each rank, to the last bit without an engine."""
    tolerance = 0.0 if engine is None else _TOLERANCES[engine]
    for rank, losses in zip(found, by_hand, strict=True):
        assert len(losses) > 3
        assert rank["losses"] == pytest.approx(losses, rel=tolerance, abs=tolerance)


def _find(program: Program, engine: str | None, *arguments: Any) -> list[dict[str, Any]]:
    return [_call(program, *arguments)] if engine is None else _run(program, engine, *arguments)


one_and_two_ranks = pytest.mark.parametrize("engine", [None, pytest.param("ddp", marks=on_two_ranks)])


_AUTOREGRESSIVE = {"lr": 1e-2, "num_epochs": 2, "seed": 1, "gradient_accumulation_steps": 2, "num": 24}


def _accumulate(found: list[dict[str, Any]], weight_of: Any = lambda rank, index: 1.0) -> list[list[float]]:
    set_seed(1)
    model = autoregressive.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return autoregressive.sum_of_losses(outputs.logits, batch["labels"])

    def tokens(batch: Any) -> torch.Tensor:
        found: torch.Tensor = batch["labels"][:, 1:].ne(-100).sum()
        return found

    return _by_hand(found, model, optimizer, loss_of, accumulate=2, num_items=tokens, weight_of=weight_of)


def test_samples_of_variable_length_are_weighted_by_their_tokens() -> None:
    found = [_call(autoregressive.training_function, _AUTOREGRESSIVE)]
    _check(found, _accumulate(found))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("engine", _ENGINES)
def test_a_rank_without_data_weighs_nothing_if_a_step_is_fetched_first(engine: str) -> None:
    found = _run(autoregressive.training_function, engine, {**_AUTOREGRESSIVE, "num": 22})

    def weight_of(rank: int, index: int) -> float:
        """Three of four micro-batches of the last step of a pass are real."""
        if index % 6 < 4:
            return 1.0
        return 0.0 if (rank, index % 6) == (1, 5) else 4 / 3

    assert len(found[0]["losses"]) == 12
    _check(found, _accumulate(found, weight_of), engine)


# Programs that train the classifier of rows

_SMALL = {"lr": 0.02, "num_epochs": 2, "seed": 3}


def _train_rows(found: list[dict[str, Any]], seed: int = 3, *, warms_up: int = 0, accumulate: int = 1) -> Any:
    set_seed(seed)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warms_up) if warms_up else None
    return _by_hand(found, model, optimizer, _cross_entropy, scheduler=scheduler, accumulate=accumulate)


def _cross_entropy(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@one_and_two_ranks
@pytest.mark.parametrize(("checkpointing_steps", "path"), [("epoch", "newest"), ("3", "step_3")])
def test_a_program_resumes_by_epoch_and_by_step(
    checkpointing_steps: str, path: str, engine: str | None, tmp_path: Path
) -> None:
    program = checkpointing.training_function
    config = {**_SMALL, "num_epochs": 2, "output_dir": str(tmp_path), "checkpointing_steps": checkpointing_steps}
    found = _find(program, engine, {**config, "resume_from_checkpoint": None})
    _check(found, _train_rows(found, warms_up=12), engine)
    if path == "newest":
        states = sorted(tmp_path.iterdir(), key=os.path.getctime)
        start = (int(states[-1].name.split("_")[1]) + 1) * found[0]["step"] // 2
        config["num_epochs"] = 3
    else:
        start = 3
        path = str(tmp_path / path)
    resumed = _find(program, engine, {**config, "resume_from_checkpoint": path})
    for rank, again in zip(found, resumed, strict=True):
        assert again["step"] == found[0]["step"] // 2 * config["num_epochs"]
        rest = rank["losses"][start:]
        assert again["losses"][: len(rest)] == rest
        assert len(again["losses"]) == again["step"] - start


@one_and_two_ranks
def test_early_stopping_stops_all_ranks_in_the_same_step(engine: str | None) -> None:
    found = _find(early_stopping.training_function, engine, _SMALL)
    assert all(rank["stopped"] for rank in found)
    assert len({len(rank["losses"]) for rank in found}) == 1
    _check(found, _train_rows(found), engine)


def test_a_batch_size_is_found_and_accumulates_to_the_wanted_one() -> None:
    found = [_call(batch_size.training_function, {**_SMALL, "batch_size": 16, "fits": 4})]
    assert all(rank["tried"] == [16, 8, 4] for rank in found)
    found = [{name: rank[name][2:] for name in ("batches", "losses")} for rank in found]  # without the failed attempts
    _check(found, _train_rows(found, accumulate=4))


@one_and_two_ranks
@pytest.mark.parametrize(("num", "gather"), [(11, False), (25, True)])
def test_metrics_count_each_sample_once(engine: str | None, num: int, gather: bool) -> None:
    set_seed(3)
    inputs, labels = rows(num).tensors
    right = (classifier()(inputs).argmax(-1) == labels).float().mean().item()
    for rank in _find(multi_process_metrics.evaluation_function, engine, {**_SMALL, "num": num, "gather": gather}):
        assert rank["metric"] == {"accuracy": pytest.approx(right), "num": num}
        assert sorted(rank["seen"][:, 0].tolist()) == sorted(inputs[:, 0].tolist())


_SCHEDULE_FREE = {**_SMALL, "lr": 0.5, "eval_rows": rows(5, seed=1).tensors[0]}


@pytest.mark.parametrize("engine", [None, pytest.param("fsdp", marks=on_two_ranks)])
def test_a_schedule_free_optimizer_has_weights_of_its_own_for_evaluation(engine: str | None) -> None:
    found = _find(schedule_free.training_function, engine, _SCHEDULE_FREE)
    set_seed(3)
    model, evaluations = classifier(), []
    optimizer = schedule_free.ScheduleFreeSGD(model.parameters(), lr=0.5)
    half = len(found[0]["batches"]) // 2
    losses: list[list[float]] = [[] for _ in found]
    for epoch in (slice(None, half), slice(half, None)):
        optimizer.train()
        part = [{"batches": rank["batches"][epoch]} for rank in found]
        for rank, more in zip(losses, _by_hand(part, model, optimizer, _cross_entropy), strict=True):
            rank += more
        optimizer.eval()
        evaluations.append(model(rows(5, seed=1).tensors[0]).detach())
    _check(found, losses, engine)
    tolerance = 0.0 if engine is None else 1e-5
    for rank in found:
        torch.testing.assert_close(torch.tensor(rank["evaluations"]), torch.stack(evaluations), atol=tolerance, rtol=0)


# Examples


_EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


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
