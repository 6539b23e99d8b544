"""State of the metrics of an unfinished epoch, for a checkpoint in its middle and the resume."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.loggers.metric_slot import MetricSettings, MetricSlot, accumulator_dtype, is_metric_object, pick

State = dict[str, Any]
Numbers = dict[int, list[float]]  # of tensors, by their ids


def slot_states(slots: Iterable[MetricSlot]) -> dict[str, State]:
    """Return the states of slots, by their keys, as trees of plain values; waits for the device, once for each dtype.

    Pending values stay pending, so that a resumed run adds them up in the same order, to the last bit.
    """
    asked = list(slots)
    numbers = _read(tensor for slot in asked for tensor in _tensors(slot))
    return {slot.key: _slot_state(slot, numbers) for slot in asked}


def _tensors(slot: MetricSlot) -> Iterator[Tensor]:
    held = (*slot.values, *slot.totals.values(), *slot.chunks, slot.last)
    return (value for value in held if isinstance(value, Tensor))


def _read(tensors: Iterable[Tensor]) -> Numbers:
    """Return the values of tensors by their ids: one copy for each device and dtype."""
    alike: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), {})[id(tensor)] = tensor
    found: Numbers = {}
    for group in alike.values():
        flat = iter(torch.cat([tensor.reshape(-1) for tensor in group.values()]).tolist())
        found |= {key: list(itertools.islice(flat, tensor.numel())) for key, tensor in group.items()}
    return found


def _slot_state(slot: MetricSlot, numbers: Numbers) -> State:
    reduction = slot.settings.reduction if isinstance(slot.settings.reduction, str) else None
    return {
        "name": slot.name,
        "suffix": slot.suffix,
        "settings": {**slot.settings._asdict(), "reduction": reduction},
        "values": _pack(slot.values, numbers),
        "weights": list(slot.weights),
        "weight": slot.weight,
        "host_total": slot.host_total,
        "host_extreme": slot.host_extreme,
        "totals": {device.type: float(numbers[id(total)][0]) for device, total in slot.totals.items()},
        "chunks": [_pack(chunk if isinstance(chunk, list) else [chunk], numbers) for chunk in slot.chunks],
        "last": _pack([slot.last], numbers) if isinstance(slot.last, (float, Tensor)) else None,
        "last_weight": slot.last_weight,
    }


def fill_slot(slot: MetricSlot, state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a slot from the result of `slot_states`; device values are put on `device`."""
    slot.values = _unpack(state["values"], device)
    slot.weights = list(state["weights"])
    slot.weight, slot.host_total, slot.host_extreme = state["weight"], state["host_total"], state["host_extreme"]
    for name, total in state["totals"].items():
        place = _place(name, device)
        slot.totals[place] = torch.tensor(total, dtype=accumulator_dtype(place), device=place)
    slot.chunks = [_chunk(_unpack(chunk, device)) for chunk in state["chunks"]]
    if state["last"] is not None:
        slot.last, slot.last_weight = _unpack(state["last"], device)[0], state["last_weight"]


def make_slot(state: Mapping[str, Any]) -> MetricSlot | None:
    """Return an empty slot for a state; None if it has a custom reduction, which only `log` knows."""
    if state["settings"]["reduction"] is None:
        return None
    return MetricSlot(state["name"], state["suffix"], MetricSettings(**state["settings"]))


def merge(states: Sequence[Mapping[str, Any]]) -> State:
    """Return the combined state of several ranks' aggregates."""
    merged = {**states[0], "values": _pack([], {}), "weights": [], "totals": {}, "chunks": [], "last": None}
    kind = merged["settings"]["reduction"]
    values = [value for state in states for value in _own_values(state)]
    if kind is None:
        merged["chunks"] = [_pack(values, {})]
        return merged
    merged["weight"] = sum(state["weight"] + sum(state["weights"]) for state in states)
    merged["host_total"], merged["host_extreme"] = sum(values), pick(values, kind) if values else None
    return merged


def _own_values(state: Mapping[str, Any]) -> list[float]:
    """Return the numbers whose reduction, by the state's own kind, gives its value; weighted for sums and means."""
    kind, host = state["settings"]["reduction"], torch.device("cpu")
    pending = [float(value) for value in _unpack(state["values"], host)]
    if kind is None:
        chunks = (_unpack(chunk, host) for chunk in state["chunks"])
        return [float(value) for chunk in chunks for value in chunk] + pending
    totals = list(state["totals"].values())
    if kind in ("mean", "sum"):
        weighted = [value * weight for value, weight in zip(pending, state["weights"], strict=True)]
        return [state["host_total"], *totals, *weighted]
    return [*([] if state["host_extreme"] is None else [state["host_extreme"]]), *totals, *pending]


def _pack(values: Sequence[float | Tensor], read: Numbers) -> State:
    """Return values as lists of numbers, one for each kind: the host, or a device type and dtype."""
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
    found: dict[str, Iterator[Any]] = {}
    for kind, numbers in packed["numbers"].items():
        if kind:
            place, _, dtype = kind.partition("/")
            found[kind] = iter(
                torch.tensor(numbers, dtype=getattr(torch, dtype), device=_place(place, device)).unbind()
            )
        else:
            found[kind] = iter(numbers)
    return [next(found[kind]) for kind in packed["kinds"]]


def _chunk(values: list[Any]) -> Tensor | list[float]:
    return torch.stack(values) if values and isinstance(values[0], Tensor) else values


def _place(name: str, device: torch.device) -> torch.device:
    """Return the device for a value that was on the device `name`; the host stays the host."""
    return torch.device("cpu") if name == "cpu" else device


def objects_state(module: torch.nn.Module) -> State:
    """Return the states of the torchmetrics objects in a module that have been updated, by their names in it.

    Their states are in no state dict unless a user asks for it (`persistent`).
    """
    return {
        name: {
            "update_count": part.update_count,
            "state": {key: _to_host(value) for key, value in part.metric_state.items()},
        }
        for name, part in _metric_parts(module)
        if part.update_called
    }


def load_objects_state(module: torch.nn.Module, states: Mapping[str, Any], device: torch.device) -> list[str]:
    """Restore the states of metric objects; return the names of those that the module does not have."""
    parts = dict(_metric_parts(module))
    for name, saved in states.items():
        part = parts.get(name)
        if part is None:
            continue
        for key, value in saved["state"].items():
            setattr(part, key, _to(value, device))
        # torchmetrics has no public way to mark a metric as updated.
        part._update_count, part._computed = saved["update_count"], None
    return [name for name in states if name not in parts]


def _metric_parts(module: torch.nn.Module) -> Iterable[tuple[str, Any]]:
    """Yield the Metrics in a module, those in collections one by one."""
    for name, part in module.named_modules():
        if not is_metric_object(part):
            continue
        if isinstance(part, torch.nn.ModuleDict):
            part.values(copy_state=False)  # type: ignore[call-arg]  # links the metrics that share a state
        elif hasattr(part, "update_called"):
            yield name, part


def _to_host(value: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    return [item.cpu() for item in value] if isinstance(value, list) else value.cpu()


def _to(value: torch.Tensor | list[torch.Tensor], device: torch.device) -> torch.Tensor | list[torch.Tensor]:
    return [item.to(device) for item in value] if isinstance(value, list) else value.to(device)
