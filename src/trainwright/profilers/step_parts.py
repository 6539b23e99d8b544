"""StepPartsProfiler: the time of each part of a training step, for `trainwright profile`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from time import perf_counter
from typing import Any

import torch

from trainwright.profilers.actions import SimpleProfiler

PARTS = ("data wait", "host to device", "forward", "backward", "communication", "optimizer", "callbacks", "validation")
OTHER = "other"
_STRATEGY_PARTS = {"batch_to_device": "host to device", "training_step": "forward", "backward": "backward"}


@cache
def part_of(name: str) -> str | None:
    """Return the part of a step that an action of the Trainer belongs to, or None if it is not counted.

    For example, `"[Strategy]DDPEngine.backward"` belongs to `"backward"`.
    """
    kind, _, rest = name.partition("]")
    action = rest.rpartition(".")[2]
    if kind == "[Loader":
        return "data wait" if rest == "train_dataloader_next" else "validation"
    if kind == "[Strategy":
        return _STRATEGY_PARTS.get(action, "validation")
    if kind == "[TaskModule" and action == "optimizer_step":
        return "optimizer"
    return "callbacks" if kind in ("[Callback", "[TaskModule") and action.startswith("on_") else None


class StepPartsProfiler(SimpleProfiler):
    """Profiler of the seconds in each part of a step, without nested parts. A step begins when the previous one ends.

    Args:
        steps: number of measured steps.
        warmup: number of steps before the measured steps.
        traced: number of steps after the measured steps in which torch.profiler records communication. Default: 0.
    """

    def __init__(self, steps: int, warmup: int, traced: int = 0) -> None:
        super().__init__()
        self.steps = steps
        self.warmup = warmup
        self.traced = traced
        self._num_done = 0  # completed steps, also those before and after the measured ones
        self._num_measured = 0
        self._measuring_since = 0.0  # `perf_counter` at the end of the warmup
        self._measured_s = 0.0
        self._own_s: dict[str, float] = {}  # of each action, in the measured steps
        self._data_wait_s = 0.0  # in the measured steps
        self._longest_data_wait_s = 0.0  # in one step
        self._trace: Any = None  # the open torch.profiler; None before and after the traced steps
        self._regions: list[Any] = []  # open regions of the trace, the innermost last
        self._communication_shares: dict[str, float] = {}  # see `communication_shares`

    def start(self, action_name: str) -> None:
        part = part_of(action_name)
        if part is None:
            return
        _wait_for_gpu()
        super().start(action_name)
        if self._trace is not None:
            self._regions.append(torch.profiler.record_function(f"part:{part}"))
            self._regions[-1].__enter__()

    def stop(self, action_name: str) -> None:
        if part_of(action_name) is None:
            return
        _wait_for_gpu()
        if self._regions:
            self._regions.pop().__exit__(None, None, None)
        super().stop(action_name)

    def end_step(self) -> None:
        self._num_done += 1
        _wait_for_gpu()
        last_measured = self.warmup + self.steps
        if self._num_done <= self.warmup:
            self.totals = {}  # SimpleProfiler adds up from here
            self._measuring_since = perf_counter()
        elif self._num_done <= last_measured:
            self._measure()
        if self._num_done == last_measured and self.traced:
            self._trace = torch.profiler.profile(activities=None)
            self._trace.__enter__()
        elif self._num_done == last_measured + self.traced:
            self.close()

    def _measure(self) -> None:
        self._num_measured = self._num_done - self.warmup
        self._measured_s = perf_counter() - self._measuring_since
        self._own_s = {name: own_s for name, (_, _, own_s) in self.totals.items()}
        data_wait_s = sum(own_s for name, own_s in self._own_s.items() if part_of(name) == "data wait")
        self._longest_data_wait_s = max(self._longest_data_wait_s, data_wait_s - self._data_wait_s)
        self._data_wait_s = data_wait_s

    def close(self) -> None:
        if self._trace is None:
            return
        trace = self._trace
        self._trace = None
        trace.__exit__(None, None, None)
        events = [(event.name, event.time_range.start, event.time_range.end) for event in trace.events()]
        self._communication_shares = communication_shares(events)

    def summary(self) -> str:
        """Return an empty text, because the command prints a table."""
        return ""

    def result(self) -> dict[str, Any]:
        """Return the mean milliseconds of a step, of its parts and each callback, and the longest data wait."""
        self.close()
        num_steps = max(self._num_measured, 1)
        step_ms = 1000 * self._measured_s / num_steps
        parts = dict.fromkeys((*PARTS, OTHER), 0.0)
        callbacks = defaultdict[str, float](float)
        for name, own_s in self._own_s.items():
            part = part_of(name) or OTHER
            own_ms = 1000 * own_s / num_steps
            parts[part] += own_ms
            if part == "callbacks":
                callbacks[_callback_of(name)] += own_ms
        parts[OTHER] = step_ms - sum(parts.values())
        # The traced steps are slower than the measured ones, so that only their shares are used.
        for part, share in self._communication_shares.items():
            communication_ms = parts[part] * share
            parts[part] -= communication_ms
            parts["communication"] += communication_ms
        return {
            "steps": self._num_measured,
            "step_ms": step_ms,
            "parts": parts,
            "callbacks": callbacks,
            "longest_wait_ms": 1000 * self._longest_data_wait_s,
        }


def _callback_of(action_name: str) -> str:
    """Return the name of a callback, or of a hook of the task: `[Callback]Timer.on_train_end` is of `Timer`."""
    kind, _, hook = action_name.partition("]")
    return hook if kind == "[TaskModule" else hook.partition(".")[0]


def communication_shares(events: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return the fraction of each part's time in which a collective was running, from tuples (name, start, end)."""
    marks: list[tuple[float, int, str]] = []  # (time, +1 at the start or -1 at the end, name)
    for name, start, end in events:
        if name.startswith(("part:", "gloo:", "nccl:")):
            marks.append((start, 1, name))
            marks.append((end, -1, name))
    marks.sort(key=lambda mark: mark[0])

    total = defaultdict[str, float](float)
    in_collectives = defaultdict[str, float](float)
    open_parts: list[str] = []  # the innermost last
    num_collectives = 0
    previous = 0.0
    for time, change, name in marks:
        # The time since the previous mark belongs to the innermost open part.
        if open_parts:
            total[open_parts[-1]] += time - previous
            if num_collectives > 0:
                in_collectives[open_parts[-1]] += time - previous
        previous = time
        part = name.removeprefix("part:")
        if not name.startswith("part:"):
            num_collectives += change
        elif change > 0:
            open_parts.append(part)
        elif part in open_parts:
            # Remove the innermost part with this name. Regions may end in another order than they started.
            num_after = open_parts[::-1].index(part)
            del open_parts[len(open_parts) - 1 - num_after]
    return {part: in_collectives[part] / seconds for part, seconds in total.items() if seconds > 0}


def _wait_for_gpu() -> None:
    """Wait for the kernels of a GPU, so that each part includes the time of its kernels."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types here
        torch.cuda.synchronize()
