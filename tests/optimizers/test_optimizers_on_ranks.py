"""Optimizers by name on two ranks: DDP, FSDP with states in shards, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
    pytest.mark.requires("deepspeed", reason="what DeepSpeed refuses"),
    pytest.mark.requires("bitsandbytes", reason="AdamW in 8 bits"),
    pytest.mark.requires("torchao", reason="AdamW in 8 and 4 bits"),
    pytest.mark.filterwarnings("ignore"),
]
QUANTIZED = ["adamw_8bit", "adamw_4bit"]
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
    found = {}
    for name in names:
        straight = fit(name, 2, make_strategy())
        fit(name, 1, make_strategy(), save=folder / name)
        found[name] = straight, fit(name, 2, make_strategy(), resume=folder / name)
    return found


def test_ddp_trains_as_one_process_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    names = ["adamw_8bit", "adamw_bnb_8bit", "adamw_low_rank"]
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


def fit_fsdp(folder: Path) -> dict[str, Any]:
    """Train with shards, with files of every rank's shards and with one file of all, and what is resumed from them."""
    found: dict[str, Any] = {name: {} for name in QUANTIZED}
    for name in QUANTIZED:
        found[name]["straight"] = fit(name, 2, "fsdp")
        for kind in ("sharded", "full"):
            path = folder / f"{name}-{kind}"
            fit(name, 1, FSDPStrategy(state_dict_type=kind), save=path)
            found[name][kind] = fit(name, 2, FSDPStrategy(state_dict_type=kind), resume=path)
        found[name]["ddp"] = fit(name, 2, "ddp")
        found[name]["resumed by ddp"] = fit(name, 2, "ddp", resume=folder / f"{name}-sharded")
        fit(name, 1, "ddp", save=folder / f"{name}-ddp")
        found[name]["resumed from ddp"] = fit(name, 2, "fsdp", resume=folder / f"{name}-ddp")
    return found


def test_fsdp_trains_as_ddp_and_resumes_bit_for_bit_in_shards(tmp_path: Path) -> None:
    by_rank = run_distributed(functools.partial(fit_fsdp, tmp_path), 2, init=False, timeout=400)
    for found in by_rank:
        for name in QUANTIZED:
            by_way = found[name]
            for way in ("sharded", "full"):
                assert_equal_weights(by_way[way], by_way["straight"])
            for way in ("ddp", "resumed by ddp", "resumed from ddp"):
                torch.testing.assert_close(by_way[way], by_way["straight"], rtol=0, atol=1e-5)
    state = read_checkpoint(tmp_path / "adamw_8bit-sharded").optimizers[0]["state"]["net.0.weight"]["exp_avg"]
    assert (state["quantized"], state["codes"].shape, state["scale"].shape) == ("OptimState8bit", (128, 64), (32,))


def prepare_uneven() -> str:
    accelerator = Accelerator(strategy="fsdp")
    model = nn.Linear(64, 129)
    with pytest.raises(ConfigurationError) as refused:
        accelerator.prepare(model, create_optimizer("adamw_8bit", model.parameters()))
    return str(refused.value)


def test_rows_that_are_not_divided_evenly_are_refused() -> None:
    for message in run_distributed(prepare_uneven, 2, init=False, timeout=120):
        assert "a parameter of shape (129, 64) are not divisible by the number of ranks" in message
