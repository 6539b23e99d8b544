"""Metrics over all processes, with the padding of the last batch cut by hand: `multi_process_metrics.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.accelerator.programs.synthetic import Accuracy, classifier, rows
from trainwright import Accelerator
from trainwright.utils import set_seed


def evaluation_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Evaluate with `gather`, as scripts do that are older than `gather_for_metrics`."""
    accelerator = Accelerator(**options)
    set_seed(config["seed"])
    eval_dataloader: Any = DataLoader(rows(config["num"]), shuffle=False, batch_size=4)
    model, metric = classifier(), Accuracy()
    model, eval_dataloader = accelerator.prepare(model, eval_dataloader)
    model.eval()
    samples_seen, seen = 0, []
    for step, batch in enumerate(eval_dataloader):
        with torch.no_grad():
            outputs = model(batch[0])
        predictions = outputs.argmax(dim=-1)
        predictions, references, inputs = accelerator.gather((predictions, batch[1], batch[0]))
        if accelerator.use_distributed:
            if step == len(eval_dataloader) - 1:
                predictions = predictions[: len(eval_dataloader.dataset) - samples_seen]
                references = references[: len(eval_dataloader.dataset) - samples_seen]
                inputs = inputs[: len(eval_dataloader.dataset) - samples_seen]
            else:
                samples_seen += references.shape[0]
        metric.add_batch(predictions=predictions, references=references)
        seen.append(inputs)
    accelerator.end_training()
    return {"metric": metric.compute(), "seen": torch.cat(seen)}
