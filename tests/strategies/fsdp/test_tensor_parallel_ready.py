"""Ready plans: transformers' models train split as they do whole, and what does not divide is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.distributed import run_distributed
from tests.helpers.language_models import make_model
from tests.helpers.runs import StepRecorder, quiet_trainer, weights_of
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule
from trainwright.strategies.fsdp.layers.known_models import propose_plan, ready_plan
from trainwright.strategies.fsdp.strategy import FSDPStrategy
from trainwright.strategies.megatron.strategy import MegatronStrategy


class Hf(TaskModule):
    def __init__(self, kind: str, options: dict[str, bool] | None = None, **changes: Any) -> None:
        super().__init__()
        self.options = options
        self.model = make_model(kind, **changes)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        options = {} if self.model.config.model_type == "bert" else {"use_cache": False}
        return self.model(input_ids=batch[0], labels=batch[0], **options).loss

    def tensor_parallel_plan(self, mesh: Any) -> Any:
        """Ask for a ready plan with options, or a proposed one; None: whatever is found."""
        if self.model.config.model_type == "phi":
            return {f"model.{name}": style for name, style in propose_plan(self.model).items()}
        return self.options and ready_plan(self.model, mesh["tp"].size(), prefix="model", **self.options)

    def configure_optimizers(self) -> Any:
        """Return AdamW; a key's bias has no gradient but noise, which `eps` drowns."""
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


def train(strategy: str, task: Hf) -> dict[str, Any]:
    recorder = StepRecorder()
    ids = torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(4))
    trainer = quiet_trainer(
        devices=1 if strategy == "single" else "auto", strategy=strategy, max_epochs=1, gradient_clip_val=0.5,
        callbacks=[recorder],
    )  # fmt: skip
    trainer.fit(task, DataLoader(TensorDataset(ids), batch_size=2))
    return {
        "losses": torch.tensor(recorder.losses), "norms": torch.tensor(recorder.norms), "weights": weights_of(task),
        "widths": [getattr(part, "split_size", 0) for part in task.modules()],
    }  # fmt: skip


def _train_odd(folder: Path, strategy: Any, *, kind: str = "gpt2", rows: int, resume: Any = None) -> dict[str, Any]:
    """Train two steps with a vocabulary of 25, with a checkpoint of the first, or resume from one."""
    savers = [] if resume else [ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)]
    ids = torch.randint(25, (8, 8), generator=torch.Generator().manual_seed(4))
    devices = 1 if strategy == "single" else "auto"
    trainer = quiet_trainer(devices=devices, strategy=strategy, max_epochs=1, gradient_clip_val=0.5, callbacks=savers)
    task = Hf(kind, vocab_size=25)
    trainer.fit(task, DataLoader(TensorDataset(ids), batch_size=rows), ckpt_path=resume)
    return weights_of(task)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.requires("transformers", reason="its models are split")
@pytest.mark.filterwarnings("ignore:.*(holds the state of a callback|random number generators)")
@pytest.mark.parametrize(
    ("strategy", "ranks", "rows"),
    [
        ("tp", 2, 4),
        pytest.param(FSDPStrategy(tp=2), 4, 2, marks=pytest.mark.exhaustive),
        pytest.param(MegatronStrategy(pp=2, tp=2, num_micro_batches=2), 4, 4, marks=pytest.mark.exhaustive),
    ],
    ids=["tp", "fsdp", "megatron"],
)
def test_ranks_may_have_parts_of_a_vocabulary_of_unequal_size(
    strategy: Any, ranks: int, rows: int, tmp_path: Path
) -> None:
    def run() -> dict[str, Any]:
        _train_odd(tmp_path / "bert", strategy, kind="bert", rows=rows)
        _train_odd(tmp_path / "split", strategy, rows=rows)
        return _train_odd(tmp_path / "split-again", strategy, rows=rows, resume=first)

    expected = _train_odd(tmp_path / "one", "single", rows=4)
    first = tmp_path / "one" / "epoch=0-step=1"
    torch.testing.assert_close(run_distributed(run, ranks, init=False, timeout=120)[0], expected, rtol=0, atol=1e-5)
    again = _train_odd(tmp_path / "one-again", "single", rows=4, resume=tmp_path / "split" / "epoch=0-step=1")
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-5)
    bert = _train_odd(tmp_path / "one-bert", "single", kind="bert", rows=4, resume=tmp_path / "bert" / "epoch=0-step=1")
    expected = _train_odd(tmp_path / "whole-bert", "single", kind="bert", rows=4)
    torch.testing.assert_close(bert, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.requires("transformers", reason="its models are split")
def test_heads_and_vocabularies_that_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"num_key_value_heads=2 is not divisible by tp=4. Use tp=2"):
        ready_plan(make_model("llama"), 4)
    odd = make_model("gpt2", vocab_size=25)
    with pytest.raises(ConfigurationError, match=r"Call model.resize_token_embeddings\(pad_to_multiple_of=2\)"):
        ready_plan(odd, 2, loss_parallel=True)
    with pytest.raises(ConfigurationError, match="sequence_parallel=True is not supported for GPT-2"):
        ready_plan(odd, 2, sequence_parallel=True)
    with pytest.raises(ConfigurationError, match="no built-in tensor-parallel plan supports Linear"):
        ready_plan(torch.nn.Linear(2, 2), 2)
