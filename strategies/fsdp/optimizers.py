"""Optimizers over parameters of several kinds: whole ones, and pieces on one mesh and on another."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.capabilities import REFUSALS
from trainwright.strategies.precision import Precision
from trainwright.strategies.steps.binding import need_closure

_IN_PLACE = (torch.optim.Adafactor, torch.optim.Rprop)  # steps that torch 2.13 has no form of for pieces


def check_optimizers(optimizers: Iterable[Optimizer], precision: Precision) -> None:
    """Check that optimizers can step a model that lies in pieces.

    Raises:
        ConfigurationError: one looks at whole vectors, or cannot step pieces.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, _IN_PLACE):
            raise ConfigurationError(
                f"{type(optimizer).__name__} of torch cannot step weights that lie in pieces. Use another optimizer, "
                "such as AdamW, or strategy='ddp'."
            )
    if need_closure(optimizers, precision):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ConfigurationError(f"{names} {REFUSALS['closures'].format(strategy='a sharded strategy')}")
