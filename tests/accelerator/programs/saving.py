"""Weights saved for transformers after clipped steps, as `run_clm_no_trainer.py` saves them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import default_data_collator

from tests.accelerator.programs.language_model import group_texts, make_model
from tests.accelerator.programs.synthetic import Record, sentences
from trainwright import Accelerator
from trainwright.utils import set_seed


def training_function(args: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train for an epoch and save the model, its configuration included."""
    accelerator = Accelerator(**options)
    set_seed(args["seed"])
    with accelerator.main_process_first():
        data: Any = group_texts(sentences(60))[:16]
    train_dataloader: Any = DataLoader(data, shuffle=True, collate_fn=default_data_collator, batch_size=2)
    model, record = make_model(), Record()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args["lr"])
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    for batch in train_dataloader:
        loss = model(**batch).loss
        record.add(batch, loss)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.wait_for_everyone()
    unwrapped_model: Any = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        args["output_dir"],
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return {"batches": record.batches, "losses": record.losses}
