"""A user-written loop trains a pipeline: a call of the model runs forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.helpers.distributed import run_distributed
from tests.strategies.megatron.test_pipeline import Language, batches
from trainwright import Accelerator
from trainwright.strategies.megatron.strategy import MegatronStrategy


class WithLoss(Language):
    """As a model of transformers: with labels it returns its loss, too."""

    def forward(self, tokens: torch.Tensor, labels: Any = None) -> Any:
        logits = super().forward(tokens)
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def _loop(strategy: Any, folder: Path | None, *, load: bool = False, whole: bool = True, **options: Any) -> Any:
    """Train with half the batches, save, and train with the others; return losses and logits."""
    torch.manual_seed(0)
    accelerator = Accelerator(strategy=strategy, seed=0, cpu=True, **options)
    model: Any = WithLoss()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    if load:
        accelerator.load_state(str(folder))
    losses = []
    for i, tokens in enumerate(batches()):
        if i == 6 and folder is not None and not load:
            accelerator.save_state(str(folder))
        if load and i < 6:
            continue
        if whole:
            loss = model(tokens, labels=tokens)["loss"]
            accelerator.backward(loss)
        else:
            loss = accelerator.forward_backward(lambda t: model(t, labels=t)["loss"], list(tokens.split(1)))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return losses, model(batches()[0])["logits"]


@pytest.mark.distributed
def test_a_loop_is_that_of_one_process_and_continues_its_checkpoints(tmp_path: Path) -> None:
    def runs() -> Any:
        strategy = MegatronStrategy(pp=2, num_micro_batches=3)
        return [
            _loop(strategy, tmp_path / "two"),
            _loop(strategy, None, whole=False),
            _loop(MegatronStrategy(pp=2, schedule="interleaved1f1b", num_micro_batches=2), None),
            _loop(strategy, tmp_path / "one", load=True),
        ]

    losses, logits = _loop("single", tmp_path / "one")
    torch.testing.assert_close(_loop("single", None, whole=False)[1], logits, rtol=1e-4, atol=1e-4)
    for rank in run_distributed(runs, 2, init=False, timeout=90):
        for found in rank:
            assert found[0] == pytest.approx(losses[-len(found[0]) :], rel=1e-5)
            torch.testing.assert_close(found[1], logits, rtol=1e-4, atol=1e-4)
    again = _loop("single", tmp_path / "two", load=True)
    assert again[0] == pytest.approx(losses[6:], rel=1e-5)
