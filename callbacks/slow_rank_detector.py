"""Detect a rank that delays the others, and the part of the step that is slow."""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from trainwright.callbacks.callback import Callback, Order
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.run import Run
from trainwright.core.state import Group, StepResult
from trainwright.core.task import TaskModule
from trainwright.core.tree import Batch

_PARTS = ("data", "forward", "backward")
_ADVICE = {
    "data": ("waiting for data", "Look at its disk and its loader workers (num_workers)"),
    "forward": ("computing", "Compare its clock, temperature and other processes with those of the others"),
}
_LEAST_SHARE = 0.1  # minimum share of a step that a slow rank delays the others by


class SlowRankDetector(Callback):
    """Callback that compares the step times of ranks, and warns of one that is slower than the others.

    A rank is slow if its wait for data and its forward take longer than on the median rank. The warning names the
    slower of the two. The backward includes the wait for other ranks. If no rank is slow and the backward takes much
    longer than the forward on every rank, communication is slow.

    Each rank measures by its own clock, on an accelerator by events. Every `every_n_steps` steps an asynchronous
    collective starts. Its result is read `every_n_steps` steps later, so no step waits for it.

    Args:
        every_n_steps: steps between two comparisons, at least 1. Default: 50.
        factor: a rank is slow if its time is more than this multiple of the median rank's time, and the difference is
            at least a tenth of the step. Default: 1.5.
        communication_factor: communication is slow if the backward takes more than this multiple of the forward on
            every rank. Without communication the multiple is about 2. Default: 5.

    Attributes:
        seconds: seconds per step of each rank in the last comparison, for data, forward and backward. Empty before the
            first comparison.

    Raises:
        ConfigurationError: a number of steps below 1, or a factor of at most 1.
    """

    reads_only = True
    order = Order.LAST

    def __init__(self, every_n_steps: int = 50, factor: float = 1.5, communication_factor: float = 5.0) -> None:
        if every_n_steps < 1 or factor <= 1 or communication_factor <= 1:
            raise ConfigurationError(
                f"SlowRankDetector(every_n_steps={every_n_steps}, factor={factor}, communication_factor="
                f"{communication_factor}): expected at least 1 step, and factors above 1."
            )
        self.every_n_steps = every_n_steps
        self.factor = factor
        self.communication_factor = communication_factor
        self.seconds: list[dict[str, float]] = []
        self._warned: set[str] = set()

    def on_train_start(self, trainer: Run, task: TaskModule) -> None:
        self._num_steps = 0
        self._data_s = 0.0
        self._marks: list[tuple[Any, Any, Any]] = []  # per micro-batch: its start, the start and end of backward
        self._waits_since_s: float | None = None  # end of the last step; None after a validation or an epoch
        self._pending: tuple[Any, torch.Tensor] | None = None

    def on_train_step_start(self, trainer: Run, task: TaskModule, group: Group) -> None:
        if self._waits_since_s is not None:
            self._data_s += time.perf_counter() - self._waits_since_s

    def on_train_batch_start(self, trainer: Run, task: TaskModule, batch: Batch, batch_idx: int) -> None:
        self._start = _mark(task.device)

    def on_before_backward(self, trainer: Run, task: TaskModule, loss: torch.Tensor) -> None:
        self._middle = _mark(task.device)

    def on_after_backward(self, trainer: Run, task: TaskModule) -> None:
        self._marks.append((self._start, self._middle, _mark(task.device)))

    def on_validation_start(self, trainer: Run, task: TaskModule) -> None:
        self._waits_since_s = None

    def on_train_epoch_start(self, trainer: Run, task: TaskModule) -> None:
        self._waits_since_s = None

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        self._waits_since_s = time.perf_counter()
        self._num_steps += 1
        if self._num_steps < self.every_n_steps:
            return
        if self._pending is not None:
            self._compare(trainer, *self._pending)
        forward = sum(_seconds(start, middle) for start, middle, _ in self._marks)
        backward = sum(_seconds(middle, end) for _, middle, end in self._marks)
        own = torch.tensor([self._data_s, forward, backward], dtype=torch.float32).to(task.device) / self._num_steps
        gathered = own.repeat(trainer.world_size)
        work = dist.all_gather_into_tensor(gathered, own, async_op=True) if trainer.world_size > 1 else None
        self._pending = (work, gathered)
        self._num_steps = 0
        self._data_s = 0.0
        self._marks = []

    def _compare(self, trainer: Run, work: Any, gathered: torch.Tensor) -> None:
        if work is not None:
            work.wait()
        rows = gathered.view(-1, len(_PARTS)).tolist()
        self.seconds = [dict(zip(_PARTS, row, strict=True)) for row in rows]
        text = self._finding() if len(rows) > 1 and trainer.is_global_zero else ""
        key = text.partition(":")[0]
        if text and key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, TrainwrightWarning, stacklevel=2)

    def _finding(self) -> str:
        """Return a warning about what is slow, or an empty text."""
        own = [one["data"] + one["forward"] for one in self.seconds]
        middle = {part: statistics.median_low([one[part] for one in self.seconds]) for part in _PARTS}
        slowest = max(range(len(own)), key=own.__getitem__)
        usual = statistics.median_low(own)
        whole = statistics.median_low([sum(one.values()) for one in self.seconds])
        if own[slowest] > self.factor * usual and own[slowest] - usual > _LEAST_SHARE * whole:
            there = self.seconds[slowest]
            part = max(_ADVICE, key=lambda name: there[name] - middle[name])
            what, advice = _ADVICE[part]
            return (
                f"rank {slowest} is slow in {what}: {_ms(there[part])} per step, {_ms(middle[part])} on the median "
                f"rank. The others wait for it. {advice}."
            )
        least = min(one["backward"] for one in self.seconds)
        if least > self.communication_factor * max(one["forward"] for one in self.seconds):
            return (
                f"communication is slow: the backward takes {_ms(least)} per step on every rank, the forward "
                f"{_ms(middle['forward'])}. Use larger batches, accumulate_grad_batches, or a faster network."
            )
        return ""


def _mark(device: torch.device) -> Any:
    """Return the current time. On an accelerator it is an event in the current stream."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    """Return the seconds between two results of `_mark`. On an accelerator, wait for the event `end`."""
    if isinstance(start, float):
        return float(end) - start
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
