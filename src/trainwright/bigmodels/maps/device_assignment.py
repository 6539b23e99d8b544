"""Assignment of a model's parts to devices, computed only from sizes and budgets, without torch.

An `Outline` lists the model's modules in the order of their registration, which for most models is the order in which
they run. Devices are filled one after the other in this order, so that data moves from one device to the next once per
forward. The first accelerator in use also computes the layers on the host and on disk. It reserves memory for the
largest of these layers. The host reserves memory for the largest layer on disk.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from trainwright.core.errors import ConfigurationError

Device: TypeAlias = int | str
"""Device of a part: the index of an accelerator, `"cpu"`, `"disk"`, or a named accelerator (`"mps"`, `"xpu:1"`)."""


class Outline(NamedTuple):
    """The parts (modules and tensors) of a model in pre-order: a module comes before its parts.

    A layer is a part that is never split over devices. The lists have the same length.

    For a model with a parameter `scale` and a block of two linear layers:

        index  name       end  is_layer
        0      ""         5    False
        1      "scale"    2    True
        2      "block"    5    False
        3      "block.0"  4    True
        4      "block.1"  5    True

    Attributes:
        names: Dotted names. The first is `""`, the model itself.
        sizes_bytes: Bytes of each part. A tensor that several parts share counts in the first of these parts.
        ends: Index after the last part of each part: `range(i + 1, ends[i])` are the parts of part `i`.
        is_layer: True for layers. Layers have no parts.
        tied: Groups of indices of layers that share a tensor and must be on one device.
    """

    names: Sequence[str]
    sizes_bytes: Sequence[int]
    ends: Sequence[int]
    is_layer: Sequence[bool]
    tied: Sequence[Sequence[int]] = ()


class FullDevice(NamedTuple):
    """A device without enough memory for a layer: needed and reserved bytes together exceed the free bytes."""

    device: Device
    part: int  # index of the layer
    needed_bytes: int  # of the layer and of unplaced parts that are tied to it
    free_bytes: int
    reserved_bytes: int  # for offloaded layers. 0 for devices that do not compute them.


@dataclass(slots=True)
class DeviceAssignment:
    """The device of each part, and records that explain the choice.

    Attributes:
        device_of: Index of a part → device. The entry of a module also covers its parts.
        used_bytes: Device → bytes of the parts on it.
        runs_on: The accelerator that computes the layers on the host and on disk. None without an accelerator.
        skipped: Accelerators that are not used because they cannot hold the largest layer. The first accelerator in use
            must be able to compute the largest layer.
        full: The devices that were filled up, in order.
        pulled: Parts that were placed on the device of an earlier part because of a shared tensor.
    """

    device_of: dict[int, Device]
    used_bytes: dict[Device, int]
    runs_on: Device | None = None
    skipped: list[Device] = field(default_factory=list)
    full: list[FullDevice] = field(default_factory=list)
    pulled: list[int] = field(default_factory=list)

    @property
    def offloads(self) -> bool:
        """True if parts with tensors are on the host or on disk."""
        return any(used and not is_accelerator(device) for device, used in self.used_bytes.items())


def is_accelerator(device: Device) -> bool:
    """Return whether a device is an accelerator: not the host, the disk or the meta device."""
    return device not in ("cpu", "disk", "meta")


def assign_devices(outline: Outline, budgets: dict[Device, int | None], *, fallback: bool = False) -> DeviceAssignment:
    """Assign a device to every part of a model, filling the devices in the order of `budgets` (None: unlimited).

    Parts that share a tensor are on one device, layers are not split, and no budget is exceeded. A part is never on an
    earlier device than the part before it, unless it shares a tensor with an earlier part. With `fallback`, if the next
    part does not fit an empty device, the first later part that fits is placed there, modules before their children.

    Raises:
        ConfigurationError: Only the disk can hold the largest layer, or the budgets are too small for the model.
    """
    _check_largest_layer(outline, budgets)
    # With a reserve first. `stuck_at` is a part that did not fit any device, or None.
    filling = _Filling(outline, budgets, fallback=fallback, reserve=True)
    filling.run()
    if filling.stuck_at is not None or filling.result.offloads or filling.result.skipped:
        # Nothing has to be reserved if no layer is offloaded: try to place everything without a reserve.
        unreserved = _Filling(outline, budgets, fallback=fallback, reserve=False)
        unreserved.run()
        if unreserved.stuck_at is None and not unreserved.result.offloads:
            return unreserved.result
    if filling.stuck_at is not None:
        used = ", ".join(f"{device!r}: {bytes_}" for device, bytes_ in filling.result.used_bytes.items())
        raise ConfigurationError(
            f"max_memory has no room for {outline.names[filling.stuck_at] or 'the model'!r}: {{{used}}} of "
            f"{outline.sizes_bytes[0]} bytes are placed, and {_largest_from(outline)[filling.stuck_at]} bytes are "
            "reserved for offloaded layers. Increase a budget, or remove the limit of 'disk'."
        )
    return filling.result


def outermost(outline: Outline, device_of: dict[int, Device]) -> dict[int, Device]:
    """Remove the entries of parts inside another part that has a device. Keep the outline's order."""
    outer: dict[int, Device] = {}
    end = 0  # the parts before this index are inside the last entry
    for index in range(len(outline.names)):
        if index >= end and index in device_of:
            outer[index] = device_of[index]
            end = outline.ends[index]
    return outer


def _check_largest_layer(outline: Outline, budgets: dict[Device, int | None]) -> None:
    """Raise if no memory budget can hold the largest layer."""
    memory = {device: budget for device, budget in budgets.items() if device != "disk" and budget != 0}
    needed, name = largest_layer(outline)
    if memory and all(budget is not None and budget < needed for budget in memory.values()):
        given = ", ".join(f"{device!r}: {budget}" for device, budget in memory.items())
        raise ConfigurationError(
            f"no device can hold {name or 'the model'!r}, the largest layer, which is not split: it needs {needed} "
            f"bytes to run and max_memory is {{{given}}}. Give one device at least {needed} bytes, use a smaller "
            "dtype, or name fewer no_split_module_classes. (A budget of 0 disables a device.)"
        )


def largest_layer(outline: Outline) -> tuple[int, str]:
    """Return the bytes and the name of the largest layer, or (0, "") without layers."""
    largest = 0
    largest_name = ""
    for name, size, is_layer in zip(outline.names, outline.sizes_bytes, outline.is_layer, strict=True):
        if is_layer and size > largest:
            largest = size
            largest_name = name
    return largest, largest_name


def _largest_from(outline: Outline) -> list[int]:
    """Return for each index the bytes of the largest layer at or after this index. A last entry of 0 is added."""
    largest = [0] * (len(outline.names) + 1)
    for index in reversed(range(len(outline.names))):
        layer_bytes = outline.sizes_bytes[index] if outline.is_layer[index] else 0
        largest[index] = max(layer_bytes, largest[index + 1])
    return largest


class _Ties:
    """Groups of layers that share tensors, directly or through other layers, and must be on one device."""

    def __init__(self, outline: Outline) -> None:
        self._ends = outline.ends
        self._group_of: dict[int, list[int]] = {}
        for tied in outline.tied:
            merged = set(tied)
            for part in tied:
                merged.update(self._group_of.get(part, ()))
            group = sorted(merged)
            for part in group:
                self._group_of[part] = group
        self._parts = sorted(self._group_of)

    def outside(self, index: int) -> list[int]:
        """Return the parts outside part `index` that must be on its device, in order."""
        tied: set[int] = set()
        for part in self.inside(index):
            tied.update(self._group_of[part])
        return sorted(part for part in tied if not index <= part < self._ends[index])

    def inside(self, index: int) -> list[int]:
        """Return the parts in part `index`, including `index`, that share a tensor with any other part."""
        first = bisect.bisect_left(self._parts, index)
        last = bisect.bisect_left(self._parts, self._ends[index])
        return self._parts[first:last]


class _Requirements(NamedTuple):
    """Requirements to place a part on a device."""

    num_bytes: int  # of its parts without a device, and of `outside`
    outside: list[int]  # parts elsewhere in the model that share its tensors and have no device
    is_split: bool  # one of its parts is already on another device


class _Filling:
    """A pass that fills one device after the other. With `reserve`, it keeps memory free for offloaded layers.

    Some parts are placed before their turn: parts that share a tensor with an earlier part, and with `fallback` a later
    part that fits an empty device. `device_of`, `settled` and `ahead` record them, so that the pass skips them later.
    """

    def __init__(self, outline: Outline, budgets: dict[Device, int | None], *, fallback: bool, reserve: bool) -> None:
        self.outline = outline
        self.devices = list(budgets)
        self.fallback = fallback
        self.free: dict[Device, float] = {}
        for device, budget in budgets.items():
            self.free[device] = float("inf") if budget is None else budget
        self.ties = _Ties(outline)
        self.largest_from = _largest_from(outline)  # the size of a reserve, by the index of the first unplaced part
        self.reserving: set[Device] = set()  # devices that reserve memory for offloaded layers
        self.result = DeviceAssignment({}, dict.fromkeys(budgets, 0))
        self.stuck_at: int | None = None  # the part that no remaining device can hold
        self.settled: set[int] = set()  # parts that share a tensor and have a device, directly or through a module
        self.ahead: list[int] = []  # parts placed before their turn, sorted; none is inside another one
        self.weightless: list[int] = []  # parts without tensors, which go to the device of the next part with tensors
        self.reserve = reserve
        if reserve:
            self._reserve(0)

    def _reserve(self, start: int) -> None:
        """Choose the first accelerator that can hold the largest layer. Disable earlier accelerators."""
        self.reserving = {"cpu"}  # for layers on disk
        self.result.runs_on = None
        for device in self.devices[start:]:
            if not is_accelerator(device) or self.free[device] == 0:
                continue
            if self.free[device] >= self.largest_from[0]:
                self.result.runs_on = device
                self.reserving.add(device)
                return
            # The first accelerator of the map computes the offloaded layers, and this one cannot hold them.
            self.free[device] = 0
            self.result.skipped.append(device)

    def run(self) -> None:
        """Place the parts in order, and split modules that do not fit. Stores the devices in `result`.

        If a layer does not fit any device, `stuck_at` is its index, and later parts have no device.
        """
        outline = self.outline
        result = self.result
        index = 0
        device_number = 0  # index of the device that is being filled
        while index < len(outline.names):
            if index in result.device_of:  # placed before its turn
                index = outline.ends[index]
                continue
            if device_number == len(self.devices):
                self.stuck_at = index
                return
            device = self.devices[device_number]
            needed, outside, is_split = self._requirements(index, device)
            # If this part is placed here, later layers may be offloaded, and the largest of them must still fit.
            reserved = self.largest_from[outline.ends[index]] if device in self.reserving else 0
            has_tensors = outline.sizes_bytes[index] or self.ties.inside(index)
            if not has_tensors and not result.used_bytes[device]:
                self.weightless.append(index)  # a Dropout alone must not make its device the first of the map
                index = outline.ends[index]
            elif not is_split and needed + reserved <= self.free[device]:
                self._put(index, device, needed, outside)
                index = outline.ends[index]
            elif not outline.is_layer[index]:
                index += 1  # split the module: its first part is next
            else:
                result.full.append(FullDevice(device, index, needed, int(self.free[device]), reserved))
                if self.fallback and not result.used_bytes[device]:
                    self._put_later_part(index, device)
                device_number += 1  # the same part is tried on the next device
                if self.reserve and device == result.runs_on and not result.used_bytes[device]:
                    self._reserve(device_number)  # the device is empty, so a later one is the first of the map
        # Parts without tensors at the end of the model. The number may be one too high, after the last device is full.
        last = self.devices[min(device_number, len(self.devices) - 1)]
        result.device_of.update(dict.fromkeys(self.weightless, last))

    def _requirements(self, index: int, device: Device) -> _Requirements:
        """Return the memory that a part needs on a device, and the parts that must be placed with it."""
        needed = self.outline.sizes_bytes[index]
        is_split = False
        first = bisect.bisect_left(self.ahead, index)
        last = bisect.bisect_left(self.ahead, self.outline.ends[index])
        for part in self.ahead[first:last]:
            needed -= self.outline.sizes_bytes[part]
            is_split = is_split or self.result.device_of[part] != device
        outside = [part for part in self.ties.outside(index) if part not in self.settled]
        needed += sum(self.outline.sizes_bytes[part] for part in outside)
        return _Requirements(needed, outside, is_split)

    def _put(self, index: int, device: Device, needed: int, outside: list[int]) -> None:
        """Place a part, given its `_Requirements`, and the parts that share its tensors."""
        result = self.result
        result.device_of.update(dict.fromkeys(self.weightless, device))
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

    def _put_later_part(self, start: int, device: Device) -> None:
        """Place the first part after `start` that fits on an empty device. The search is breadth-first."""
        outline = self.outline
        queue = deque(self._siblings(start, len(outline.names)))
        while queue:
            index = queue.popleft()
            if index in self.result.device_of:
                continue
            needed, outside, is_split = self._requirements(index, device)
            reserved = self.largest_from[start] if device in self.reserving else 0
            if not is_split and needed > 0 and needed + reserved <= self.free[device]:
                # The part itself replaces its parts, because entries must not be inside each other.
                self.ahead = [part for part in self.ahead if not index <= part < outline.ends[index]]
                self._put(index, device, needed, outside)
                bisect.insort(self.ahead, index)
                return
            if not outline.is_layer[index]:
                queue.extend(self._siblings(index + 1, outline.ends[index]))

    def _siblings(self, start: int, end: int) -> list[int]:
        """Return the outermost parts from index `start` to `end`, without `end`."""
        siblings = []
        while start < end:
            siblings.append(start)
            start = self.outline.ends[start]
        return siblings
