"""Optimizers by name on two ranks: DDP, FSDP with states in shards, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.optimizers.test_optimizers import Autoencoder, batches
from trainwright import Accelerator
from trainwright.checkpoint import read_checkpoint
from trainwright.core.errors import ConfigurationError
from trainwright.optimizers import create_optimizer
from trainwright.strategies.fsdp.strategy import FSDPStrategy

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.requires("bitsandbytes", reason="AdamW in 8 bits"),
    pytest.mark.requires("torchao", reason="AdamW in 8 and 4 bits"),
    pytest.mark.filterwarnings("ignore"),
]
QUANTIZED = ["adamw_8bit", "adamw_4bit", "adamw_fp8"]
Weights = dict[str, torch.Tensor]


def fit(
    name: str, epochs: int, strategy: Any, *, save: Path | None = None, resume: Path | None = None, processes: int = 2
) -> Weights:
    """Train on so many ranks; return the full weights."""
    with torch.compiler.set_stance("force_eager"):
        task = Autoencoder(name)
        trainer = quiet_trainer(
            devices="auto" if processes > 1 else 1, strategy=strategy, max_epochs=epochs,
            accumulate_grad_batches=2 // processes,
        )  # fmt: skip
        trainer.fit(task, batches(), ckpt_path=resume)
        if save is not None:
            trainer.save_checkpoint(save)
        return weights_of(task)


def fit_straight_and_resumed(names: list[str], make_strategy: Any, folder: Path) -> dict[str, tuple[Weights, Weights]]:
    """Train two epochs at once, and in two fits."""
    found = {}
    for name in names:
        straight = fit(name, 2, make_strategy())
        fit(name, 1, make_strategy(), save=folder / name)
        found[name] = straight, fit(name, 2, make_strategy(), resume=folder / name)
    return found


def test_ddp_trains_as_one_process_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    names = [*QUANTIZED, "adamw_bnb_8bit", "adamw_low_rank", "adafactor"]
    by_rank = run_distributed(
        functools.partial(fit_straight_and_resumed, names, lambda: "ddp", tmp_path), 2, init=False, timeout=300
    )
    for name in names:
        for found in by_rank:
            straight, resumed = found[name]
            assert_equal_weights(resumed, straight)
            assert_equal_weights(straight, by_rank[0][name][0])
    with torch.compiler.set_stance("force_eager"):
        for name in names:
            fit(name, 2, "auto", resume=tmp_path / name, processes=1)  # of two ranks, on one


def sharded() -> FSDPStrategy:
    """Return the strategy."""
    return FSDPStrategy(weights_after_stage="all")
