"""Messages of the hang detector: the report for a run that hangs, and the description of a failed rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby

from trainwright.processes.rank_position import RankPosition


@dataclass(frozen=True)
class Failure:
    """Description of a failed rank for the other ranks."""

    rank: int
    text: str  # its traceback, or a sentence if there is none
    gone: bool = False  # its process has ended without a traceback

    def to_json(self) -> str:
        """Return the description as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """Read the result of `to_json`."""
        return cls(**json.loads(text))

    @property
    def headline(self) -> str:
        """The last line of the failed rank's traceback."""
        return self.text.strip().splitlines()[-1].strip()


def hang_report(
    initiator: int,
    answers: Mapping[int, RankPosition],
    silent: Mapping[int, str],
    *,
    hang_timeout_s: float,
    timeout_s: float,
) -> str:
    """Return a report of every rank's position, after rank `initiator` has not moved for `hang_timeout_s` seconds.

    `answers` contains the positions that ranks reported, and `silent` a text for every other rank.
    """
    waiting = [rank for rank in answers.values() if rank.waits_in]
    absent = [rank for rank in answers.values() if not rank.waits_in]
    half_s = hang_timeout_s / 2
    moving = [s.rank for s in answers.values() if s.rank != initiator and s.still_s < half_s]
    lines = [f"trainwright: rank {initiator} has not moved for {answers[initiator].still_s:.0f} s (hang_timeout)."]
    if moving:
        lines.append(
            f"  {ranks_text(moving)} moved in the last {half_s:.0f} s: slow, or the others wait for them in vain."
        )
    if not absent and len({rank.waits_in for rank in waiting}) > 1:
        lines.append("  The ranks wait in different collectives, so that none of these can complete.")
    lines += [_line(alike) for alike in _groups(waiting)]
    missed = "has not arrived" if waiting else "is in no collective"
    lines += [_line(alike, missed) for alike in _groups(absent)]
    lines += [f"  rank {rank} does not answer: {silent[rank]}" for rank in sorted(silent)]
    lines += _last_collectives(answers.values())
    lines.append(f"  A collective fails after {timeout_s:.0f} s (timeout of the process group).")
    for first, *_ in [*_groups(absent), *_groups(waiting)]:  # one of several equal stacks is enough
        lines.append(f"rank {first.rank}, {first.process}, {first.stacks.rstrip()}")
    return "\n".join(lines)


def _last_collectives(positions: Iterable[RankPosition]) -> list[str]:
    """Return a line for each collective that ranks have called last: a rank with a lower number has fallen behind."""
    ranks_by_collective: dict[str, list[int]] = {}
    for rank in positions:
        if rank.last_collective:
            ranks_by_collective.setdefault(rank.last_collective, []).append(rank.rank)
    return [f"  last collective of {ranks_text(ranks)}: {name}" for name, ranks in ranks_by_collective.items()]


def _groups(positions: Iterable[RankPosition]) -> list[list[RankPosition]]:
    """Group ranks with equal positions."""

    def kind(rank: RankPosition) -> tuple[str, ...]:
        return rank.waits_in, rank.doing, rank.position, rank.place

    found = [list(alike) for _, alike in groupby(sorted(positions, key=lambda s: (kind(s), s.rank)), key=kind)]
    return sorted(found, key=lambda alike: alike[0].rank)


def _line(alike: list[RankPosition], verb: str = "") -> str:
    first = alike[0]
    several = len(alike) > 1
    verb = verb or f"waits in {first.waits_in}"
    if several:
        verb = verb.replace("waits", "wait").replace("has", "have").replace("is", "are")
    doing = f", {first.doing}" if first.doing else ""
    still_s = max(rank.still_s for rank in alike)
    ranks = ranks_text([rank.rank for rank in alike])
    return f"  {ranks} {verb}{doing}: {first.position}; still for {still_s:.0f} s; at {first.place}"


def ranks_text(ranks: list[int]) -> str:
    """Return `"rank 3"` or `"ranks 0-2, 5"`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    text = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[1]}" for span in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
