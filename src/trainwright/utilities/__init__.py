"""Small helpers with the names of Lightning's `utilities`, most of them defined in other modules.

`rank_zero_only`, `rank_zero_info`, `rank_zero_warn` and `rank_zero_deprecation` act on the main process, `grad_norm`
and `measure_flops` measure a model, `move_data_to_device` moves a batch, `CombinedLoader` reads several loaders, and
`AttributeDict` is the class of hyper-parameters. `local_files_only` checks that a model of Hugging Face's hub can
be loaded.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from trainwright.core.host.hub import local_files_only
from trainwright.core.host.rank_zero import (
    rank_prefixed_message,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from trainwright.core.hyperparameters import Hyperparameters as AttributeDict
from trainwright.core.measures import grad_norm, measure_flops
from trainwright.core.names.foreign_names import missing
from trainwright.core.tree import Batch, move
from trainwright.data.combined import CombinedLoader

__all__ = [
    "AttributeDict",
    "CombinedLoader",
    "grad_norm",
    "local_files_only",
    "measure_flops",
    "move_data_to_device",
    "rank_prefixed_message",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]


def move_data_to_device(batch: Batch, device: torch.device | str | int) -> Any:
    """Return a batch with its tensors on a device, without waiting for copies from pinned memory.

    Args:
        batch: tensors in any nesting of lists, tuples, mappings and dataclasses; other objects with a `to` method are
            moved as well.
        device: a device, its name, or the index of an accelerator.
    """
    return move(batch, torch.device(device))


def __getattr__(name: str) -> NoReturn:
    raise missing(__name__, name, __all__)
