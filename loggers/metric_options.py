"""The options of a call of `log`, and the settings of a metric that result from them."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainwright.core.errors import ConfigurationError

Reduction = str | Callable[[Tensor], Tensor]
_KINDS = ("mean", "sum", "min", "max")
_AS_KIND: dict[Any, str] = {
    **dict.fromkeys((torch.mean, "avg", "average"), "mean"),
    **dict.fromkeys((torch.sum, builtins.sum), "sum"),
    **dict.fromkeys((torch.min, torch.amin, builtins.min), "min"),
    **dict.fromkeys((torch.max, torch.amax, builtins.max), "max"),
}


class MetricSettings(NamedTuple):
    """Options of one key, with default values applied; see `MetricBuffer.log`."""

    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    # A name of `_KINDS` or a function. None after a resume, in place of a function, until `log` passes it again.
    reduction: Reduction | None
    sync_dist: bool | None
    main_only: bool  # `rank_zero_only`


class LogOptions(NamedTuple):
    """Arguments of a call of `log`, and the place of the call.

    A call of `log` builds a plain tuple of these fields in this order, which is faster than a LogOptions, and compares
    it with that of the previous call for the same name.
    """

    prog_bar: bool
    logger: bool
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: Reduction
    sync_dist: bool | None
    add_dataloader_idx: bool
    rank_zero_only: bool
    in_step: bool
    dataloader_idx: int | None

    def settings(self, name: str, *, is_train: bool) -> MetricSettings:
        """Apply the defaults, which depend on the hook that calls `log`.

        Args:
            name: the metric's name, for errors.
            is_train: True in the train stage.

        Raises:
            ConfigurationError: neither `on_step` nor `on_epoch` is set, `on_step` is set outside of a step, or the
                reduction is unknown.
        """
        in_training_step = is_train and self.in_step
        on_step = in_training_step if self.on_step is None else bool(self.on_step)
        on_epoch = not in_training_step if self.on_epoch is None else bool(self.on_epoch)
        if not on_step and not on_epoch:
            raise ConfigurationError(
                f"log({name!r}, on_step={self.on_step}, on_epoch={self.on_epoch}) would have no effect. Set "
                "on_step=True or on_epoch=True."
            )
        if on_step and not self.in_step:
            raise ConfigurationError(
                f"log({name!r}, on_step=True) was called outside a step, where there is no step to log it for. Remove "
                "on_step, or call it in a *_step or a hook of a batch."
            )
        return MetricSettings(
            on_step=on_step,
            on_epoch=on_epoch,
            prog_bar=bool(self.prog_bar),
            logger=bool(self.logger),
            reduction=parse_reduction(name, self.reduce_fx),
            sync_dist=None if self.sync_dist is None else bool(self.sync_dist),
            main_only=bool(self.rank_zero_only),
        )


def parse_reduction(name: str, reduce_fx: Reduction) -> Reduction:
    """Return the name of a reduction (`"mean"`, `"sum"`, `"min"`, `"max"`), or the user's function.

    Names may be in upper case. `"avg"`, `"average"`, and functions of torch and Python such as `torch.mean` and `max`
    also select these reductions.

    Raises:
        ConfigurationError: `reduce_fx` is another string or object.
    """
    if isinstance(reduce_fx, str):
        reduce_fx = reduce_fx.lower()
    reduction = reduce_fx
    if isinstance(reduce_fx, Hashable):
        reduction = _AS_KIND.get(reduce_fx, reduce_fx)
    if callable(reduction) or reduction in _KINDS:
        return reduction
    raise ConfigurationError(
        f"log({name!r}, reduce_fx={reduce_fx!r}): expected 'mean', 'sum', 'min', 'max', the torch function of that "
        "name, or a function from a 1-D tensor of all values to one value."
    )


def same_function(first: Reduction | None, second: Reduction | None) -> bool:
    """Return whether two reductions have the same code.

    A lambda in a step is a new object at every step, always with the same code object.
    """
    code = getattr(first, "__code__", None)
    return code is not None and code is getattr(second, "__code__", None)
