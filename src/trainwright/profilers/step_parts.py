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
    """Return the part of a step that an action of the Trainer belongs to, or None if it is not counted."""
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
        self.steps, self.warmup, self.traced = steps, warmup, traced
        self._done = self._measured = 0
        self._mark = self._wall = 0.0
        self._own: dict[str, float] = {}
        self._waited = self._longest_wait = 0.0  # seconds of the data wait: until the step before, and of one step
        self._trace: Any = None
        self._regions: list[Any] = []
        self._shares: dict[str, float] = {}

    def start(self, action_name: str) -> None:
        if (part := part_of(action_name)) is None:
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
        self._done += 1
        _wait_for_gpu()
        if self._done <= self.warmup:
            self.totals, self._mark = {}, perf_counter()
        elif self._done <= self.warmup + self.steps:
            self._measured, self._wall = self._done - self.warmup, perf_counter() - self._mark
            self._own = {name: own for name, (_, _, own) in self.totals.items()}
            waited = sum(own for name, own in self._own.items() if part_of(name) == "data wait")
            self._longest_wait, self._waited = max(self._longest_wait, waited - self._waited), waited
        if self._done == self.warmup + self.steps and self.traced:
            self._trace = torch.profiler.profile(activities=None)
            self._trace.__enter__()
        elif self._done == self.warmup + self.steps + self.traced:
            self.close()

    def close(self) -> None:
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        trace.__exit__(None, None, None)
        events = ((event.name, event.time_range) for event in trace.events())
        self._shares = communication_shares((name, time.start, time.end) for name, time in events)

    def summary(self) -> str:
        """Return an empty text, because the command prints a table."""
        return ""

    def result(self) -> dict[str, Any]:
        """Return the mean milliseconds of a step, of its parts and each callback, and the longest data wait."""
        self.close()
        steps, parts = max(self._measured, 1), dict.fromkeys((*PARTS, OTHER), 0.0)
        callbacks = defaultdict[str, float](float)
        for name, own in self._own.items():
            part, ms = part_of(name) or OTHER, 1000 * own / steps
            parts[part] += ms
            if part == "callbacks":
                kind, _, hook = name.partition("]")
                callbacks[hook if kind == "[TaskModule" else hook.partition(".")[0]] += ms
        step = 1000 * self._wall / steps
        parts[OTHER] = step - sum(parts.values())
        for part, share in self._shares.items():
            moved = parts[part] * share
            parts[part], parts["communication"] = parts[part] - moved, parts["communication"] + moved
        found = {"steps": self._measured, "step_ms": step, "parts": parts, "callbacks": callbacks}
        return {**found, "longest_wait_ms": 1000 * self._longest_wait}


def communication_shares(events: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return the fraction of each part's time in which a collective was running, from tuples (name, start, end)."""
    marks: list[tuple[float, int, str]] = []  # time, +1 or -1, name
    for name, start, end in events:
        if name.startswith(("part:", "gloo:", "nccl:")):
            marks += [(start, 1, name), (end, -1, name)]
    total, shared = defaultdict[str, float](float), defaultdict[str, float](float)
    stack, running, before = list[str](), 0, 0.0
    for time, change, name in sorted(marks, key=lambda mark: mark[0]):
        if stack:
            total[stack[-1]] += time - before
            shared[stack[-1]] += (time - before) * (running > 0)
        before, part = time, name[5:]
        if not name.startswith("part:"):
            running += change
        elif change > 0:
            stack.append(part)
        elif part in stack:
            del stack[len(stack) - 1 - stack[::-1].index(part)]
    return {part: shared[part] / seconds for part, seconds in total.items() if seconds > 0}


def _wait_for_gpu() -> None:
    """Wait for the kernels of a GPU, so that each part includes the time of its kernels."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types here
        torch.cuda.synchronize()
