"""A logged metric between two flushes.

A slot has the metric's options, its latest step value and its aggregate of the epoch. Values stay on their device. Only
`HostReads.read` waits for the device.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.core.errors import ConfigurationError, LoggedValueError
from trainwright.core.host.device_types import properties
from trainwright.loggers.metric_options import MetricSettings

FOLD_EVERY = 64
"""Number of pending values that are folded into the running aggregate at a time, with one stack on their device."""


def is_metric_object(value: object) -> bool:
    """Return whether `value` is a torchmetrics Metric or MetricCollection, without importing torchmetrics."""
    return isinstance(value, torch.nn.Module) and hasattr(value, "compute") and hasattr(value, "reset")


def reset_metric(metric: Any) -> None:
    """Reset a metric object. Its new state may be updated inside and outside of inference mode."""
    with torch.inference_mode(False):
        metric.reset()


def to_number(name: str, value: object) -> float | Tensor:
    """Return a float, or a detached 0-dim copy of a tensor on the same device. Never waits for the device.

    Raises:
        LoggedValueError: `value` is not one real number.
    """
    if isinstance(value, (bool, int, float)):
        try:
            return float(value)
        except OverflowError:
            raise LoggedValueError(
                f"log({name!r}) got an integer too large for a float. Log its logarithm instead."
            ) from None
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise LoggedValueError(
                f"log({name!r}) got a tensor of shape {tuple(value.shape)}; a metric is one number. Reduce it first, "
                "for example with .mean(), or log its parts under separate names."
            )
        if value.is_complex():
            raise LoggedValueError(f"log({name!r}) got a complex tensor; log its .abs(), or .real and .imag apart.")
        local = _local_part(name, value) if hasattr(value, "placements") else value
        # A copy, because the caller may change the tensor in place (loss /= 4) before the next flush.
        return local.detach().reshape(()).clone()
    if isinstance(value, (np.generic, np.ndarray)) and value.size == 1:
        with contextlib.suppress(TypeError, ValueError):  # a complex number, a text or another object
            return float(value.item())
    advice = " Use log_dict for several values." if isinstance(value, dict) else ""
    raise LoggedValueError(
        f"log({name!r}) got a {type(value).__name__}; expected a number, a tensor with one element or a torchmetrics "
        f"Metric.{advice}"
    )


def _local_part(name: str, value: Any) -> Tensor:
    """Return a replicated DTensor as a plain tensor."""
    placements = tuple(value.placements)
    if not all(placement.is_replicate() for placement in placements):
        raise LoggedValueError(
            f"log({name!r}) got a DTensor with placements {placements}, which is sharded over ranks; log never "
            "communicates. Call .full_tensor() on every rank and log the result."
        )
    local: Tensor = value.to_local()
    return local


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Return the accumulation dtype: float64, or float32 if the device has no float64."""
    return torch.float64 if properties(device.type).has_float64 else torch.float32


def pick(values: Sequence[float], kind: str) -> float:
    """Return the smallest number for `"min"`, else the largest. Return NaN if any number is NaN."""
    # Python's min and max depend on the order of a NaN: min(1.0, nan) is 1.0, min(nan, 1.0) is nan.
    if any(math.isnan(value) for value in values):
        return float("nan")
    return min(values) if kind == "min" else max(values)


class MetricSlot:
    """Values logged under one key: a metric's name with the suffix of its evaluation loader, if any.

    A slot holds two independent things. `last` is the latest value of a step, which the next flush of a step returns
    and clears. The aggregate of the epoch (`values` to `chunks` below) is cleared by the flush of the epoch. For
    example, 70 floats logged with `on_epoch` and `reduce_fx="mean"` are 64 folded values in `host_total` and `weight`,
    and 6 pending ones in `values`.

    Attributes:
        name, suffix: their sum is `key`.
        loader: index of the evaluation loader, if there are several.
        settings: the options that the metric has in this epoch. `on_step`, `on_epoch`, `sync_step`, `weigh` and
            `weigh_step` are derived from them by `configure`, because `log` reads them at every call.
        options: raw options of the latest `log`, which skips all checks while they stay the same. None: check them.
        can_reconfigure: True until the first `log` of an epoch, which may choose other options than the last epoch.
            `MetricBuffer` then calls `reconfigure`.

        last: latest value of a step since the last flush: a number, the result of a metric object (maybe a dict), or
            the object itself if it has no result for one batch. None if nothing was logged since.
        last_weight: weight of `last` in a mean over ranks.
        needs_row: True from a `log` on_step until `EvaluationRows.add` has read `last`. Unused in training.
        seen_step: the `last` that a `peek` has read; None after a flush, and for a metric object.

        values: pending values of the epoch, which are not folded yet: at most `FOLD_EVERY`.
        weights: weights of `values`; 1 for each value unless `weigh`.
        num_folded: number of values that `fold` has added to the aggregate below.
        weight: sum of the weights of folded values. 0 for a user-defined reduction.
        host_total: sum of value × weight of the folded Python numbers.
        host_extreme: smallest folded Python number for `"min"`, largest for `"max"`. None for other reductions, and
            if all folded values are tensors.
        totals: the same of folded tensors, as 0-dim tensors by device: the weighted sum or the extreme.
        chunks: all folded values in the order of their calls, for a user-defined reduction only.
        seen_epoch: `epoch_count` when the aggregate was last read.

        metric: the torchmetrics object that was logged in this epoch. It aggregates by itself, so `values` is empty.
        last_metric: the same, kept after the end of the epoch to find objects that stages share.
    """

    __slots__ = (
        "can_reconfigure",
        "chunks",
        "host_extreme",
        "host_total",
        "last",
        "last_metric",
        "last_weight",
        "loader",
        "metric",
        "name",
        "needs_row",
        "num_folded",
        "on_epoch",
        "on_step",
        "options",
        "seen_epoch",
        "seen_step",
        "settings",
        "suffix",
        "sync_step",
        "totals",
        "values",
        "weigh",
        "weigh_step",
        "weight",
        "weights",
    )

    def __init__(self, name: str, suffix: str, settings: MetricSettings) -> None:
        self.name = name
        self.suffix = suffix
        self.loader: int | None = None
        self.options: tuple[Any, ...] | None = None
        self.last: Any = None
        self.last_weight: float = 1.0
        self.needs_row = False
        self.seen_step: Any = None
        self.values: list[float | Tensor] = []
        self.weights: list[float] = []
        self.metric: Any = None
        self.last_metric: Any = None
        self.clear_epoch()
        self.configure(settings)

    @property
    def key(self) -> str:
        """The name with the dataloader's suffix."""
        return self.name + self.suffix

    @property
    def has_unread_step(self) -> bool:
        """True if `last` was not read since it was logged. Always True while `last` is a metric object, whose value
        may change.
        """
        return self.seen_step is not self.last

    @property
    def kind(self) -> str:
        """`"mean"`, `"sum"`, `"min"`, `"max"` or `"custom"`."""
        reduction = self.settings.reduction
        return reduction if isinstance(reduction, str) else "custom"

    @property
    def is_extreme(self) -> bool:
        """True for `"min"` and `"max"`."""
        return self.kind in ("min", "max")

    def configure(self, settings: MetricSettings) -> None:
        """Set the options for this epoch."""
        self.settings = settings
        self.can_reconfigure = False
        # `MetricBuffer.load_state_dict` may have restored an object; the next `log` may pass another one.
        self.metric = None
        is_mean = settings.reduction == "mean"
        self.on_step = settings.on_step
        self.on_epoch = settings.on_epoch
        self.sync_step = settings.sync_dist is True  # step values are reduced over ranks
        # Whether `log` computes the weight of a value, for the mean of the epoch and for the mean of a step over ranks.
        self.weigh = is_mean and settings.on_epoch
        self.weigh_step = is_mean and settings.on_step and self.sync_step
        if not settings.on_step:
            self.last = None

    def reconfigure(self, settings: MetricSettings) -> None:
        """Set the options at the first `log` of an epoch, or at the first after a resume. If the reduction has changed,
        discard the values of the epoch, which a checkpoint contained.
        """
        before = self.settings.reduction
        # A checkpoint stores None instead of a function, so its values belong to the function that is passed now.
        is_stored_function = before is None and not isinstance(settings.reduction, str)
        if before != settings.reduction and not is_stored_function:
            self.clear_epoch()
        self.configure(settings)

    def clear_epoch(self) -> None:
        """Clear the epoch's values, but not a pending step value."""
        self.values.clear()
        self.weights.clear()
        self.num_folded = 0
        self.weight: float = 0.0
        self.host_total: float = 0.0
        self.host_extreme: float | None = None
        self.totals: dict[torch.device, Tensor] = {}
        self.chunks: list[Tensor | list[float]] = []
        self.seen_epoch: tuple[int, int] | None = None

    def observe(self, metric: object) -> None:
        """Store a torchmetrics object. Its value in this step is the last result of its `forward`.

        Raises:
            ConfigurationError: the slot has another object in this epoch.
        """
        if self.metric is not None and self.metric is not metric:
            raise ConfigurationError(
                f"log({self.key!r}) got two different metric objects in one epoch; give each its own name."
            )
        self.metric = metric
        self.last_metric = metric
        if self.on_step:
            # torchmetrics keeps the result of `forward` for one batch only in this private attribute. After `update`
            # it is None, and the object's accumulated value is read at the flush.
            batch_value = getattr(metric, "_forward_cache", None)
            self.last = batch_value if batch_value is not None else metric
            self.needs_row = True

    def begin_epoch(self) -> None:
        """Start an epoch: clear the values, allow other options, and reset an unfinished metric object."""
        self.clear_epoch()
        self.can_reconfigure = True
        self.needs_row = False
        self.options = None
        if self.metric is not None:
            reset_metric(self.metric)
            self.metric = None

    @property
    def num_values(self) -> int:
        """Number of values of the epoch, folded and pending. 0 for a metric object."""
        return self.num_folded + len(self.values)

    @property
    def has_epoch_values(self) -> bool:
        """True if a number was logged for the epoch's aggregate."""
        return self.num_values > 0

    @property
    def epoch_count(self) -> tuple[int, int]:
        """Number of values, and of updates of the metric object. It changes with each value that is logged."""
        return self.num_values, getattr(self.metric, "_update_count", 0)

    def fold(self) -> None:
        """Add the pending values to the aggregate, with one `torch.stack` per device and dtype. Does not wait."""
        if self.kind == "custom":
            self._fold_in_order()
        else:
            self._fold_to_aggregate()
        self.num_folded += len(self.values)
        self.values.clear()
        self.weights.clear()

    def _fold_in_order(self) -> None:
        # Only neighbors are stacked, because a user-defined reduction receives the values in the order of the calls.
        for place, group in itertools.groupby(self.values, _place_and_dtype):
            values: list[Any] = list(group)
            self.chunks.append(values if place is None else torch.stack(values))

    def _fold_to_aggregate(self) -> None:
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[float]]] = {}
        host_values: list[float] = []
        for value, weight in zip(self.values, self.weights, strict=True):
            if isinstance(value, float):
                self.host_total += value * weight
                host_values.append(value)
            else:
                tensors, weights = groups.setdefault((value.device, value.dtype), ([], []))
                tensors.append(value)
                weights.append(weight)
        for (device, _), (tensors, weights) in groups.items():
            self._fold_device(device, tensors, weights)
        if self.is_extreme and host_values:
            if self.host_extreme is not None:
                host_values.append(self.host_extreme)
            self.host_extreme = pick(host_values, self.kind)
        self.weight += sum(self.weights)

    def _fold_device(self, device: torch.device, tensors: list[Tensor], weights: list[float]) -> None:
        stacked = torch.stack(tensors).to(accumulator_dtype(device))
        previous_total = self.totals.get(device)
        if self.is_extreme:
            if previous_total is not None:
                stacked = torch.cat([previous_total.reshape(1), stacked])
            self.totals[device] = stacked.amin() if self.kind == "min" else stacked.amax()
            return
        if weights.count(weights[0]) == len(weights):  # all weights are equal
            folded = stacked.sum() * weights[0]
        else:
            # `_foreach_mul` passes the weights as kernel arguments. `torch.tensor(weights, device=device)` would wait
            # for the copy.
            folded = torch.stack(torch._foreach_mul(stacked.unbind(), weights)).sum()
        self.totals[device] = folded if previous_total is None else previous_total + folded


def _place_and_dtype(value: float | Tensor) -> tuple[torch.device, torch.dtype] | None:
    if isinstance(value, float):
        return None
    return value.device, value.dtype


class HostReads:
    """Tensors that a flush copies to the host. The tensors of a device are concatenated and copied at once."""

    def __init__(self) -> None:
        self._tensors: list[tuple[Tensor, list[float]]] = []

    def add(self, value: float | Tensor) -> list[float]:
        """Request a number, or a tensor of any shape. The returned list contains the number, or after `read` the
        flattened values of the tensor.
        """
        if not isinstance(value, Tensor):
            return [float(value)]
        numbers: list[float] = []
        self._tensors.append((value, numbers))
        return numbers

    def read(self) -> None:
        """Read every requested tensor. Waits for the devices, once each."""
        by_device: dict[torch.device, list[tuple[Tensor, list[float]]]] = {}
        for tensor, numbers in self._tensors:
            by_device.setdefault(tensor.device, []).append((tensor, numbers))
        for device, pairs in by_device.items():
            dtype = accumulator_dtype(device)
            flat = torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor, _ in pairs])
            values = iter(flat.tolist())  # the only copy to the host
            for tensor, numbers in pairs:
                numbers.extend(itertools.islice(values, tensor.numel()))


State = dict[str, Any]
Numbers = dict[int, list[float]]  # of tensors, by their ids: a tensor compares elementwise, so it cannot be a key
# Fields of a slot that its state contains unchanged.
_PLAIN_FIELDS = ("name", "suffix", "num_folded", "weight", "host_total", "host_extreme", "last_weight")


def slot_states(slots: Mapping[str, MetricSlot]) -> dict[str, State]:
    """Return the states of slots, as nested dicts and lists of numbers. Waits for each device once.

    Pending values stay pending, so that a resumed run adds them in the same order and gets identical sums.
    """
    reads = HostReads()
    numbers: Numbers = {}
    for slot in slots.values():
        for value in (*slot.values, *slot.totals.values(), *slot.chunks, slot.last):
            # `last` is often also in `values`.
            if isinstance(value, Tensor) and id(value) not in numbers:
                numbers[id(value)] = reads.add(value)
    reads.read()
    return {key: _slot_state(slot, numbers) for key, slot in slots.items()}


def _slot_state(slot: MetricSlot, numbers: Numbers) -> State:
    settings = slot.settings._asdict()
    if callable(settings["reduction"]):
        settings["reduction"] = None  # a function is not stored: `log` passes it again
    state: State = {"settings": settings}
    for field in _PLAIN_FIELDS:
        state[field] = getattr(slot, field)
    state["values"] = pack(slot.values, numbers)
    state["weights"] = list(slot.weights)
    # The type only: the resumed run has its own device of this type.
    state["totals"] = {device.type: float(numbers[id(total)][0]) for device, total in slot.totals.items()}
    state["chunks"] = []
    for chunk in slot.chunks:
        values = chunk if isinstance(chunk, list) else [chunk]
        state["chunks"].append(pack(values, numbers))
    has_number = isinstance(slot.last, (float, Tensor))  # results of metric objects are not stored
    state["last"] = pack([slot.last], numbers) if has_number else None
    return state


def restored_slot(state: Mapping[str, Any], device: torch.device) -> MetricSlot:
    """Return a slot with a state from `slot_states`. Device values are copied to `device`."""
    slot = MetricSlot(state["name"], state["suffix"], MetricSettings(**state["settings"]))
    slot.values = _unpack(state["values"], device)
    slot.weights = list(state["weights"])
    slot.weight = state["weight"]
    slot.host_total = state["host_total"]
    slot.host_extreme = state["host_extreme"]
    for device_type, total in state["totals"].items():
        place = _place(device_type, device)
        slot.totals[place] = torch.tensor(total, dtype=accumulator_dtype(place), device=place)
    for chunk in state["chunks"]:
        values = _unpack(chunk, device)
        is_tensor = bool(values) and isinstance(values[0], Tensor)
        slot.chunks.append(torch.stack(values) if is_tensor else values)
    if "num_folded" in state:
        slot.num_folded = state["num_folded"]
    elif slot.totals or slot.chunks or slot.host_extreme is not None:
        # Earlier versions stored no number, but `host_extreme` for every reduction. Any number above 0 has the same
        # effect: only changes of it are used.
        slot.num_folded = 1
    if state["last"] is not None:
        slot.last = _unpack(state["last"], device)[0]
        slot.last_weight = state["last_weight"]
    slot.can_reconfigure = True  # the resumed run may pass other options in the middle of the epoch
    return slot


def pack(values: Iterable[float | Tensor], numbers_by_id: Numbers) -> State:
    """Return values as lists of numbers: one list for the host, and one per device type and dtype.

    For example, 1.0, a float32 tensor of 2 and 3.0 become
    `{"kinds": ["", "cpu/float32", ""], "numbers": {"": [1.0, 3.0], "cpu/float32": [2.0]}}`.

    Args:
        values: Python floats and tensors.
        numbers_by_id: the numbers of each tensor.
    """
    kinds: list[str] = []
    numbers: dict[str, list[float]] = {}
    for value in values:
        if isinstance(value, float):
            kind = ""
            of_value = [value]
        else:
            kind = f"{value.device.type}/{str(value.dtype).removeprefix('torch.')}"
            of_value = numbers_by_id[id(value)]
        kinds += [kind] * len(of_value)
        numbers.setdefault(kind, []).extend(of_value)
    return {"kinds": kinds, "numbers": numbers}


def _unpack(packed: Mapping[str, Any], device: torch.device) -> list[Any]:
    by_kind: dict[str, Iterator[Any]] = {}
    for kind, numbers in packed["numbers"].items():
        if kind == "":
            by_kind[kind] = iter(numbers)
        else:
            place, _, dtype = kind.partition("/")
            values = torch.tensor(numbers, dtype=getattr(torch, dtype), device=_place(place, device))
            by_kind[kind] = iter(values.unbind())
    return [next(by_kind[kind]) for kind in packed["kinds"]]


def _place(name: str, device: torch.device) -> torch.device:
    """Return the device for a value that was on the device `name`; the host stays the host."""
    return torch.device("cpu") if name == "cpu" else device
