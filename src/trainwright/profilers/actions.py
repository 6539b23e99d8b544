"""SimpleProfiler and AdvancedProfiler, which measure actions and function calls."""

from __future__ import annotations

import cProfile
import io
import pstats
import re
from pathlib import Path
from time import perf_counter

from trainwright.profilers.profiler import Profiler

_TOP = 20  # actions in the short form


class SimpleProfiler(Profiler):
    """Profiler of the duration of each action, with and without nested actions.

    On a GPU, kernels run after the calls that start them: use `PyTorchProfiler` for the time of kernels.

    Args:
        dirpath, filename: see `Profiler`.
        extended: Print all actions. False prints the 20 longest. Default: True.

    Attributes:
        totals: For each action the number of calls, the seconds with nested actions, and the seconds without them.
        recorded_durations: For each action the seconds of each call, with nested actions.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.totals: dict[str, tuple[int, float, float]] = {}
        self.recorded_durations: dict[str, list[float]] = {}
        self._since = perf_counter()

    def setup(self, stage: str, rank: int = 0, world_size: int = 1, root: str | Path = ".") -> None:
        super().setup(stage, rank, world_size, root)
        self.totals = {}
        self._open = []
        self._since = perf_counter()
        self.recorded_durations = {}

    def start(self, action_name: str) -> None:
        self._open.append([action_name, perf_counter(), 0.0])  # the last: seconds in actions inside of it

    def stop(self, action_name: str) -> None:
        now = perf_counter()
        at = self._innermost(action_name)
        _, since, inside = self._open.pop(at)
        passed = now - since
        if at:
            self._open[at - 1][2] += passed
        calls, total, own = self.totals.get(action_name, (0, 0.0, 0.0))
        self.totals[action_name] = calls + 1, total + passed, own + max(passed - inside, 0.0)
        self.recorded_durations.setdefault(action_name, []).append(passed)

    def summary(self) -> str:
        """Return a table of the actions, the longest first."""
        whole = max(perf_counter() - self._since, 1e-9)
        rows = sorted(self.totals.items(), key=lambda row: -row[1][1])
        if not self.extended:
            rows = rows[:_TOP]
        if not rows:
            return ""
        width = max(len("Action"), *(len(name) for name, _ in rows))
        lines = [f"{'Action':<{width}}  {'Calls':>8}  {'Mean (s)':>12}  {'Total (s)':>12}  {'Own (s)':>12}  {'%':>6}"]
        for name, (calls, total, own) in rows:
            numbers = f"{total / calls:>12.6g}  {total:>12.6g}  {own:>12.6g}  {100 * total / whole:>6.2f}"
            lines.append(f"{name:<{width}}  {calls:>8}  {numbers}")
        rule = "-" * len(lines[0])
        title = f"Profile of {self.stage or 'the program'} on rank {self.rank}: {whole:.6g} s"
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
            self._open[-1][1].disable()
        self._open.append((action_name, self._profiles.setdefault(action_name, cProfile.Profile())))
        self._open[-1][1].enable()

    def stop(self, action_name: str) -> None:
        at = self._innermost(action_name)
        self._open[-1][1].disable()
        del self._open[at]
        if self._open:
            self._open[-1][1].enable()

    def close(self) -> None:
        if self._open:
            self._open[-1][1].disable()
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
        return {**vars(self), "_profiles": {}, "_open": []}
