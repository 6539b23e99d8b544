"""SimpleProfiler and AdvancedProfiler, which measure actions and function calls."""

from __future__ import annotations

import cProfile
import io
import pstats
import re
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from trainwright.profilers.profiler import Profiler

_TOP = 20  # actions in the short form


class ActionTotals(NamedTuple):
    """Totals of one action.

    Attributes:
        calls: Number of calls.
        total_s: Seconds, with nested actions.
        own_s: Seconds, without nested actions.
    """

    calls: int = 0
    total_s: float = 0.0
    own_s: float = 0.0


@dataclass(slots=True)
class _TimedAction:
    """An action that has started and not ended. `nested_s` are the seconds in actions that ran within it so far."""

    name: str
    started_s: float
    nested_s: float = 0.0


@dataclass(slots=True)
class _ProfiledAction:
    """An action that has started and not ended, with the profile of all its calls."""

    name: str
    profile: cProfile.Profile


class SimpleProfiler(Profiler):
    """Profiler of the duration of each action, with and without nested actions.

    On a GPU, kernels run after the calls that start them: use `PyTorchProfiler` for the time of kernels.

    Args:
        dirpath, filename: see `Profiler`.
        extended: Print all actions. False prints the 20 longest. Default: True.

    Attributes:
        totals: `ActionTotals` of each action.
        recorded_durations: For each action the seconds of each call, with nested actions.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.totals: dict[str, ActionTotals] = {}
        self.recorded_durations: dict[str, list[float]] = {}
        self._started_s = perf_counter()  # the time of this profiler's creation, or of the stage

    def setup(self, stage: str, rank: int = 0, world_size: int = 1, root: str | Path = ".") -> None:
        super().setup(stage, rank, world_size, root)
        self.totals = {}
        self._open = []
        self._started_s = perf_counter()
        self.recorded_durations = {}

    def start(self, action_name: str) -> None:
        self._open.append(_TimedAction(action_name, perf_counter()))

    def stop(self, action_name: str) -> None:
        now_s = perf_counter()
        index = self._innermost(action_name)
        action: _TimedAction = self._open.pop(index)
        duration_s = now_s - action.started_s
        if index > 0:
            self._open[index - 1].nested_s += duration_s
        totals = self.totals.get(action_name, ActionTotals())
        # Actions that overlap without being nested could give a negative time.
        own_s = max(duration_s - action.nested_s, 0.0)
        self.totals[action_name] = ActionTotals(totals.calls + 1, totals.total_s + duration_s, totals.own_s + own_s)
        self.recorded_durations.setdefault(action_name, []).append(duration_s)

    def summary(self) -> str:
        """Return a table of the actions, the longest first."""
        whole_s = max(perf_counter() - self._started_s, 1e-9)
        rows = sorted(self.totals.items(), key=lambda row: row[1].total_s, reverse=True)
        if not self.extended:
            rows = rows[:_TOP]
        if not rows:
            return ""
        width = max(len("Action"), *(len(name) for name, _ in rows))
        lines = [f"{'Action':<{width}}  {'Calls':>8}  {'Mean (s)':>12}  {'Total (s)':>12}  {'Own (s)':>12}  {'%':>6}"]
        for name, (calls, total_s, own_s) in rows:
            percent = 100 * total_s / whole_s
            numbers = f"{total_s / calls:>12.6g}  {total_s:>12.6g}  {own_s:>12.6g}  {percent:>6.2f}"
            lines.append(f"{name:<{width}}  {calls:>8}  {numbers}")
        rule = "-" * len(lines[0])
        title = f"Profile of {self.stage or 'the program'} on rank {self.rank}: {whole_s:.6g} s"
        return "\n".join([title, rule, lines[0], rule, *lines[1:], rule])


class AdvancedProfiler(Profiler):
    """Profiler of the function calls of each action, with cProfile. Actions take several times longer.

    Only one cProfile can be active at a time, so a call is counted only for the innermost running action.

    Args:
        dirpath, filename: see `Profiler`.
        line_count_restriction: Number of functions (int), or fraction of them (float), in the report of an action.
            Default: 1.0.
        dump_stats: Also write cProfile's file `{stage}-{filename}-{rank}-{action}.prof` for each action. Default:
            False.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self._profiles: dict[str, cProfile.Profile] = {}

    def setup(self, stage: str, rank: int = 0, world_size: int = 1, root: str | Path = ".") -> None:
        super().setup(stage, rank, world_size, root)
        self._profiles = {}
        self._open = []

    def start(self, action_name: str) -> None:
        if self._open:
            self._open[-1].profile.disable()
        profile = self._profiles.setdefault(action_name, cProfile.Profile())
        self._open.append(_ProfiledAction(action_name, profile))
        profile.enable()

    def stop(self, action_name: str) -> None:
        index = self._innermost(action_name)
        self._open[-1].profile.disable()
        del self._open[index]
        if self._open:
            self._open[-1].profile.enable()

    def close(self) -> None:
        if self._open:
            self._open[-1].profile.disable()
            self._open = []
        if not self.dump_stats:
            return
        for name, profile in self._profiles.items():
            action = re.sub(r"[^\w.]", "_", name)
            path = self.path(f"-{action}.prof")
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.dump_stats(path)

    def summary(self) -> str:
        """Return the report of each action, its functions sorted by cumulative time."""
        texts = []
        for name, profile in self._profiles.items():
            stream = io.StringIO()
            if profile.getstats():
                stats = pstats.Stats(profile, stream=stream).strip_dirs().sort_stats("cumulative")
                stats.print_stats(self.line_count_restriction)
            texts.append(f"Profile of {name}\n{stream.getvalue().rstrip()}")
        return "\n\n".join(texts)

    def __getstate__(self) -> dict[str, object]:
        """Omit the records, because a `cProfile.Profile` cannot be copied to another process."""
        return {**vars(self), "_profiles": {}, "_open": []}
