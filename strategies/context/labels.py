"""Targets of transformers models: the labels that count in the loss."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100  # the label of a position without a target, in transformers and torch


def shifted(labels: Tensor) -> Tensor:
    """Return the target of each position, which is the label of the next position. The last position has no target."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def count_targets(batch: object, *, shifts: bool) -> Tensor | None:
    """Return the number of targets of a batch (0-dim), or None if the batch has no labels.

    Args:
        shifts: The model shifts labels: the target of a position is the label of the next position.
    """
    if not isinstance(batch, Mapping):
        return None
    targets = batch.get("shift_labels")
    labels = batch.get("labels")
    if targets is None and isinstance(labels, Tensor):
        targets = shifted(labels) if shifts and labels.dim() > 1 else labels
    return None if targets is None else (targets != IGNORED).sum()


def shifts_labels(module: nn.Module) -> bool | None:
    """Return whether the loss of a transformers model shifts labels, or None if the module computes no loss."""
    kind: object = getattr(module, "loss_type", None)
    if kind is None and type(module).__name__.endswith("LMHeadModel"):
        return True  # transformers derives no loss type from the class name of GPT-2
    return kind == "ForCausalLM" if isinstance(kind, str) else None
