"""Placement of a model's parts on devices, computed from sizes and budgets alone, without torch.

An `Outline` lists the model's modules in the order of their registration, which for most models is the order in which
they run. Devices are filled one after the other in that order, so that data moves from one to the next once per
forward. The first accelerator in use also computes the layers on the host and on disk. It reserves memory for the
largest of them, and the host for the largest one on disk.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from trainwright.core.errors import ConfigurationError

Device: TypeAlias = int | str
"""Where a part lies: the index of an accelerator, `"cpu"`, `"disk"`, or an accelerator by name (`"mps"`, `"xpu:1"`)."""

_SLOW = ("cpu", "disk")


class Outline(NamedTuple):
    """A model as a list of parts in pre-order: a part stands before what it consists of. All lists have one length.

    Attributes:
        names: dotted names; the first is `""`, the model itself.
        sizes_bytes: of everything below; a tensor that several parts share counts where it is named first.
        ends: index after the last part below, so that `range(i + 1, ends[i])` are the parts of part `i`.
        whole: True for what is never divided; such a part has none below it.
        tied: groups of indices of whole parts that share a tensor and must stay on one device.
    """

    names: Sequence[str]
    sizes_bytes: Sequence[int]
    ends: Sequence[int]
    whole: Sequence[bool]
    tied: Sequence[Sequence[int]] = ()


class Move(NamedTuple):
    """Why the filling of a device ended: this part did not fit any more.

    Attributes:
        device: that was left.
        part: index of the first part that did not fit and could not be divided.
        needed_bytes: by it, with what is tied to it.
        free_bytes: on the device, without what is kept for layers that come and go.
        kept_bytes: of the device's memory, for such layers.
    """

    device: Device
    part: int
    needed_bytes: int
    free_bytes: int
    kept_bytes: int


@dataclass(slots=True)
class Placement:
    """Where every part lies, and why.

    Attributes:
        device_of: index of a part → device. A part is covered by itself or by one that it is in.
        used_bytes: device → bytes of the parts on it.
        runs_on: the device that computes what lies on the host or on disk, and keeps room for it; None without one.
        passed_over: accelerators that stay empty because they cannot hold the largest layer, which the first
            accelerator in use must be able to compute.
        moves: in the order in which devices were filled up.
        pulled: parts that lie where they do because they share a tensor with an earlier part.
        visited: parts that were looked at, a measure of the work.
    """

    device_of: dict[int, Device]
    used_bytes: dict[Device, int]
    runs_on: Device | None = None
    passed_over: list[Device] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    pulled: list[int] = field(default_factory=list)
    visited: int = 0


def is_accelerator(device: Device) -> bool:
    """Return whether a device is an accelerator: not the host, the disk or the meta device."""
    return device not in (*_SLOW, "meta")


def place(outline: Outline, budgets: dict[Device, int | None], *, fallback: bool = False) -> Placement:
    """Assign a device to every part of a model.

    Parts that share a tensor are on one device, whole parts are not divided, and no budget is exceeded. A later part is
    on the same device or on a later one, unless it shares a tensor with an earlier part or `fallback` is True.

    Args:
        outline: the model.
        budgets: bytes per device, in the order in which they are filled; None is without limit. A budget of 0 means
            that the device is not used.
        fallback: if the next part does not fit an empty device, use the first later part that does, trying modules
            before their children.

    Raises:
        ConfigurationError: no device but the disk holds the largest whole part, or the budgets are used up before
            everything is placed.
    """
    _refuse_too_small(outline, budgets)
    filling = _Filling(outline, budgets, fallback=fallback, keep=True)
    filling.run()
    if filling.stuck_at is not None or not is_fast(filling.result) or filling.result.passed_over:
        # Room for layers that come and go is needless where none does: see whether everything fits without it.
        alone = _Filling(outline, budgets, fallback=fallback, keep=False)
        alone.run()
        alone.result.visited += filling.result.visited
        if alone.stuck_at is None and is_fast(alone.result):
            return alone.result
        filling.result.visited = alone.result.visited
    if filling.stuck_at is not None:
        used = ", ".join(f"{device!r}: {bytes_}" for device, bytes_ in filling.result.used_bytes.items())
        raise ConfigurationError(
            f"max_memory is used up before {outline.names[filling.stuck_at] or 'the model'!r} is placed: {{{used}}} of "
            f"{outline.sizes_bytes[0]} bytes are, and {_largest_from(outline)[filling.stuck_at]} are kept free for "
            "layers that come and go. Raise a budget, or give 'disk' none."
        )
    return filling.result


def is_fast(placement: Placement) -> bool:
    """Return whether everything that takes memory is on accelerators."""
    return all(is_accelerator(device) for device, used in placement.used_bytes.items() if used)


def collapse(outline: Outline, device_of: dict[int, Device]) -> dict[int, Device]:
    """Replace the entries of a part's children by one entry if all are on one device; in the outline's order."""
    below = (
        {device_of[part] for part in range(index, end) if part in device_of} for index, end in enumerate(outline.ends)
    )
    return outermost(outline, {index: next(iter(found)) for index, found in enumerate(below) if len(found) == 1})


def outermost(outline: Outline, device_of: dict[int, Device]) -> dict[int, Device]:
    """Drop parts inside another part that has a device; in the outline's order."""
    found: dict[int, Device] = {}
    end = 0
    for index in range(len(outline.names)):
        if index >= end and index in device_of:
            found[index], end = device_of[index], outline.ends[index]
    return found


def _refuse_too_small(outline: Outline, budgets: dict[Device, int | None]) -> None:
    """Raise if no memory budget can hold the largest layer."""
    memory = {device: budget for device, budget in budgets.items() if device != "disk" and budget != 0}
    needed, name = largest_whole(outline)
    if memory and all(budget is not None and budget < needed for budget in memory.values()):
        given = ", ".join(f"{device!r}: {budget}" for device, budget in memory.items())
        raise ConfigurationError(
            f"no device can hold {name or 'the model'!r}, the largest layer, which is not divided: it needs {needed} "
            f"bytes to run and max_memory is {{{given}}}. Give one device at least {needed} bytes, use a smaller "
            "dtype, or name fewer no_split_module_classes. (A budget of 0 leaves a device out.)"
        )


def largest_whole(outline: Outline) -> tuple[int, str]:
    """Return the bytes and the name of the largest part that is never divided; (0, "") for a model without any."""
    parts = zip(outline.sizes_bytes, outline.names, outline.whole, strict=True)
    return max(((size, name) for size, name, whole in parts if whole), key=lambda part: part[0], default=(0, ""))


def _largest_from(outline: Outline) -> list[int]:
    """Return for each index the bytes of the largest whole part that begins there or later; 0 after the last."""
    parts = zip(reversed(outline.whole), reversed(outline.sizes_bytes), strict=True)
    largest = itertools.accumulate((size if is_whole else 0 for is_whole, size in parts), max, initial=0)
    return [*largest][::-1]


class _Ties:
    """Groups of whole parts that share tensors, directly or through other parts, and must be on one device."""

    def __init__(self, outline: Outline) -> None:
        self._ends = outline.ends
        self._group_of: dict[int, list[int]] = {}
        for tied in outline.tied:
            merged = sorted({part for index in tied for part in (*self._group_of.get(index, ()), index)})
            self._group_of.update(dict.fromkeys(merged, merged))
        self._parts = sorted(self._group_of)

    def outside(self, index: int) -> list[int]:
        """Return the parts that must lie where part `index` lies and are not in it, in order."""
        groups = {id(group): group for group in (self._group_of[part] for part in self.inside(index))}
        return sorted(part for group in groups.values() for part in group if not index <= part < self._ends[index])

    def inside(self, index: int) -> list[int]:
        """Return the parts in part `index`, or itself, that share a tensor with any other part."""
        first = bisect.bisect_left(self._parts, index)
        return self._parts[first : bisect.bisect_left(self._parts, self._ends[index])]


class _Filling:
    """One pass over the parts, filling one device after the other."""

    def __init__(self, outline: Outline, budgets: dict[Device, int | None], *, fallback: bool, keep: bool) -> None:
        self.outline = outline
        self.devices = list(budgets)
        self.fallback = fallback
        self.free: dict[Device, float] = {d: float("inf") if b is None else b for d, b in budgets.items()}
        self.ties = _Ties(outline)
        self.rest_max = _largest_from(outline)
        self.keeps: set[Device] = set()
        self.result = Placement({}, dict.fromkeys(budgets, 0))
        self.stuck_at: int | None = None  # the part that fits nowhere any more
        self.settled: set[int] = set()  # parts that share a tensor and have a device, by themselves or in another
        self.ahead: list[int] = []  # parts placed before their turn, sorted; none is in another
        self.weightless: list[int] = []  # parts without memory that wait for the first one with some
        self.keep = keep
        if keep:
            self._keep_room(0)

    def _keep_room(self, start: int) -> None:
        """Choose the first accelerator that can hold the largest layer. Those before it stay empty."""
        self.keeps = {device for device in self.devices if device == "cpu"}
        self.result.runs_on = None
        for device in self.devices[start:]:
            if not is_accelerator(device) or self.free[device] == 0:
                continue
            if self.free[device] >= self.rest_max[0]:
                self.result.runs_on = device
                self.keeps.add(device)
                return
            # It would be the first accelerator of the map, where layers from the host and from disk are computed.
            self.free[device] = 0
            self.result.passed_over.append(device)

    def run(self) -> None:
        """Walk over the parts, dividing those that do not fit; `result` says where they are then."""
        outline, result = self.outline, self.result
        index, position = 0, 0
        while index < len(outline.names):
            result.visited += 1
            if index in result.device_of:
                index = outline.ends[index]
                continue
            if position == len(self.devices):
                self.stuck_at = index
                return
            device = self.devices[position]
            needed, outside, divided = self._look_at(index, device)
            kept = self.rest_max[outline.ends[index]] if device in self.keeps else 0
            if not outline.sizes_bytes[index] and not result.used_bytes[device] and not self.ties.inside(index):
                self.weightless.append(index)  # a Dropout alone must not make its device the first of the map
                index = outline.ends[index]
            elif not divided and needed + kept <= self.free[device]:
                self._put(index, device, needed, outside)
                index = outline.ends[index]
            elif not outline.whole[index]:
                index += 1
            else:
                result.moves.append(Move(device, index, needed, int(self.free[device]), kept))
                if self.fallback and not result.used_bytes[device]:
                    self._put_another(index, device)
                position += 1
                if self.keep and device == result.runs_on and not result.used_bytes[device]:
                    self._keep_room(position)  # it holds nothing, so that another one is the first of the map
        for part in self.weightless:
            result.device_of[part] = self.devices[min(position, len(self.devices) - 1)]

    def _look_at(self, index: int, device: Device) -> tuple[int, list[int], bool]:
        """Return the bytes that a part still needs, what must come with it, and whether pieces lie elsewhere."""
        needed, divided = self.outline.sizes_bytes[index], False
        first = bisect.bisect_left(self.ahead, index)
        last = bisect.bisect_left(self.ahead, self.outline.ends[index])
        for part in self.ahead[first:last]:
            needed -= self.outline.sizes_bytes[part]
            divided = divided or self.result.device_of[part] != device
        outside = [part for part in self.ties.outside(index) if part not in self.settled]
        needed += sum(self.outline.sizes_bytes[part] for part in outside)
        return needed, outside, divided

    def _put(self, index: int, device: Device, needed: int, outside: list[int]) -> None:
        result = self.result
        for part in self.weightless:
            result.device_of[part] = device
        self.weightless.clear()
        result.device_of[index] = device
        result.used_bytes[device] += needed
        self.free[device] -= needed
        self.settled.update(self.ties.inside(index))
        for part in outside:
            self.settled.add(part)
            result.device_of[part] = device
            result.pulled.append(part)
            bisect.insort(self.ahead, part)

    def _put_another(self, start: int, device: Device) -> None:
        """Put the first part after `start` that fits onto a device that would stay empty, breadth first."""
        outline = self.outline
        queue = deque(self._one_after_another(start, len(outline.names)))
        while queue:
            index = queue.popleft()
            self.result.visited += 1
            if index in self.result.device_of:
                continue
            needed, outside, divided = self._look_at(index, device)
            kept = self.rest_max[start] if device in self.keeps else 0
            if not divided and needed > 0 and needed + kept <= self.free[device]:
                self.ahead = [part for part in self.ahead if not index <= part < outline.ends[index]]
                self._put(index, device, needed, outside)
                bisect.insort(self.ahead, index)
                return
            if not outline.whole[index]:
                queue.extend(self._one_after_another(index + 1, outline.ends[index]))

    def _one_after_another(self, start: int, end: int) -> list[int]:
        """Return the outermost parts that begin at `start` or later and before `end`."""
        found = []
        while start < end:
            found.append(start)
            start = self.outline.ends[start]
        return found
