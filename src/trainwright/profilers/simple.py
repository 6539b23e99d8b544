"""SimpleProfiler: the time and the number of calls of each action."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from trainwright.profilers.profiler import Profiler

_TOP = 20  # actions in the short form


class SimpleProfiler(Profiler):
    """Records the duration of each action, with and without the actions inside of it.

    On a GPU, kernels run after the calls that start them: use `PyTorchProfiler` for the time of kernels.

    Args:
        dirpath, filename: see `Profiler`.
        extended: Print all actions. False prints the 20 longest. Default: True.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        # Action → calls, seconds, seconds in other actions inside of it.
        self._records: dict[str, list[float]] = {}
        self._since = perf_counter()

    def setup(self, stage: str, rank: int = 0, world_size: int = 1, root: str | Path = ".") -> None:
        super().setup(stage, rank, world_size, root)
        self._records, self._open, self._since = {}, [], perf_counter()

    def start(self, name: str) -> None:
        self._open.append([name, perf_counter(), 0.0])  # the last: seconds in actions inside of it

    def stop(self, name: str) -> None:
        now, at = perf_counter(), self._innermost(name)
        _, since, inside = self._open.pop(at)
        passed = now - since
        if at:
            self._open[at - 1][2] += passed
        record = self._records.setdefault(name, [0, 0.0, 0.0])
        record[0] += 1
        record[1] += passed
        record[2] += inside

    @property
    def totals(self) -> dict[str, tuple[int, float, float]]:
        """Action → number of calls, seconds with the actions inside of it, seconds without them."""
        return {
            name: (int(calls), total, max(total - inside, 0.0))
            for name, (calls, total, inside) in self._records.items()
        }

    def summary(self) -> str:
        """Return a table of the actions, the longest first."""
        whole = max(perf_counter() - self._since, 1e-9)
        rows = sorted(self.totals.items(), key=lambda row: -row[1][1])[: None if self.extended else _TOP]
        if not rows:
            return ""
        width = max(len("Action"), *(len(name) for name, _ in rows))
        lines = [f"{'Action':<{width}}  {'Calls':>8}  {'Mean (s)':>12}  {'Total (s)':>12}  {'Own (s)':>12}  {'%':>6}"]
        for name, (calls, total, own) in rows:
            numbers = f"{total / calls:>12.6g}  {total:>12.6g}  {own:>12.6g}  {100 * total / whole:>6.2f}"
            lines.append(f"{name:<{width}}  {calls:>8}  {numbers}")
        rule = "-" * len(lines[0])
        title = f"Profile of {self.stage} on rank {self.rank}: {whole:.6g} s"
        return "\n".join([title, rule, lines[0], rule, *lines[1:], rule])
