"""A report of a device map: the modules on each device, the reasons, and the memory missing on the accelerators."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

from trainwright.bigmodels.maps.device_assignment import (
    Device,
    DeviceAssignment,
    Outline,
    assign_devices,
    is_accelerator,
    largest_layer,
)
from trainwright.core.host.byte_sizes import format_bytes


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """The modules on one device.

    Attributes:
        device: The device.
        budget_bytes: Its budget. None: unlimited.
        used_bytes: Bytes of the modules.
        modules: Names of modules and tensors. A module that is completely on the device is named instead of its
            children.
    """

    device: Device
    budget_bytes: int | None
    used_bytes: int
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeviceMapReport:
    """The device of each module, and the reasons. `print` shows the report.

    Attributes:
        total_bytes: Bytes of the model. Shared tensors count once.
        shares: The devices in the order in which they were filled.
        reasons: Sentences on the device that computes offloaded layers, the layer that did not fit each full device,
            and the modules that were assigned to the device of a shared tensor.
        missing_bytes: The smallest increase of the last accelerator's budget with which nothing is offloaded. 0 if
            nothing is offloaded. None without an accelerator.
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
            lines.append(
                f"- With {format_bytes(self.missing_bytes)} more on the last accelerator, nothing would be offloaded."
            )
        return "\n".join(lines)


def explain(
    outline: Outline,
    budgets: Mapping[Device, int | None],
    assignment: DeviceAssignment,
    device_map: Mapping[str, Device],
    *,
    fallback: bool,
) -> DeviceMapReport:
    """Return a report of an assignment and its map.

    Args:
        outline, budgets, fallback: The arguments of `assign_devices`.
        assignment: Its result.
        device_map: The map of the assignment.
    """
    shares = []
    for device, budget in budgets.items():
        modules = tuple(name for name, used in device_map.items() if used == device)
        shares.append(DeviceShare(device, budget, assignment.used_bytes[device], modules))
    return DeviceMapReport(
        total_bytes=outline.sizes_bytes[0],
        shares=tuple(shares),
        reasons=tuple(_reasons(outline, assignment)),
        missing_bytes=_missing_bytes(outline, dict(budgets), assignment, fallback=fallback),
    )


def _span(share: DeviceShare) -> str:
    """Return the names of a device's modules. Of more than three, only the first and the last are named."""
    names = [name or "(the whole model)" for name in share.modules]
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)} modules)"


def _reasons(outline: Outline, assignment: DeviceAssignment) -> list[str]:
    """Return the sentences of `DeviceMapReport.reasons`."""
    reasons = []
    needed, name = largest_layer(outline)
    if assignment.runs_on is not None and assignment.offloads:
        reasons.append(
            f"Device {assignment.runs_on!r} computes the layers on the host and on disk, and reserves memory for them."
        )
    for device in assignment.skipped:
        reasons.append(f"Device {device!r} is not used: {name!r}, the largest layer, needs {format_bytes(needed)}.")
    for full in assignment.full:
        if full.device in assignment.skipped:  # named by the sentence above
            continue
        reserved = ""
        if full.reserved_bytes:
            reserved = f", of which {format_bytes(full.reserved_bytes)} are reserved for the largest remaining layer"
        reasons.append(
            f"Device {full.device!r} has no room for {outline.names[full.part] or 'the model'!r}, which needs "
            f"{format_bytes(full.needed_bytes)}: {format_bytes(full.free_bytes)} are free{reserved}."
        )
    for part in assignment.pulled:
        reasons.append(
            f"{outline.names[part]!r} is on device {assignment.device_of[part]!r} because it shares a tensor with an "
            "earlier module there."
        )
    return reasons


def _missing_bytes(
    outline: Outline, budgets: dict[Device, int | None], assignment: DeviceAssignment, *, fallback: bool
) -> int | None:
    """Return the smallest addition to the last accelerator's budget with which nothing is offloaded.

    Returns 0 if nothing is offloaded, and None without an accelerator.
    """
    accelerators = [device for device, budget in budgets.items() if is_accelerator(device) and budget != 0]
    if not accelerators:
        return None
    if not assignment.offloads:
        return 0
    last = accelerators[-1]
    budget = budgets[last] or 0

    def is_enough(addition: int) -> bool:
        return not assign_devices(outline, {**budgets, last: budget + addition}, fallback=fallback).offloads

    # A binary search, which calls `is_enough` for a few numbers of the range. The bytes of the model are always enough.
    additions = range(1, max(outline.sizes_bytes[0], 1))
    return 1 + bisect.bisect_left(additions, True, key=is_enough)
