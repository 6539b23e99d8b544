"""Messages of the hang detector: the report for a run that hangs, and the description of a failed rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from trainwright.processes.rank_position import RankPosition


@dataclass(frozen=True)
class Failure:
    """Description of a failed rank for the other ranks."""

    rank: int
    text: str  # "rank N:" and its traceback, or one line if its process has ended without a traceback
    gone: bool = False  # True if its process has ended without a traceback

    def to_json(self) -> str:
        """Return the description as text for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """Read the result of `to_json`."""
        return cls(**json.loads(text))

    @property
    def headline(self) -> str:
        """The last line of `text`, which names the error of a traceback."""
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

    Args:
        initiator: the rank that requested the report. It is in `answers`.
        answers: the positions that ranks reported, by rank.
        silent: a text about the last known state of every other rank.
        hang_timeout_s: seconds without progress after which a rank requests a report.
        timeout_s: seconds after which a collective fails.
    """
    waiting = [position for position in answers.values() if position.waits_in]
    absent = [position for position in answers.values() if not position.waits_in]
    half_s = hang_timeout_s / 2
    moving = []
    for position in answers.values():
        if position.rank != initiator and position.still_s < half_s:
            moving.append(position.rank)
    lines = [f"trainwright: rank {initiator} has not moved for {answers[initiator].still_s:.0f} s (hang_timeout)."]
    if moving:
        lines.append(
            f"  {ranks_text(moving)} moved in the last {half_s:.0f} s: slow, or the others wait for them in vain."
        )
    if not absent and len({position.waits_in for position in waiting}) > 1:
        lines.append("  The ranks wait in different collectives, so that none of these can complete.")
    for group in _groups(waiting):
        verb = "waits" if len(group) == 1 else "wait"
        lines.append(_line(group, f"{verb} in {group[0].waits_in}"))
    for group in _groups(absent):
        if waiting:
            state = "has not arrived" if len(group) == 1 else "have not arrived"
        else:
            state = "is in no collective" if len(group) == 1 else "are in no collective"
        lines.append(_line(group, state))
    lines += [f"  rank {rank} does not answer: {silent[rank]}" for rank in sorted(silent)]
    lines += _last_collectives(answers.values())
    lines.append(f"  A collective fails after {timeout_s:.0f} s (timeout of the process group).")
    # Stacks of absent ranks first, which show the cause. One of several equal stacks is enough.
    for first, *_ in [*_groups(absent), *_groups(waiting)]:
        lines.append(f"rank {first.rank}, {first.process}, {first.stacks.rstrip()}")
    return "\n".join(lines)


def _last_collectives(positions: Iterable[RankPosition]) -> list[str]:
    """Return a line for each collective that ranks have called last: a rank with a lower number has fallen behind."""
    ranks_by_collective: dict[str, list[int]] = {}
    for position in positions:
        if position.last_collective:
            ranks_by_collective.setdefault(position.last_collective, []).append(position.rank)
    return [f"  last collective of {ranks_text(ranks)}: {name}" for name, ranks in ranks_by_collective.items()]


def _groups(positions: Iterable[RankPosition]) -> list[list[RankPosition]]:
    """Group ranks with equal positions. Groups, and the ranks of a group, are in the order of ranks."""
    groups: dict[tuple[str, ...], list[RankPosition]] = {}
    for position in sorted(positions, key=lambda one: one.rank):
        key = (position.waits_in, position.doing, position.position, position.place)
        groups.setdefault(key, []).append(position)
    return list(groups.values())


def _line(group: list[RankPosition], state: str) -> str:
    """Return the line of ranks with equal positions. `state` is the predicate, such as `"has not arrived"`."""
    first = group[0]
    doing = f", {first.doing}" if first.doing else ""
    still_s = max(position.still_s for position in group)
    ranks = ranks_text([position.rank for position in group])
    return f"  {ranks} {state}{doing}: {first.position}; still for {still_s:.0f} s; at {first.place}"


def ranks_text(ranks: list[int]) -> str:
    """Return `"rank 3"` or `"ranks 0-2, 5"`."""
    spans: list[list[int]] = []  # [first, last] of consecutive ranks
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
