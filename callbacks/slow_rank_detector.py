"""Detect a rank that delays the others, and the part of the step that is slow."""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from trainwright.callbacks.callback import Callback, Order
from trainwright.core.errors import TrainwrightWarning
from trainwright.core.run import Run
from trainwright.core.state import Group, StepResult
from trainwright.core.task import TaskModule
from trainwright.core.tree import Batch

_PARTS = ("data", "forward", "backward")
_ADVICE = {
    "data": ("waiting for data", "Look at its disk and its loader workers (num_workers)"),
    "forward": ("computing", "Compare its clock, temperature and other processes with those of the others"),
}
_MIN_SHARE = 0.1  # minimum delay by a slow rank, as a share of the step: shorter delays are noise


class SlowRankDetector(Callback):
    """Callback that compares the step times of ranks, and warns of one that is slower than the others.

    A rank is slow if its wait for data and its forward take longer than on the median rank. The warning names the
    slower of the two. The backward includes the wait for other ranks. If no rank is slow and the backward takes much
    longer than the forward on every rank, communication is slow.

    Each rank measures by its own clock, on an accelerator by events. Every `every_n_steps` steps an asynchronous
    collective starts. Its result is read `every_n_steps` steps later, so no step waits for other ranks. On an
    accelerator each comparison waits until the device has finished the step.

    Args:
        every_n_steps: steps between two comparisons, at least 1. Default: 50.
        factor: a rank is slow if its time is more than this multiple of the median rank's time, and the difference is
            at least a tenth of the step. Default: 1.5.
        communication_factor: communication is slow if the backward takes more than this multiple of the forward on
            every rank. Without communication the multiple is about 2. Default: 5.

    Attributes:
        seconds: seconds per step of each rank in the last comparison, for data, forward and backward. Empty before the
            first comparison.
    """

    reads_only = True
    order = Order.LAST

    def __init__(self, every_n_steps: int = 50, factor: float = 1.5, communication_factor: float = 5.0) -> None:
        self.every_n_steps = every_n_steps
        self.factor = factor
        self.communication_factor = communication_factor
        self.seconds: list[dict[str, float]] = []
        self._warned: set[str] = set()  # findings with a warning; see `_compare`

    def on_train_start(self, trainer: Run, task: TaskModule) -> None:
        # Steps, waits for data and times of micro-batches since the last comparison.
        self._num_steps = 0
        self._data_s = 0.0
        self._marks: list[tuple[Any, Any, Any]] = []  # per micro-batch: its start, the start and end of backward
        # End of the last step. None after a validation or an epoch, whose time is not a wait for data.
        self._waits_since_s: float | None = None
        # The collective that the last comparison has started (None with one process), and its result.
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
        totals = torch.tensor([self._data_s, forward, backward], dtype=torch.float32)
        per_step = totals.to(task.device) / self._num_steps
        gathered = per_step.repeat(trainer.world_size)
        work = None
        if trainer.world_size > 1:
            work = dist.all_gather_into_tensor(gathered, per_step, async_op=True)
        self._pending = (work, gathered)
        self._num_steps = 0
        self._data_s = 0.0
        self._marks = []

    def _compare(self, trainer: Run, work: Any, gathered: torch.Tensor) -> None:
        if work is not None:
            work.wait()
        rows = gathered.view(-1, len(_PARTS)).tolist()
        self.seconds = [dict(zip(_PARTS, row, strict=True)) for row in rows]
        if len(rows) == 1 or not trainer.is_global_zero:
            return
        warning = self._warning()
        # The text before the colon is the finding, such as "rank 1 is slow in computing". The times after it differ.
        finding = warning.partition(":")[0]
        if warning and finding not in self._warned:
            self._warned.add(finding)
            warnings.warn(warning, TrainwrightWarning, stacklevel=2)

    def _warning(self) -> str:
        """Return a warning about a slow rank or slow communication, or an empty text."""
        medians = {part: statistics.median_low([times[part] for times in self.seconds]) for part in _PARTS}
        median_step = statistics.median_low([sum(times.values()) for times in self.seconds])
        # Without the backward, in which every rank waits for the slow one.
        local = [times["data"] + times["forward"] for times in self.seconds]
        median_local = statistics.median_low(local)
        slowest_rank = local.index(max(local))
        delay = local[slowest_rank] - median_local
        if local[slowest_rank] > self.factor * median_local and delay > _MIN_SHARE * median_step:
            times_there = self.seconds[slowest_rank]
            part = max(_ADVICE, key=lambda name: times_there[name] - medians[name])
            activity, advice = _ADVICE[part]
            return (
                f"rank {slowest_rank} is slow in {activity}: {_ms(times_there[part])} per step, {_ms(medians[part])} "
                f"on the median rank. The others wait for it. {advice}."
            )
        # A single rank with a long backward waits for another rank: only the shortest one is communication.
        min_backward = min(times["backward"] for times in self.seconds)
        max_forward = max(times["forward"] for times in self.seconds)
        if min_backward > self.communication_factor * max_forward:
            return (
                f"communication is slow: the backward takes {_ms(min_backward)} per step on every rank, the forward "
                f"{_ms(medians['forward'])}. Use larger batches, accumulate_grad_batches, or a faster network."
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
