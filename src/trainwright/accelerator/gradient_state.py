"""Options and state of gradient accumulation in user-written loops, with Accelerate's names."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import torch

from trainwright.core.errors import ConfigurationError
from trainwright.processes.process_group import Processes
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.step_group import LoopGradients
from trainwright.strategies.step_groups import StepGroups
from trainwright.strategies.steps.gradients import Gradients


@dataclass(slots=True)
class GradientAccumulationPlugin:
    """Options of gradient accumulation in an `Accelerator`. `short_group` is not in Hugging Face's Accelerate.

    Args:
        num_steps: Micro-batches of one optimizer step. Default: None, which is 1.
        adjust_scheduler: Accepted without effect: schedules advance with optimizer steps. Default: True.
        sync_with_dataloader: End each pass over the data with an optimizer step, even if the last group is short.
            False: the next pass continues the group, so that no group is short. Default: True.
        sync_each_batch: Average gradients over processes after every micro-batch instead of after the last one of a
            step. Default: False.
        short_group: Divisor of the loss in `backward(loss)` if the last group of a pass has fewer than `num_steps`
            micro-batches. `"steps"`: `num_steps`, as in Accelerate. `"mean"`: the number of micro-batches in the group.
            Default: None, which is `"steps"`, with a warning at the first short group.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    short_group: Literal["steps", "mean"] | None = None

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            check_steps("num_steps", self.num_steps)
        if self.short_group not in (None, "steps", "mean"):
            raise ConfigurationError(
                f"short_group={self.short_group!r}: expected 'steps' (divide by num_steps), 'mean' (divide by the "
                "number of micro-batches in the group) or None ('steps', with a warning)."
            )
        if self.short_group is not None and not self.sync_with_dataloader:
            raise ConfigurationError(
                f"short_group={self.short_group!r} with sync_with_dataloader=False has no effect: the next pass over "
                "the loader completes a short group. Remove short_group."
            )


def check_steps(name: str, value: object) -> int:
    """Return `value`. Raise a ConfigurationError with the argument's `name` if it is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name}={value!r}: write a whole number of at least 1.")
    return value


class LoopGroups(StepGroups):
    """The groups of an Accelerator's loop.

    Args:
        engine: See `LoopGradients`.
        num_steps: Micro-batches of one optimizer step.
        plugin: Options of accumulation.
        warns: Warn about the first short group if the plugin's `short_group` is None.
    """

    # The groups of all Accelerators, from oldest to newest, by number. Weak, so that an Accelerator that the script no
    # longer references is freed.
    _living: ClassVar[weakref.WeakValueDictionary[int, LoopGroups]] = weakref.WeakValueDictionary()
    _numbers: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(
        self, engine: LoopGradients, num_steps: int, plugin: GradientAccumulationPlugin, *, warns: bool
    ) -> None:
        super().__init__(
            engine,
            num_steps,
            ends_with_data=plugin.sync_with_dataloader,
            short_group=plugin.short_group,
            warns=warns,
        )
        self.plugin = plugin
        LoopGroups._living[next(LoopGroups._numbers)] = self

    @staticmethod
    def newest() -> LoopGroups:
        """Return the groups of the newest Accelerator that exists.

        Without an Accelerator, return new groups of one micro-batch each.
        """
        living = list(LoopGroups._living.values())
        if living:
            return living[-1]
        host = torch.device("cpu")
        one_process = DataRanks.of(Processes())
        engine = LoopGradients(Gradients(host), one_process, host, lambda models: [])
        return LoopGroups(engine, 1, GradientAccumulationPlugin(), warns=False)


class GradientState:
    """State of gradient accumulation in a loop, with Accelerate's names. Each read returns the current value.

    `GradientState()` shows the state of the newest Accelerator. Without an Accelerator, every micro-batch is followed
    by an optimizer step.

    Args:
        gradient_accumulation_plugin: The expected options. Default: None, which accepts all options.
        groups: The groups to show. Default: None, which are those of the newest Accelerator.

    Raises:
        ConfigurationError: The options differ from those of `gradient_accumulation_plugin`.
    """

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        *,
        groups: LoopGroups | None = None,
    ) -> None:
        self._groups = groups or LoopGroups.newest()
        if gradient_accumulation_plugin not in (None, self._groups.plugin):  # compares the fields
            raise ConfigurationError(
                "GradientState does not change gradient accumulation. Pass the plugin in "
                "Accelerator(gradient_accumulation_plugin=…)."
            )

    @staticmethod
    def _reset_state() -> None:
        """Let the next `GradientState()` show new groups, as without an Accelerator."""
        LoopGroups._living.clear()

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The fields of the `GradientAccumulationPlugin`."""
        return asdict(self._groups.plugin)

    @property
    def adjust_scheduler(self) -> bool:
        """`adjust_scheduler` of the `GradientAccumulationPlugin`."""
        return self._groups.plugin.adjust_scheduler

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether an optimizer step follows; see `StepGroups.set_sync_gradients`."""
        self._groups.set_sync_gradients(sync_gradients)

    @property
    def num_steps(self) -> int:
        """Micro-batches of one optimizer step."""
        return self._groups.num_steps

    @property
    def sync_with_dataloader(self) -> bool:
        """True if a pass over the data ends with an optimizer step."""
        return self._groups.ends_with_data

    @property
    def sync_gradients(self) -> bool:
        """True if an optimizer step follows the current micro-batch."""
        return self._groups.sync_gradients

    @property
    def active_dataloader(self) -> Any:
        """The innermost prepared loader that is being read, or None."""
        reading = self._groups.reading
        return None if reading is None else reading.loader

    @property
    def in_dataloader(self) -> bool:
        """True while a prepared loader is being read."""
        return self._groups.reading is not None

    @property
    def end_of_dataloader(self) -> bool:
        """True at the last micro-batch of the prepared loader that is being read. False outside of prepared loaders."""
        reading = self._groups.reading
        return reading is not None and reading.ends_data

    @property
    def remainder(self) -> int:
        """Samples of a pass's last micro-batch on all ranks. 0 if it is full. -1 if unknown or no loader is read."""
        loader = self.active_dataloader
        return -1 if loader is None else loader.remainder
