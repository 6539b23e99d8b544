"""Cross-validation, whose test predictions are averaged over folds: `cross_validation.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from tests.accelerator.programs.synthetic import Accuracy, Record, classifier, rows
from trainwright import Accelerator
from trainwright.utils import set_seed


def get_fold_dataloaders(train_idxs: Any, valid_idxs: Any, batch_size: int) -> tuple[Any, Any, Any]:
    """Return the loaders of a fold, and that of the test set."""
    data, test = rows(24), rows(11, seed=1)
    return (
        DataLoader(Subset(data, train_idxs), shuffle=True, batch_size=batch_size),
        DataLoader(Subset(data, valid_idxs), shuffle=False, batch_size=batch_size),
        DataLoader(test, shuffle=False, batch_size=batch_size),
    )


def training_function(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Train a model for each fold, and average the predictions of all on the test set."""
    test_predictions, folds, metrics, metric = [], [], [], Accuracy()
    accelerator = Accelerator(**options)
    set_seed(config["seed"])
    for i, valid_idxs in enumerate(torch.arange(24).chunk(3)):
        train_idxs = [j for j in range(24) if j not in valid_idxs]
        train_dataloader, eval_dataloader, test_dataloader = get_fold_dataloaders(
            train_idxs, valid_idxs.tolist(), config["batch_size"]
        )
        set_seed(config["seed"] + i)
        model, record = classifier().to(accelerator.device), Record()
        optimizer: Any = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
        lr_scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        prepared = accelerator.prepare(
            model, optimizer, train_dataloader, eval_dataloader, test_dataloader, lr_scheduler
        )
        model, optimizer, train_dataloader, eval_dataloader, test_dataloader, lr_scheduler = prepared
        for _ in range(config["num_epochs"]):
            model.train()
            for batch in train_dataloader:
                loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
                record.add(batch, loss)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            model.eval()
            for inputs, labels in eval_dataloader:
                with torch.no_grad():
                    predictions = model(inputs).argmax(dim=-1)
                predictions, references = accelerator.gather_for_metrics((predictions, labels))
                metric.add_batch(predictions=predictions, references=references)
            metrics.append(metric.compute())
        fold_predictions, test_references = [], []
        for inputs, labels in test_dataloader:
            with torch.no_grad():
                outputs = model(inputs)
            predictions, references = accelerator.gather_for_metrics((outputs, labels))
            fold_predictions.append(predictions.cpu())
            test_references.append(references.cpu())
        test_predictions.append(torch.cat(fold_predictions, dim=0))
        folds.append({"batches": record.batches, "losses": record.losses})
        del prepared
        model, optimizer, train_dataloader, eval_dataloader, test_dataloader, lr_scheduler = accelerator.free_memory(
            model, optimizer, train_dataloader, eval_dataloader, test_dataloader, lr_scheduler
        )
    preds = torch.stack(test_predictions, dim=0).sum(dim=0).div(3).argmax(dim=-1)
    metric.add_batch(predictions=preds, references=torch.cat(test_references))
    accelerator.end_training()
    return {"folds": folds, "metrics": metrics, "test": metric.compute()}
