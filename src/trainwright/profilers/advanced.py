"""AdvancedProfiler: the functions that each action calls, by Python's cProfile."""

from __future__ import annotations

import cProfile
import io
import pstats
import re
from pathlib import Path

from trainwright.profilers.profiler import Profiler


class AdvancedProfiler(Profiler):
    """Records the function calls of each action with cProfile, which makes actions several times slower.

    Python runs one cProfile at a time: a call belongs to the innermost action that is being recorded.

    Args:
        dirpath, filename: see `Profiler`.
        line_count_restriction: Number of functions (int), or fraction of them (float), in the report of an action.
            Default: 1.0.
        dump_stats: Also write `{stage}-{filename}-{rank}-{action}.prof` for each action, for tools that read the
            files of cProfile. Default: False.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction, self.dump_stats = line_count_restriction, dump_stats
        self._profiles: dict[str, cProfile.Profile] = {}

    def setup(self, stage: str, rank: int = 0, world_size: int = 1, root: str | Path = ".") -> None:
        super().setup(stage, rank, world_size, root)
        self._profiles, self._open = {}, []

    def start(self, name: str) -> None:
        if self._open:
            self._open[-1][1].disable()
        self._open.append((name, self._profiles.setdefault(name, cProfile.Profile())))
        self._open[-1][1].enable()

    def stop(self, name: str) -> None:
        at = self._innermost(name)
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
