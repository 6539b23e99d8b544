"""Names and memory budgets of the devices of a device map."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from math import isfinite

import torch

from trainwright.bigmodels.maps.placement import Device
from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.host.byte_sizes import convert_file_size_to_int
from trainwright.core.host.device_types import properties
from trainwright.core.host.memory import available_host_memory_bytes

_WORDS = ("cpu", "disk", "mps", "meta")


def parse_device(device: Device | torch.device) -> Device:
    """Return the name of a device in device maps: an index, `"cpu"`, `"disk"`, `"meta"`, or a name like `"xpu:1"`.

    Converts an index in text to a number. Does not check that this machine has the device.

    Raises:
        ConfigurationError: torch does not know the device.
    """
    if isinstance(device, torch.device):
        return str(device)
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    if isinstance(device, str) and device.isdecimal():
        return int(device)
    if device in _WORDS:
        return device
    try:
        return str(torch.device(str(device)))
    except RuntimeError as error:
        raise ConfigurationError(
            f"device {device!r} is unknown.{nearest(str(device), _WORDS)} Write the index of an accelerator (0, 1, …), "
            "'cpu', 'disk', 'mps', 'meta', or a device of torch such as 'cuda:1' or 'xpu:0'."
        ) from error


def get_max_memory(
    max_memory: Mapping[Device, float | str] | None = None,
) -> dict[Device, int]:
    """Return bytes per device in the order in which devices are filled: accelerators, then `"cpu"`, then `"disk"`.

    Args:
        max_memory: Device → bytes (rounded down), or text such as `"10GiB"`. Other devices are not used, except the
            disk for modules that fit no other device. None uses the free memory of every accelerator and of the host;
            measuring it initializes the accelerators and waits for them. As in Accelerate, text in a dict is replaced
            by its number of bytes, because transformers reads the dict afterwards.

    Raises:
        ConfigurationError: A device is unknown or named twice, or an amount of memory is invalid.
    """
    budgets = memory_budgets(max_memory)
    if isinstance(max_memory, MutableMapping):
        for name, size in max_memory.items():
            if isinstance(size, str):
                max_memory[name] = budgets[parse_device(name)]
    return budgets


def memory_budgets(max_memory: Mapping[Device, float | str] | None) -> dict[Device, int]:
    """Return what `get_max_memory` returns, without changing `max_memory`."""
    if max_memory is None:
        return _free_memory()
    budgets: dict[Device, int] = {}
    for name, size in max_memory.items():
        device = parse_device(name)
        if device in budgets:
            raise ConfigurationError(f"max_memory names the device {device!r} twice: {list(max_memory)}.")
        number = int(size) if isinstance(size, float) and isfinite(size) else size
        budgets[device] = convert_file_size_to_int(number)  # type: ignore[arg-type]  # it refuses other floats
    return dict(sorted(budgets.items(), key=lambda item: _filling_order(item[0])))


def _filling_order(device: Device) -> tuple[int, str, int]:
    if isinstance(device, int):
        return (0, "", device)
    kind, _, index = device.partition(":")
    return ({"cpu": 2, "disk": 3, "meta": 4}.get(kind, 1), kind, int(index or 0))


def _free_memory() -> dict[Device, int]:
    host = available_host_memory_bytes()
    if not torch.accelerator.is_available():
        return {"cpu": host}
    kind = torch.accelerator.current_accelerator()
    module = torch.get_device_module(kind)
    if kind is not None and hasattr(module, "mem_get_info"):
        return {**{i: int(module.mem_get_info(i)[0]) for i in range(torch.accelerator.device_count())}, "cpu": host}
    # Apple's accelerator shares the host's memory, which must not be counted twice.
    return {kind.type: host} if kind is not None and properties(kind.type).is_unified else {"cpu": host}
