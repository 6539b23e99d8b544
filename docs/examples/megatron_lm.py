"""Megatron-LM's options: a GPT-2 in pipeline stages or split layers, by `MegatronLMPlugin`.

torchrun --nproc-per-node 2 docs/examples/megatron_lm.py
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from trainwright import Accelerator
from trainwright.utils import MegatronLMDummyScheduler, MegatronLMPlugin, set_seed


def make_model() -> GPT2LMHeadModel:
    """Return a small GPT-2 without dropout."""
    sizes = {"n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=1, eos_token_id=1))


def training_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train, evaluate and save. A call of the model runs forward and backward of all micro-batches."""
    plugin = MegatronLMPlugin(
        tp_degree=config["tp"], pp_degree=config["pp"], num_micro_batches=2, gradient_clipping=1.0
    )
    accelerator = Accelerator(megatron_lm_plugin=plugin, **options)
    set_seed(config["seed"])
    tokens = torch.randint(0, 32, (32, 8), generator=torch.Generator().manual_seed(0))
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    train: Any = DataLoader(data[:24], batch_size=2)  # rows of a micro-batch on each data-parallel rank
    test: Any = DataLoader(data[24:], batch_size=2)
    model: Any = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scheduler: Any = MegatronLMDummyScheduler(optimizer=optimizer, total_num_steps=12, warmup_num_steps=2)
    model, optimizer, scheduler, train, test = accelerator.prepare(model, optimizer, scheduler, train, test)
    losses, evals = [], []
    for _ in range(config["num_epochs"]):
        model.train()
        for batch in train:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            evals.append(torch.stack([model(**batch).loss for batch in test]).mean().item())
        accelerator.print(f"evaluation loss: {evals[-1]:.3f}")
    accelerator.save_state(os.path.join(config["output_dir"], "state"))  # may be loaded with other degrees
    accelerator.end_training()
    return {"losses": losses, "evals": evals}


if __name__ == "__main__":
    folder = os.environ.get("RUN") or tempfile.mkdtemp()
    stages = int(os.environ.get("WORLD_SIZE", "1"))
    training_function({"lr": 0.01, "num_epochs": 2, "seed": 3, "tp": 1, "pp": stages, "output_dir": folder})
