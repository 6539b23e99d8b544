"""Schedules of learning rate and weight decay that `MegatronLMPlugin` describes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.deepspeed.placeholders import DummyScheduler

if TYPE_CHECKING:
    from trainwright.strategies.megatron.plugin import MegatronLMPlugin


class MegatronLMDummyDataLoader:
    """An indexed data set of Megatron-LM, which is not supported.

    Args:
        dataset_kwargs: Any.

    Raises:
        ConfigurationError: Always.
    """

    def __init__(self, **dataset_kwargs: object) -> None:
        raise ConfigurationError(
            "MegatronLMDummyDataLoader names an indexed data set of Megatron-LM, which is not supported. Prepare a "
            "DataLoader of a data set that returns input_ids and labels."
        )


class MegatronLMDummyScheduler(DummyScheduler):
    """Stands for the schedule of `MegatronLMPlugin` until `prepare`. The name and arguments are Accelerate's.

    Args:
        optimizer: That is prepared with it.
        total_num_steps: Optimizer steps of the training, unless the plugin has `train_iters` or `lr_decay_iters`.
        warmup_num_steps: Steps in which the learning rate increases from 0, unless the plugin has them.
        kwargs: Accepted; make no difference.
    """

    missing = (
        "MegatronLMDummyScheduler stands for the schedule of MegatronLMPlugin. Prepare it with "
        "Accelerator(megatron_lm_plugin=…), or use a scheduler of torch."
    )

    def __init__(
        self, optimizer: Optimizer, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: object
    ) -> None:
        super().__init__(optimizer, total_num_steps, warmup_num_steps)


class MegatronSchedule(LRScheduler):
    """Increases the learning rate linearly from 0, and decreases it to `min_lr`.

    Args:
        optimizer: Its learning rates are the largest ones.
        plugin: Has the form of the schedule.
        total, warmup: Steps, where the plugin has none.
    """

    def __init__(self, optimizer: Optimizer, plugin: MegatronLMPlugin, total: int, warmup: int) -> None:
        self._style, self._min_lr = plugin.lr_decay_style, plugin.min_lr
        self._total = plugin.train_iters or total
        self._decay = plugin.lr_decay_iters or self._total
        if self._decay < 1:
            raise ConfigurationError("MegatronLMDummyScheduler needs total_num_steps, or MegatronLMPlugin train_iters.")
        own = plugin.lr_warmup_iters if plugin.lr_warmup_iters is not None else warmup
        fraction = plugin.lr_warmup_fraction
        self._warmup = own if fraction is None else int(fraction * self._decay)
        self._wd_style = plugin.weight_decay_incr_style
        self._wd = plugin.start_weight_decay, plugin.end_weight_decay
        if self._wd_style != "constant" and None in self._wd:
            raise ConfigurationError(
                f"weight_decay_incr_style={self._wd_style!r} needs start_weight_decay and end_weight_decay."
            )
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each group, and set the weight decays."""
        start, end = self._wd
        if self._wd_style != "constant" and start is not None and end is not None:
            part = _rise(self._wd_style, self.last_epoch / max(1, self._total))
            for group in self.optimizer.param_groups:
                group["weight_decay"] = start + part * (end - start)
        return [self._at(self.last_epoch, float(base)) for base in self.base_lrs]

    def _at(self, done: int, base: float) -> float:
        if self._warmup and done <= self._warmup:
            return base * done / self._warmup
        if self._style == "constant":
            return base
        part = _rise(self._style, (done - self._warmup) / max(1, self._decay - self._warmup))
        return base + part * (self._min_lr - base)


def _rise(style: str, part: float) -> float:
    part = min(1.0, part)
    return part if style == "linear" else 0.5 * (1 - math.cos(math.pi * part))
