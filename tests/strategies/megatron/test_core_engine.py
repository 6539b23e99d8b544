"""Megatron-core's GPTModel and distributed optimizer train as torch does in one process."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.checkpoint.megatron_run import patch_cuda
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer, weights_of
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.task import TaskModule
from trainwright.strategies.megatron import core_engine
from trainwright.strategies.megatron.strategy import MegatronStrategy

pytestmark = [pytest.mark.engines, pytest.mark.requires("megatron.core", "trains its GPTModel")]
_NAMES = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-4}


class CausalTask(TaskModule):
    def __init__(self, kind: str = "llama", **options: Any) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        if kind == "gpt2":
            sizes = {"n_positions": 16, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, **sizes}
        else:
            sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8}
        config = transformers.AutoConfig.for_model(kind, **{"vocab_size": 64, **sizes, **options})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.model = transformers.AutoModelForCausalLM.from_config(config)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.log("loss", loss, on_step=True)
        return loss

    def num_items(self, batch: Any) -> torch.Tensor:
        return (batch["labels"][:, 1:] != -100).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self.model(**batch)
        assert output.logits.shape == (*batch["input_ids"].shape, 64)
        self.log("val_loss", output.loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        wide = [p for p in self.parameters() if p.dim() > 1]
        flat = [p for p in self.parameters() if p.dim() == 1]
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, **_NAMES)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer), "interval": "step"}]


def _batches(num: int = 10) -> list[dict[str, torch.Tensor]]:
    generator, found = torch.Generator().manual_seed(7), []
    for _ in range(num * 2):
        ids = torch.randint(1, 64, (2, 8), generator=generator)
        mask = (torch.arange(8) < torch.tensor([[8], [5]])).long()
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def _train(kind: str, strategy: Any, *, max_steps: int = 10, ckpt: Path | None = None, **given: Any) -> dict[str, Any]:
    task = CausalTask(kind)
    devices, accumulate = (1, 2) if strategy == "single" else ("auto", 1)
    given = {"devices": devices, "accumulate_grad_batches": accumulate, **given}
    trainer = quiet_trainer(strategy=strategy, max_steps=max_steps, gradient_clip_val=0.5, log_every_n_steps=1, **given)
    trainer.fit(task, _batches(), _batches(1), ckpt_path=ckpt)
    if ckpt is None and max_steps < 10:
        trainer.save_checkpoint(Path("half"))
    return {"losses": task.losses, "weights": weights_of(task), "val": trainer.callback_metrics.get("val_loss")}


def _train_core(kind: str, folder: Path) -> list[dict[str, Any]]:
    """Train ten steps without a break, and then five steps and five steps from their checkpoint."""
    patch_cuda()
    core_engine.check_cuda = lambda device_type: None
    os.chdir(folder)
    strategy = MegatronStrategy(engine="megatron-core", tp=2)
    full = _train(kind, strategy)
    _train(kind, strategy, max_steps=5)
    return [full, _train(kind, strategy, ckpt=Path("half"))]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_losses_weights_and_checkpoints_are_those_of_one_process(kind: str, tmp_path: Path) -> None:
    one = _train(kind, "single")
    found = run_distributed(partial(_train_core, kind, tmp_path), 4, timeout=120)
    with pytest.warns(TrainwrightWarning, match="start from scratch"):  # another number of processes
        resumed = _train(kind, "single", ckpt=tmp_path / "half")
    for rank, runs in enumerate(found):
        own = one["losses"][rank // 2 :: 2]  # ranks 0 and 1 see the first batch of each step
        assert runs[0]["losses"] == pytest.approx(own, abs=1e-5)
        assert runs[1]["losses"] == pytest.approx(own[5:], abs=1e-5)
    for run in (found[0][0], found[1][1], resumed):
        torch.testing.assert_close(run["weights"], one["weights"], rtol=0, atol=1e-4)
        assert float(run["val"]) == pytest.approx(float(one["val"]), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "model", "words"),
    [
        ({"pp": 2}, {}, "does not support pp=2"),
        ({"distributed_optimizer": False}, {}, "distributed_optimizer=False"),
        ({}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='linear'"),
        ({}, {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"tp": 2}, {"vocab_size": 63}, "pad_to_multiple_of=2"),
        ({}, {"kind": "mixtral"}, "0 models"),
    ],
)
def test_what_is_not_supported_is_refused_before_a_process_starts(
    options: dict[str, Any], model: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_engine, "check_cuda", lambda device_type: None)
    devices = options.get("pp", 1) * options.get("tp", 1)
    strategy = MegatronStrategy(engine="megatron-core", **options)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        quiet_trainer(strategy=strategy, devices=devices).fit(CausalTask(**model), _batches())


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs CUDA devices"):
        quiet_trainer(strategy=MegatronStrategy(engine="megatron-core")).fit(CausalTask(), _batches())
