"""What a run, its task and its data say for the `"auto"` values of DeepSpeed's configuration."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainwright.strategies.deepspeed.config import RunFacts
from trainwright.strategies.deepspeed.options import look_up
from trainwright.strategies.deepspeed.placeholders import DummyScheduler
from trainwright.strategies.engine import TrainingPlan


def collect_facts(
    model: nn.Module, plan: TrainingPlan, config: dict[str, Any], optimizer: Optimizer | None, *, dp_size: int
) -> RunFacts:
    """Collect what the configuration asks for, and nothing else: to know the data, it has to be loaded.

    Args:
        model: may name its width.
        plan: knows the data.
        config: the user's, with its `"auto"`.
        optimizer: what `configure_optimizers` returned; None where nothing is trained.
        dp_size: number of processes that see different data.
    """
    trains = optimizer is not None
    batch = trains and ("train_micro_batch_size_per_gpu" in config or "train_batch_size" in config)
    schedule = next((c.scheduler for c in plan.lr_scheduler_configs if isinstance(c.scheduler, DummyScheduler)), None)
    total: float = math.inf
    if trains and look_up(config, ("scheduler", "params", "total_num_steps")) == "auto":
        own = None if schedule is None else schedule.total_num_steps
        total = plan.estimated_stepping_batches if own is None else own
    return RunFacts(
        world_size=dp_size,
        micro_batch_size=plan.train_batch_size if batch else None,
        accumulate=plan.accumulate_grad_batches,
        hidden_size=_hidden_size(model),
        hyperparameters=None if optimizer is None else optimizer.param_groups[0],
        total_steps=total,
        warmup_steps=0 if schedule is None else schedule.warmup_num_steps,
    )


def _hidden_size(model: nn.Module) -> int | None:
    """Return the width that the `config` of the model or of a module in it names, as transformers' models do."""
    for module in model.modules():
        config = getattr(module, "config", None)
        sizes = getattr(config, "hidden_sizes", None)
        size = getattr(config, "hidden_size", None) or (max(sizes) if sizes else None)
        if isinstance(size, int):
            return size
    return None
