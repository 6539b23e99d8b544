"""Write the outputs of `trainwright predict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainwright.core.errors import TaskError
from trainwright.core.tree import Batch

_KEY = "predictions"


def write_predictions(batches: Sequence[Any], path: Path) -> dict[str, torch.Size]:
    """Write the outputs of `predict_step`, joined along their first dimension, as one safetensors file.

    Args:
        batches: the outputs of `predict_step` for each batch, in order: tensors of shape (batch, …), saved under
            "predictions", or mappings from names to such tensors, saved under those names.
        path: the file; its folder is created.
    """
    named = [_named(batch) for batch in batches]
    names = list(named[0]) if named else []
    if any(list(batch) != names for batch in named):
        raise TaskError("predict_step returned different names for different batches; a file cannot hold them as one.")
    joined = {name: torch.cat([batch[name].cpu() for batch in named]).contiguous() for name in names}
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.tmp")
    save_file(joined, staging)
    staging.replace(path)
    return {name: tensor.shape for name, tensor in joined.items()}


def _named(batch: Batch) -> dict[str, torch.Tensor]:
    found = dict(batch) if isinstance(batch, Mapping) else {_KEY: batch}
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.dim() == 0:
            raise TaskError(
                f"predict_step returned {type(value).__name__} ({name}), which `trainwright predict` cannot write. "
                "Return a tensor of shape (batch, ...) or a dict of them; or write in a callback, with --output none."
            )
    return found
