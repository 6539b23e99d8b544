"""The k best scores, which decide which checkpoints are kept."""

from __future__ import annotations

import math

from trainwright.callbacks.monitored import Mode, is_better, worst


class TopK:
    """Names of checkpoints with their scores, at most `k` of them. A `k` of -1 has no limit."""

    def __init__(self, k: int, mode: Mode) -> None:
        self.k = k
        self.mode = mode
        self.scores: dict[str, float] = {}

    def comparable(self, score: float) -> float:
        """Return `score`, or the worst possible one for NaN, so that any later number replaces it."""
        return worst(self.mode) if math.isnan(score) else score

    def accepts(self, score: float) -> bool:
        """Return whether `score` is among the best k. A score that equals the worst of k scores is not."""
        if self.k == -1 or len(self.scores) < self.k:
            return True
        kth = self.kth_best
        return kth is not None and is_better(self.comparable(score), self.scores[kth], self.mode)

    def displaced(self) -> str | None:
        """Return the name that the next `add` would remove; None if there are fewer than k."""
        is_full = self.k != -1 and len(self.scores) >= self.k
        return self.kth_best if is_full else None

    def add(self, name: str, score: float) -> str | None:
        """Add an accepted score and return the name that it replaces, if any."""
        displaced = self.displaced()
        if displaced is not None:
            del self.scores[displaced]
        self.scores[name] = self.comparable(score)
        return displaced

    @property
    def best(self) -> str | None:
        """The name with the best score, the earliest of equal scores; None without scores."""
        if not self.scores:
            return None
        pick = min if self.mode == "min" else max
        return pick(self.scores, key=self.scores.__getitem__)

    @property
    def kth_best(self) -> str | None:
        """The name with the worst score, the earliest of equal scores; None without scores."""
        if not self.scores:
            return None
        pick = max if self.mode == "min" else min
        return pick(self.scores, key=self.scores.__getitem__)
