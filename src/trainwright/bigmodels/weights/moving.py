"""Parsing and checks of devices, and moves of the inputs and outputs of a forward."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch

from trainwright.core import tree
from trainwright.core.errors import ConfigurationError
from trainwright.core.host.device_types import properties

Device = int | str | torch.device

_PLAIN = (int, float, str, type(None))  # frequent inputs of a forward that hold no tensor


def to_device(device: Device) -> torch.device:
    """Convert to a `torch.device`. A number is an index of the current accelerator type.

    A device type without an index gets the index of the current device, except `"cpu"`, `"mps"` and `"meta"`, which
    have only one. The machine need not have the device.

    Raises:
        ConfigurationError: torch does not know the device.
    """
    if isinstance(device, str) and device.isdecimal():
        device = int(device)
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"device {device!r} is not known: {reason}") from error
    index: int | None = parsed.index  # torch's annotation lacks None
    has_several = parsed.type != "meta" and not properties(parsed.type).is_unified
    if index is None and has_several:
        current_index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0
        return torch.device(parsed.type, current_index)
    return parsed


def checked_device(device: Device) -> torch.device:
    """Convert to a `torch.device` and initialize the device. Raise ConfigurationError if it does not exist."""
    parsed = to_device(device)
    try:
        torch.empty(0, device=parsed)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:  # depends on the backend
        here = "no accelerator"
        if torch.accelerator.is_available():
            here = f"{torch.accelerator.device_count()} × {default_device().type}"
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"device {device!r} is not on this machine, which has {here}: {reason}") from error
    return parsed


def check_available(device_map: Mapping[str, Device]) -> None:
    """Raise a ConfigurationError that names the entry if this machine lacks a device of a device map."""
    checked: set[Device] = {"disk"}  # which is not a device of torch
    for name, device in device_map.items():
        if device not in checked:
            checked.add(device)
            try:
                checked_device(device)
            except ConfigurationError as error:
                raise ConfigurationError(f"device_map[{name!r}]: {error}") from error


def default_device() -> torch.device:
    """Return the current accelerator, or the CPU without one."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None else to_device(accelerator)


def move_inputs(values: object, device: torch.device, skip_keys: Collection[str] = ()) -> Any:
    """Move the tensors in `values` to `device`. Return `values` itself if all tensors are already on the device.

    Values of the dict keys in `skip_keys`, at every depth, are not moved. Blocks if a tensor is copied to the host.
    """
    if not _needs_move(values, device, skip_keys):
        return values
    return _move_except(values, device, skip_keys) if skip_keys else tree.move(values, device)


def _move_except(values: Any, device: torch.device, skip_keys: Collection[str]) -> Any:
    """Move the tensors in `values`, except those of dict keys in `skip_keys`."""
    if isinstance(values, dict):
        changed = values.copy()  # keeps subclasses such as an OrderedDict of outputs
        for key, value in values.items():
            if key not in skip_keys:
                changed[key] = _move_except(value, device, skip_keys)
        return changed
    if type(values) in (list, tuple):
        return type(values)(_move_except(value, device, skip_keys) for value in values)
    return tree.move(values, device)


def _needs_move(values: object, device: torch.device, skip_keys: Collection[str]) -> bool:
    """Return whether a tensor in `values` is on another device. True for dataclasses and objects with a `to` method."""
    if isinstance(values, torch.Tensor):
        return values.device != device
    if isinstance(values, _PLAIN):
        return False
    if isinstance(values, (list, tuple)):
        for value in values:  # plain loops, for speed: this runs in every call of every module
            if type(value) is torch.Tensor:
                if value.device != device:
                    return True
            elif _needs_move(value, device, skip_keys):
                return True
        return False
    if isinstance(values, Mapping):
        for key, value in values.items():  # noqa: SIM110
            if key not in skip_keys and _needs_move(value, device, skip_keys):
                return True
        return False
    return callable(getattr(values, "to", None)) or dataclasses.is_dataclass(values)


def find_device(values: object) -> torch.device | None:
    """Return the device of the first tensor in `values`, or None without tensors."""
    first = next(tree.iterate_tensors(values), None)
    return None if first is None else first.device
