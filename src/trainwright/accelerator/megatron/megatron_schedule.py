"""Placeholders of Accelerate's Megatron-LM scripts: loaders of token files, and schedules of the plugin."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.strategies.deepspeed.placeholders import DummyScheduler

if TYPE_CHECKING:
    from trainwright.strategies.megatron.plugin import MegatronLMPlugin


class MegatronLMDummyDataLoader:
    """Description of loaders of token files. The name and arguments are Accelerate's.

    Pass the object to `prepare` up to three times. The results are infinite iterators over batches of the training, the
    validation and the test part, or None for an empty part. Batches are those of `TokenDataset`.

    Args:
        data_path: The path of a token file, a list of paths, or a list of alternating weights and paths (`[0.3, "a",
            0.7, "b"]`). Text with these elements is accepted, too.
        seq_length: Tokens of a sample.
        splits_string: Proportions of the three parts. Default: `"969,30,1"`.
        micro_batch_size: Samples of a micro-batch. Default: 1.
        seed: Seed of the order. Default: 1234.

    Raises:
        ConfigurationError: An argument is missing or unknown, or has an invalid value.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        # Arguments by keyword only, as in Accelerate, whose loaders take any others too.
        defaults = {"splits_string": "969,30,1", "micro_batch_size": 1, "seed": 1234}
        for name in dataset_kwargs:
            if name not in (*defaults, "data_path", "seq_length"):
                raise ConfigurationError(
                    f"MegatronLMDummyDataLoader: {name} is not supported.{nearest(name, defaults)} It takes data_path, "
                    f"seq_length, {', '.join(defaults)}."
                )
        for name in ("data_path", "seq_length"):
            if not dataset_kwargs.get(name):
                raise ConfigurationError(f"MegatronLMDummyDataLoader needs {name}=.")
        arguments: dict[str, Any] = defaults | dataset_kwargs
        self.length = arguments["seq_length"]
        self.batch_size = arguments["micro_batch_size"]
        self.seed = arguments["seed"]
        self.files = _files(arguments["data_path"])
        self.splits = _fractions(str(arguments["splits_string"]))

    def loader(self, part: int) -> DataLoader[Any] | None:
        """Return the loader of a part: 0 for training, 1 for validation, 2 for tests. None if the part is empty."""
        from trainwright.data.tokens.token_dataset import TokenDataset

        split = self.splits[part]
        if split[0] >= split[1]:
            return None
        data = TokenDataset(self.files, self.length, split=split, seed=self.seed)
        return DataLoader(data, self.batch_size, shuffle=not part, drop_last=True)


def _fractions(text: str) -> list[tuple[float, float]]:
    """Return the bounds of the three parts of the data: `"969,30,1"` is (0, 0.969), (0.969, 0.999), …."""
    try:
        proportions = [float(part) for part in text.split(",")]
    except ValueError:
        proportions = []
    if len(proportions) > 3 or not sum(proportions) > 0 or min(proportions) < 0:
        raise ConfigurationError(f"splits_string={text!r}: write up to three proportions, such as '969,30,1'.")
    ends = [sum(proportions[:num]) / sum(proportions) for num in range(4)]
    return [(begin, min(end, 1.0)) for begin, end in pairwise(ends)]


def _files(data_path: Any) -> Any:
    """Return the files as an argument of `TokenDataset`: a list of paths, or a dict of paths and weights.

    `[0.3, "a", 0.7, "b"]` becomes `{"a": 0.3, "b": 0.7}`.
    """
    words = data_path.split() if isinstance(data_path, str) else list(data_path)
    weights = words[::2]
    paths = words[1::2]
    if len(weights) != len(paths) or not all(_is_number(word) for word in weights):
        return words  # paths without weights
    return {str(path): float(weight) for path, weight in zip(paths, weights, strict=True)}


def _is_number(word: object) -> bool:
    try:
        return float(str(word)) >= 0
    except ValueError:
        return False


class MegatronLMDummyScheduler(DummyScheduler):
    """Placeholder for the schedule of `MegatronLMPlugin` until `prepare`. The name and arguments are Accelerate's.

    Args:
        optimizer: The optimizer that is prepared together with the placeholder.
        total_num_steps: Number of optimizer steps. Default: None, which is `train_iters` or `lr_decay_iters` of the
            plugin. The plugin's numbers have priority.
        warmup_num_steps: Steps in which the learning rate increases from 0. The plugin has priority. Default: 0.
        kwargs: Accepted without effect: they are for schedules of Megatron-LM.
    """

    message_before_real = (
        "MegatronLMDummyScheduler is a placeholder for the schedule of MegatronLMPlugin. Prepare it with "
        "Accelerator(megatron_lm_plugin=…), or use a scheduler of torch."
    )

    def __init__(
        self, optimizer: Optimizer, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: object
    ) -> None:
        super().__init__(optimizer, total_num_steps, warmup_num_steps)


class MegatronSchedule(LRScheduler):
    """Schedule that increases the learning rate linearly from 0, and then decreases it to `min_lr`.

    Args:
        optimizer: The optimizer. Its learning rates are the maximum values of the schedule.
        plugin: The plugin with the options of the schedule.
        total: Number of decay steps, used if the plugin sets no number.
        warmup: Number of warmup steps, used if the plugin sets no number or fraction.
    """

    def __init__(self, optimizer: Optimizer, plugin: MegatronLMPlugin, total: int, warmup: int) -> None:
        self._style = plugin.lr_decay_style
        self._min_lr = plugin.min_lr
        self._total = plugin.train_iters or total  # steps until the weight decay has its last value
        self._decay = plugin.lr_decay_iters or self._total  # steps until the learning rate is `min_lr`, with warmup
        if self._decay < 1:
            raise ConfigurationError("MegatronLMDummyScheduler needs total_num_steps, or MegatronLMPlugin train_iters.")
        if plugin.lr_warmup_fraction is not None:
            warmup = int(plugin.lr_warmup_fraction * self._decay)
        elif plugin.lr_warmup_iters is not None:
            warmup = plugin.lr_warmup_iters
        self._warmup = warmup
        self._wd_style = plugin.weight_decay_incr_style
        self._first_wd = plugin.start_weight_decay
        self._last_wd = plugin.end_weight_decay
        if self._wd_style != "constant" and (self._first_wd is None or self._last_wd is None):
            raise ConfigurationError(
                f"weight_decay_incr_style={self._wd_style!r} needs start_weight_decay and end_weight_decay."
            )
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each group. Also set the weight decay of each group."""
        first = self._first_wd
        last = self._last_wd
        if self._wd_style != "constant" and first is not None and last is not None:
            part = _progress(self._wd_style, self.last_epoch / max(1, self._total))
            for group in self.optimizer.param_groups:
                group["weight_decay"] = first + part * (last - first)
        return [self._at(self.last_epoch, float(base)) for base in self.base_lrs]

    def _at(self, num_steps: int, base: float) -> float:
        """Return the learning rate after a number of steps, for a maximum of `base`."""
        if self._warmup and num_steps <= self._warmup:
            return base * num_steps / self._warmup
        if self._style == "constant":
            return base
        part = _progress(self._style, (num_steps - self._warmup) / max(1, self._decay - self._warmup))
        return base + part * (self._min_lr - base)


def _progress(style: str, part: float) -> float:
    """Return how far a value has moved from its first (0) to its last one (1), after a part of the steps."""
    part = min(1.0, part)
    if style == "linear":
        return part
    return 0.5 * (1 - math.cos(math.pi * part))
