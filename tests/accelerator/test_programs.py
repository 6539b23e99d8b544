"""Whole programs written for Accelerate train to the losses of loops in plain PyTorch, under each engine.

The programs are the files of `programs/`. A loop in one process trains on the micro-batches that the ranks of a program
received.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from tests.accelerator.programs import autoregressive, classification, language_model
from tests.helpers.distributed import run_distributed
from trainwright import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from trainwright.utils import set_seed

Program = Callable[..., dict[str, Any]]
Loss = Callable[[Any, Any], torch.Tensor]
_ENGINES = ["ddp", "fsdp", "zero2"]
_TOLERANCES = {"ddp": 1e-6, "fsdp": 1e-6, "zero2": 2e-5}


def _options(engine: str) -> dict[str, Any]:
    if engine == "fsdp":
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
        return {"fsdp_plugin": plugin}
    return {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)} if engine == "zero2" else {}


def _rank(program: Program, engine: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    return program(*arguments, **_options(engine))


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
) -> list[list[float]]:
    """Train on the micro-batches of all ranks of a program, and return each rank's losses.

    Args:
        found: The result of each rank.
        model: Trained by `optimizer`.
        optimizer: Steps after `accumulate` micro-batches of each rank.
        loss_of: Returns the loss of the model for a batch.
        scheduler: Of the optimizer. Default: None.
        accumulate: Micro-batches of a step.
        num_items: Returns the items of a batch: the loss is a sum, which is divided by those of a step. Default: None,
            where the loss is a mean.
    """
    losses: list[list[float]] = [[] for _ in found]
    num = len(found[0]["batches"])
    for start in range(0, num, accumulate):
        group = [rank["batches"][start : start + accumulate] for rank in found]
        divisor = len(found) * accumulate
        if num_items is not None:
            divisor = sum(int(num_items(batch)) for batches in group for batch in batches)
        for rank, batches in enumerate(group):
            for batch in batches:
                loss = loss_of(model, batch)
                losses[rank].append(loss.item())
                (loss / divisor).backward()
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


# Classification

_GLUE = {"lr": 1e-2, "num_epochs": 2, "seed": 42, "batch_size": 4, "num": 42}


def _classify(found: list[dict[str, Any]]) -> list[list[float]]:
    set_seed(42)
    model = classification.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = get_scheduler("linear", optimizer, 2, found[0]["total"])
    return _by_hand(found, model, optimizer, lambda model, batch: model(**batch).loss, scheduler=scheduler)


def test_classification_trains_and_evaluates() -> None:
    found = classification.training_function(_GLUE)
    _check([found], _classify([found]))
    assert [metric["num"] for metric in found["metrics"]] == [11, 11]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("engine", _ENGINES)
def test_classification_trains_and_evaluates_on_two_ranks(engine: str) -> None:
    found = _run(classification.training_function, engine, _GLUE)
    _check(found, _classify(found), engine)
    assert [metric["num"] for metric in found[0]["metrics"]] == [11, 11]
    assert found[0]["metrics"] == found[1]["metrics"]


# Language models

_LM = {"lr": 1e-2, "num_train_epochs": 2, "seed": 1, "gradient_accumulation_steps": 2}


def _model_language(found: list[dict[str, Any]]) -> list[list[float]]:
    set_seed(1)
    model, tokens = language_model.make_model(), language_model.num_tokens
    plain, decayed = [], []
    for name, parameter in model.named_parameters():
        (plain if "norm.weight" in name else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return _by_hand(
        found,
        model,
        optimizer,
        lambda model, batch: model(**batch).loss * tokens(batch),
        scheduler=get_scheduler("linear", optimizer, 1, found[0]["total"]),
        accumulate=2,
        num_items=tokens,
    )


def test_a_language_model_trains_on_packed_blocks() -> None:
    found = language_model.training_function(_LM)
    _check([found], _model_language([found]))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("engine", _ENGINES)
def test_a_language_model_trains_on_packed_blocks_on_two_ranks(engine: str) -> None:
    found = _run(language_model.training_function, engine, _LM)
    _check(found, _model_language(found), engine)
    assert found[0]["perplexities"] == found[1]["perplexities"]


_AUTOREGRESSIVE = {"lr": 1e-2, "num_epochs": 2, "seed": 1, "gradient_accumulation_steps": 2, "num": 24}


def _accumulate(found: list[dict[str, Any]]) -> list[list[float]]:
    set_seed(1)
    model = language_model.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return autoregressive.sum_of_losses(outputs.logits, batch["labels"])

    def tokens(batch: Any) -> torch.Tensor:
        found: torch.Tensor = batch["labels"][:, 1:].ne(-100).sum()
        return found

    return _by_hand(found, model, optimizer, loss_of, accumulate=2, num_items=tokens)


def test_samples_of_variable_length_are_weighted_by_their_tokens() -> None:
    found = autoregressive.training_function(_AUTOREGRESSIVE)
    _check([found], _accumulate([found]))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("engine", _ENGINES)
def test_samples_of_variable_length_are_weighted_by_their_tokens_on_two_ranks(engine: str) -> None:
    found = _run(autoregressive.training_function, engine, _AUTOREGRESSIVE)
    _check(found, _accumulate(found), engine)
