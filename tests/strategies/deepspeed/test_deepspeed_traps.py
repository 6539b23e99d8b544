"""What DeepSpeed would do wrong without a word: optimizers it exchanges or flattens, and parameters frozen later."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.helpers.sources import ROOT
from tests.strategies.fsdp.sharded import Blocks, batches
from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.strategies.deepspeed.strategy import DeepSpeedStrategy

pytestmark = pytest.mark.distributed

_SCRIPT = """
import os
import warnings

warnings.simplefilter("ignore")
from tests.helpers.runs import quiet_trainer
from tests.strategies.fsdp.sharded import Blocks, batches

quiet_trainer(devices=1, strategy="deepspeed_stage_2", max_steps=1).fit(Blocks(), batches())
assert "LOCAL_RANK" not in os.environ  # by which other libraries recognize torchrun
"""


def test_a_script_leaves_the_environment_as_it_was() -> None:
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


class Factored(Blocks):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor([p for p in self.parameters() if p.requires_grad])


class Thawing(Blocks):
    """One block is trained in every second epoch only."""

    def __init__(self, begins: bool) -> None:
        super().__init__()
        self.begins = begins
        self.blocks[1].requires_grad_(begins)

    def on_train_epoch_start(self) -> None:
        self.blocks[1].requires_grad_(self.begins == (self.current_epoch % 2 == 0))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class _ReturnsNone(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def _try_all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in (1, 3):
        with pytest.raises(ConfigurationError) as refused:
            quiet_trainer(devices="auto", strategy=DeepSpeedStrategy(stage=stage)).fit(Factored(), batches())
        found[f"adafactor {stage}"] = str(refused.value)
        for begins in (False, True):
            trainer = quiet_trainer(devices="auto", strategy=DeepSpeedStrategy(stage=stage), max_epochs=2)
            with pytest.raises(TaskError) as failed:
                trainer.fit(Thawing(begins), batches())
            found[f"thawing {stage} {begins}"] = str(failed.value), trainer.global_step
    with pytest.raises(TaskError) as none:
        quiet_trainer(devices="auto", strategy="deepspeed_stage_2", max_epochs=1).fit(_ReturnsNone(), batches())
    found["none"] = str(none.value)
    return found


@pytest.fixture(scope="module")
def tried() -> list[dict[str, Any]]:
    return run_distributed(_try_all, 2, timeout=240, init=False)


def test_an_optimizer_that_looks_at_whole_matrices_is_refused(tried: list[dict[str, Any]]) -> None:
    for found in tried:
        assert "Adafactor needs full matrices" in found["adafactor 1"]
        assert "Adafactor needs full matrices" in found["adafactor 3"]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("begins", "what"), [(False, "unfrozen"), (True, "frozen")])
def test_what_is_frozen_or_thawed_later_is_an_error_before_the_step(
    stage: int, begins: bool, what: str, tried: list[dict[str, Any]]
) -> None:
    for found in tried:
        message, steps = found[f"thawing {stage} {begins}"]
        assert f"blocks.1.norm.weight was {what} after" in message
        assert steps == 4  # those of the first epoch


def test_a_step_without_a_loss_is_an_error(tried: list[dict[str, Any]]) -> None:
    assert all("Return a zero loss" in found["none"] for found in tried)
