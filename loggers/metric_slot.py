"""A logged metric between two flushes.

A slot has the metric's options, its latest step value and its aggregate of the epoch. Values stay on their device. Only
`HostReads.read` waits for the device.
"""

from __future__ import annotations

import itertools
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
    """Return a float, or a detached 0-dim copy of a tensor on the same device. Never waits for the device."""
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
        local = value
        placements = getattr(value, "placements", None)
        if placements is not None:
            if not all(placement.is_replicate() for placement in placements):
                raise LoggedValueError(
                    f"log({name!r}) got a DTensor with placements {tuple(placements)}, which is sharded over ranks; "
                    "log never communicates. Call .full_tensor() on every rank and log the result."
                )
            local = value.to_local()  # type: ignore[attr-defined]  # a DTensor
        # A copy, because the caller may change the tensor in place (loss /= 4) before the next flush.
        return local.detach().reshape(()).clone()
    if isinstance(value, (np.generic, np.ndarray)) and value.size == 1:
        return float(value.item())
    advice = " Use log_dict for several values." if isinstance(value, dict) else ""
    raise LoggedValueError(
        f"log({name!r}) got a {type(value).__name__}; expected a number, a tensor with one element or a torchmetrics "
        f"Metric.{advice}"
    )


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Return the accumulation dtype: float64, or float32 if the device has no float64."""
    return torch.float64 if properties(device.type).has_float64 else torch.float32


def pick(values: Sequence[float], kind: str) -> float:
    """Return the smallest (`"min"`) or largest (`"max"`) number, or NaN if any number is NaN."""
    if any(value != value for value in values):
        return float("nan")
    return min(values) if kind == "min" else max(values)


class MetricSlot:
    """Values logged under one key: a metric's name with the suffix of its evaluation loader, if any."""

    __slots__ = (
        *("name", "suffix", "settings", "options", "metric", "last_metric", "loader", "on_step", "on_epoch", "is_free"),
        *("values", "weights", "last", "last_weight", "is_new", "weight", "weigh", "weigh_step"),
        *("chunks", "totals", "host_total", "host_extreme", "seen_step", "seen_epoch"),
    )

    def __init__(self, name: str, suffix: str, settings: MetricSettings) -> None:
        self.name = name
        self.suffix = suffix
        self.options: tuple[Any, ...] | None = None  # of the latest call of `log`, to compare with the next
        self.last: Any = None  # the latest value of a step since the last flush; with metric objects also a dict
        self.last_weight: float = 1.0  # in a mean over ranks
        self.is_new = False  # True: `last` is of the current batch of an evaluation
        self.seen_step: Any = None  # the `last` that was read before a flush
        self.values: list[float | Tensor] = []  # pending ones of the epoch, at most FOLD_EVERY
        self.weights: list[float] = []
        self.metric: Any = None  # the torchmetrics object, when that is what was logged
        self.last_metric: Any = None  # the last torchmetrics object, also of an earlier epoch
        self.loader: int | None = None  # index of the evaluation loader, if there are several
        self.clear_epoch()
        self.configure(settings)

    @property
    def key(self) -> str:
        """The name with the dataloader's suffix."""
        return self.name + self.suffix

    @property
    def kind(self) -> str:
        """`"mean"`, `"sum"`, `"min"`, `"max"` or `"custom"`."""
        reduction = self.settings.reduction
        return reduction if isinstance(reduction, str) else "custom"

    def configure(self, settings: MetricSettings) -> None:
        """Set the options for this epoch."""
        self.settings = settings
        self.is_free = False  # True: a new epoch has begun, and the next `log` may choose other options
        self.metric = None  # after a resume, `log` may choose another one too
        self.on_step, self.on_epoch = settings.on_step, settings.on_epoch
        mean = settings.reduction == "mean"
        self.weigh = mean and settings.on_epoch
        self.weigh_step = mean and settings.on_step and settings.sync_dist is True
        if not settings.on_step:
            self.last = None

    def reconfigure(self, settings: MetricSettings) -> None:
        """Set the options at the first `log` of an epoch, or at the first after a resume."""
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
        self.weight: float = 0.0
        self.host_total: float = 0.0
        self.host_extreme: float | None = None
        self.totals: dict[torch.device, Tensor] = {}
        self.chunks: list[Tensor | list[float]] = []
        self.seen_epoch: tuple[float, int, int] | None = None  # the `epoch_count` up to which the aggregate was read

    def observe(self, metric: object) -> None:
        """Store a torchmetrics object. Its value in this step is the last result of its `forward`."""
        if self.metric is not None and self.metric is not metric:
            raise ConfigurationError(
                f"log({self.key!r}) got two different metric objects in one epoch; give each its own name."
            )
        self.metric = self.last_metric = metric
        if self.on_step:
            # torchmetrics keeps the batch's value under this name only. Without a forward: the accumulated value.
            batch_value = getattr(metric, "_forward_cache", None)
            self.last = batch_value if batch_value is not None else metric
            self.is_new = True

    def begin_epoch(self) -> None:
        """Start an epoch: clear the values, allow other options, and reset an unfinished metric object."""
        self.clear_epoch()
        self.is_free = True
        self.is_new = False
        self.options = None
        if self.metric is not None:
            reset_metric(self.metric)
            self.metric = None

    @property
    def has_epoch_values(self) -> bool:
        """True if anything was logged for the epoch's aggregate."""
        return bool(self.values or self.totals or self.chunks or self.host_extreme is not None)

    @property
    def epoch_count(self) -> tuple[float, int, int]:
        """Numbers that change with each value that is logged for the epoch."""
        return self.weight, len(self.values), getattr(self.metric, "_update_count", 0)

    def fold(self) -> None:
        """Add the pending values to the aggregate, with one `torch.stack` per device and dtype. Does not wait."""
        if self.kind == "custom":  # in their order
            for kind, run in itertools.groupby(self.values, _place_and_dtype):
                values: list[Any] = list(run)
                self.chunks.append(values if kind is None else torch.stack(values))
        else:
            groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[float]]] = {}
            host = [] if self.host_extreme is None else [self.host_extreme]
            for value, weight in zip(self.values, self.weights, strict=True):
                if isinstance(value, float):
                    self.host_total += value * weight
                    host.append(value)
                else:
                    tensors, weights = groups.setdefault((value.device, value.dtype), ([], []))
                    tensors.append(value)
                    weights.append(weight)
            for (device, _), (tensors, weights) in groups.items():
                self._fold_device(device, tensors, weights)
            self.host_extreme = pick(host, self.kind) if host else None
            self.weight += sum(self.weights)
        self.values.clear()
        self.weights.clear()

    def _fold_device(self, device: torch.device, tensors: list[Tensor], weights: list[float]) -> None:
        stacked = torch.stack(tensors).to(accumulator_dtype(device))
        before = self.totals.get(device)
        if self.kind in ("min", "max"):
            known = stacked if before is None else torch.cat([before.reshape(1), stacked])
            self.totals[device] = known.amin() if self.kind == "min" else known.amax()
            return
        if weights.count(weights[0]) == len(weights):
            folded = stacked.sum() * weights[0]
        else:
            # Weights are kernel arguments: a tensor made of them would be a copy that waits for the device.
            folded = torch.stack(torch._foreach_mul(stacked.unbind(), weights)).sum()
        self.totals[device] = folded if before is None else before + folded


def _place_and_dtype(value: float | Tensor) -> tuple[torch.device, torch.dtype] | None:
    return None if isinstance(value, float) else (value.device, value.dtype)


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
        found: list[float] = []
        self._tensors.append((value, found))
        return found

    def read(self) -> None:
        """Read every requested tensor. Waits for the devices, once each."""
        by_device: dict[torch.device, list[tuple[Tensor, list[float]]]] = {}
        for tensor, found in self._tensors:
            by_device.setdefault(tensor.device, []).append((tensor, found))
        for device, pairs in by_device.items():
            dtype = accumulator_dtype(device)
            flat = torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor, _ in pairs])
            values = iter(flat.tolist())
            for tensor, found in pairs:
                found.extend(itertools.islice(values, tensor.numel()))


State = dict[str, Any]
Numbers = dict[int, list[float]]  # of tensors, by their ids
_PLAIN = ("name", "suffix", "weight", "host_total", "host_extreme", "last_weight")


def slot_states(slots: Mapping[str, MetricSlot]) -> dict[str, State]:
    """Return the states of slots, as nested dicts and lists of numbers. Waits for each device once.

    Pending values stay pending, so that a resumed run adds them in the same order and gets identical sums.
    """
    reads, numbers = HostReads(), Numbers()
    for slot in slots.values():
        for value in (*slot.values, *slot.totals.values(), *slot.chunks, slot.last):
            if isinstance(value, Tensor) and id(value) not in numbers:
                numbers[id(value)] = reads.add(value)
    reads.read()
    return {key: _slot_state(slot, numbers) for key, slot in slots.items()}


def _slot_state(slot: MetricSlot, numbers: Numbers) -> State:
    reduction = slot.settings.reduction if isinstance(slot.settings.reduction, str) else None
    return {
        "settings": {**slot.settings._asdict(), "reduction": reduction},
        **{field: getattr(slot, field) for field in _PLAIN},
        "values": pack(slot.values, numbers),
        "weights": list(slot.weights),
        "totals": {device.type: float(numbers[id(total)][0]) for device, total in slot.totals.items()},
        "chunks": [pack(chunk if isinstance(chunk, list) else [chunk], numbers) for chunk in slot.chunks],
        "last": pack([slot.last], numbers) if isinstance(slot.last, (float, Tensor)) else None,
    }


def restored_slot(state: Mapping[str, Any], device: torch.device) -> MetricSlot:
    """Return a slot with a state from `slot_states`. Device values are copied to `device`."""
    slot = MetricSlot(state["name"], state["suffix"], MetricSettings(**state["settings"]))
    slot.values, slot.weights = _unpack(state["values"], device), list(state["weights"])
    slot.weight, slot.host_total, slot.host_extreme = state["weight"], state["host_total"], state["host_extreme"]
    for name, total in state["totals"].items():
        place = _place(name, device)
        slot.totals[place] = torch.tensor(total, dtype=accumulator_dtype(place), device=place)
    for chunk in state["chunks"]:
        values = _unpack(chunk, device)
        slot.chunks.append(torch.stack(values) if values and isinstance(values[0], Tensor) else values)
    if state["last"] is not None:
        slot.last, slot.last_weight = _unpack(state["last"], device)[0], state["last_weight"]
    slot.is_free = True  # the code may have changed since
    return slot


def pack(values: Iterable[float | Tensor], read: Numbers) -> State:
    """Return values as lists of numbers: one list for the host, and one per device type and dtype.

    `read` contains the numbers of each tensor by its `id`.
    """
    kinds: list[str] = []
    numbers: dict[str, list[float]] = {}
    for value in values:
        if isinstance(value, float):
            kind, found = "", [value]
        else:
            kind = f"{value.device.type}/{str(value.dtype).removeprefix('torch.')}"
            found = read[id(value)]
        kinds += [kind] * len(found)
        numbers.setdefault(kind, []).extend(found)
    return {"kinds": kinds, "numbers": numbers}


def _unpack(packed: Mapping[str, Any], device: torch.device) -> list[Any]:
    found: dict[str, Iterator[Any]] = {"": iter(packed["numbers"].get("", ()))}
    for kind in packed["numbers"].keys() - {""}:
        place, _, dtype = kind.partition("/")
        values = torch.tensor(packed["numbers"][kind], dtype=getattr(torch, dtype), device=_place(place, device))
        found[kind] = iter(values.unbind())
    return [next(found[kind]) for kind in packed["kinds"]]


def _place(name: str, device: torch.device) -> torch.device:
    """Return the device for a value that was on the device `name`; the host stays the host."""
    return torch.device("cpu") if name == "cpu" else device
