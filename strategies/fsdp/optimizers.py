"""Optimizers over parameters of several kinds: whole ones, and pieces on one mesh and on another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
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


def step_one_by_one(optimizers: Iterable[Optimizer]) -> None:
    """Let optimizers step parameters of several kinds one after the other: torch 2.13 takes no two kinds at once.

    Changes `foreach`, which torch sets to True by itself on accelerators, in the groups that need it.

    Raises:
        ConfigurationError: `foreach=True` or `fused=True` asks for what torch cannot do.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if not _is_mixed(group):
                continue
            for name in ("foreach", "fused"):
                if group.get(name):
                    raise ConfigurationError(
                        f"{type(optimizer).__name__}({name}=True), and a parameter group holds layers that are split "
                        "by the tensor-parallel plan beside some that are not, which torch cannot step together. Leave "
                        f"{name} out, or give the two kinds groups of their own."
                    )
            if "foreach" in group:
                group["foreach"] = False


def forget_one_by_one(optimizer: Optimizer, tree: Mapping[str, Any]) -> None:
    """Take what `step_one_by_one` has changed out of a saved state, which may be loaded where nothing is split."""
    for group, saved in zip(optimizer.param_groups, tree["groups"], strict=True):
        if _is_mixed(group) and saved.get("foreach") is False:
            saved["foreach"] = None


def _is_mixed(group: Mapping[str, Any]) -> bool:
    return len({p.device_mesh if isinstance(p, DTensor) else None for p in group["params"]}) > 1
