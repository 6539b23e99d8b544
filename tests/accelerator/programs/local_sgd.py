"""Local SGD with gradient accumulation: `local_sgd.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.accelerator.programs.synthetic import Accuracy, Record, classifier, rows
from trainwright import Accelerator
from trainwright.local_sgd import LocalSGD
from trainwright.utils import set_seed


def training_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train in a block for each epoch, and evaluate between them."""
    accelerator = Accelerator(
        cpu=True, mixed_precision="no", gradient_accumulation_steps=config["accumulate"], **options
    )
    set_seed(config["seed"])
    train_dataloader: Any = DataLoader(rows(48), shuffle=True, batch_size=2)
    eval_dataloader: Any = DataLoader(rows(11, seed=1), shuffle=False, batch_size=2)
    model, record, metric, metrics = classifier().to(accelerator.device), Record(), Accuracy(), []
    optimizer: Any = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for _ in range(config["num_epochs"]):
        model.train()
        with LocalSGD(
            accelerator=accelerator, model=model, local_sgd_steps=config["local_sgd_steps"], enabled=True
        ) as local_sgd:
            for batch in train_dataloader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
                    record.add(batch, loss)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
        model.eval()
        for inputs, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            metric.add_batch(predictions=predictions, references=references)
        metrics.append(metric.compute())
    accelerator.end_training()
    return {"batches": record.batches, "losses": record.losses, "metrics": metrics}
