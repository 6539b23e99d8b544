"""A device map in words: what went where, why, and what would have to change for all of it to be fast."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.bigmodels.maps.placement import (
    Device,
    Outline,
    Placement,
    collapse,
    is_accelerator,
    is_fast,
    largest_whole,
    outermost,
    place,
)
from trainwright.core.host.byte_sizes import format_bytes


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """What one device holds.

    Attributes:
        device: an accelerator's index or name, `"cpu"` or `"disk"`.
        budget_bytes: that it was given; None is without limit.
        used_bytes: by the modules on it.
        modules: their names, in order, the outermost where all of one lies here.
    """

    device: Device
    budget_bytes: int | None
    used_bytes: int
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeviceMapReport:
    """What went where, and why; `print` shows it.

    Attributes:
        total_bytes: of the model, a shared tensor counted once.
        shares: of the devices, in the order in which they were filled.
        reasons: sentences: why each device was left, what lies where it does because it shares a tensor, and which
            device computes what lies elsewhere.
        missing_bytes: by which the last accelerator's budget would have to be larger for everything to lie on
            accelerators; 0 where it does, None without an accelerator.
    """

    total_bytes: int
    shares: tuple[DeviceShare, ...]
    reasons: tuple[str, ...]
    missing_bytes: int | None

    def __str__(self) -> str:
        lines = [f"{format_bytes(self.total_bytes)} of weights and buffers:"]
        for share in self.shares:
            budget = "no limit" if share.budget_bytes is None else f"of {format_bytes(share.budget_bytes)}"
            lines.append(f"  {share.device!s:>6}  {format_bytes(share.used_bytes):>10} {budget:<14} {_span(share)}")
        lines += [f"- {reason}" for reason in self.reasons]
        if self.missing_bytes:
            lines.append(f"- With {format_bytes(self.missing_bytes)} more on the last accelerator all would lie there.")
        return "\n".join(lines)


def explain(outline: Outline, budgets: Mapping[Device, int | None], placement: Placement) -> DeviceMapReport:
    """Return a report of a placement; see `DeviceMapReport`.

    Args:
        outline: that was placed.
        budgets: as they were given to `place`.
        placement: what `place` returned.
    """
    names: dict[Device, list[str]] = {device: [] for device in budgets}
    for part, device in collapse(outline, outermost(outline, placement.device_of)).items():
        names[device].append(outline.names[part])
    return DeviceMapReport(
        total_bytes=outline.sizes_bytes[0],
        shares=tuple(
            DeviceShare(device, budget, placement.used_bytes[device], tuple(names[device]))
            for device, budget in budgets.items()
        ),
        reasons=tuple(_reasons(outline, placement)),
        missing_bytes=_missing_bytes(outline, dict(budgets), placement),
    )


def _span(share: DeviceShare) -> str:
    names = [name or "(the whole model)" for name in share.modules]
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)} modules)"


def _reasons(outline: Outline, placement: Placement) -> list[str]:
    reasons = []
    needed, name = largest_whole(outline)
    if placement.runs_on is not None and not is_fast(placement):
        reasons.append(
            f"Device {placement.runs_on!r} computes what lies on the host or on disk, and keeps room for it."
        )
    reasons += [
        f"Device {device!r} is passed over: {name!r}, the largest layer, needs {format_bytes(needed)}."
        for device in placement.passed_over
    ]
    for move in placement.moves:
        if move.device in placement.passed_over:
            continue
        kept = f", of which {format_bytes(move.kept_bytes)} are kept for the largest layer to come"
        reasons.append(
            f"Device {move.device!r} ends before {outline.names[move.part] or 'the model'!r}, which needs "
            f"{format_bytes(move.needed_bytes)}: {format_bytes(move.free_bytes)} are free"
            f"{kept if move.kept_bytes else ''}."
        )
    reasons += [
        f"{outline.names[part]!r} lies on device {placement.device_of[part]!r}, for it shares a tensor with an earlier "
        "module there."
        for part in placement.pulled
    ]
    return reasons


def _missing_bytes(outline: Outline, budgets: dict[Device, int | None], placement: Placement) -> int | None:
    """Find the least addition to the last accelerator's budget with which nothing lies elsewhere."""
    accelerators = [device for device, budget in budgets.items() if is_accelerator(device) and budget != 0]
    if not accelerators:
        return None
    if is_fast(placement):
        return 0
    last = accelerators[-1]
    given = budgets[last] or 0
    return 1 + bisect.bisect_left(
        range(1, max(outline.sizes_bytes[0], 1)),
        True,
        key=lambda extra: is_fast(place(outline, {**budgets, last: given + extra})),
    )
