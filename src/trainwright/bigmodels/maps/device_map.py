"""Device maps (module name → device of its weights), computed from a model's sizes and the devices' budgets."""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from math import isfinite
from typing import TypeVar

import torch
from torch import nn

from trainwright.bigmodels.maps.device_assignment import (
    Device,
    DeviceAssignment,
    Outline,
    assign_devices,
    is_accelerator,
    largest_layer,
    outermost,
)
from trainwright.bigmodels.maps.explain import DeviceMapReport, explain
from trainwright.bigmodels.maps.sizes import (
    DType,
    class_names,
    compute_module_sizes,
    enclosing,
    read_outline,
)
from trainwright.core.errors import ConfigurationError, TrainwrightWarning, nearest
from trainwright.core.host.byte_sizes import convert_file_size_to_int, format_bytes
from trainwright.core.host.device_types import properties
from trainwright.core.host.memory import available_host_memory_bytes

# `clean_device_map` returns the type of devices that it receives.
AnyDevice = TypeVar("AnyDevice", bound=Device | torch.device)
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Device]:
    """Assign a model's modules to devices. Devices are filled one after the other, with modules in registration order.

    The first accelerator in use also computes the layers on the host and on disk, and reserves memory for the largest
    of these layers. Modules that share a tensor are assigned to one device. No tensor is moved or allocated.

    A warning is issued for accelerators that are not used because they cannot hold the largest layer.

    Args:
        model: A model on any device, the meta device included.
        max_memory: See `get_max_memory`. Modules that fit no device are assigned to `"disk"`.
        no_split_module_classes: Names of classes whose modules stay on one device, such as blocks with a residual
            connection.
        dtype: Dtype that the weights will be loaded in. See `compute_module_sizes`.
        special_dtypes: Name of a tensor → dtype of this tensor.
        verbose: Print a report. See `explain_device_map`.
        clean_result: Name a module instead of its children if all of them are on one device.
        offload_buffers: Also offload the buffers of offloaded modules. By default, these buffers stay on the device
            that computes the modules. A warning is issued if they do not fit.
        fallback_allocation: If the next module does not fit an empty device, place the first later module that fits.

    Returns:
        Module or tensor name → device, in the model's order. `{"": device}` if the model is on one device.

    Raises:
        ConfigurationError: A device, size or dtype is unknown, or no device can hold the largest layer.
    """
    outline = read_outline(
        model, no_split_module_classes=no_split_module_classes, dtype=dtype, special_dtypes=special_dtypes
    )
    budgets = _with_disk(max_memory)
    assignment = assign_devices(outline, budgets, fallback=fallback_allocation)
    _warn_of_skipped_devices(outline, assignment, budgets)
    device_map = _by_name(outline, assignment)
    if not offload_buffers:
        buffer_sizes = compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)
        _warn_of_buffers(outline, device_map, assignment, budgets, buffer_sizes)
    if verbose:
        cleaned = clean_device_map(dict(device_map))
        report = explain(outline, budgets, assignment, cleaned, fallback=fallback_allocation)
        sys.stdout.write(f"{report}\n")
    if clean_result:
        clean_device_map(device_map)
    return device_map


def explain_device_map(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
    fallback_allocation: bool = False,
) -> DeviceMapReport:
    """Report which device `infer_auto_device_map` would choose for each module, why, and how much memory is missing.

    The arguments and errors are those of `infer_auto_device_map`. The report can be printed.
    """
    outline = read_outline(
        model, no_split_module_classes=no_split_module_classes, dtype=dtype, special_dtypes=special_dtypes
    )
    budgets = _with_disk(max_memory)
    assignment = assign_devices(outline, budgets, fallback=fallback_allocation)
    device_map = clean_device_map(_by_name(outline, assignment))
    return explain(outline, budgets, assignment, device_map, fallback=fallback_allocation)


def _by_name(outline: Outline, assignment: DeviceAssignment) -> dict[str, Device]:
    """Convert indices of parts to names. Entries inside other entries are left out."""
    return {outline.names[part]: device for part, device in outermost(outline, assignment.device_of).items()}


def resolve_device_map(
    model: nn.Module,
    device_map: str | Mapping[str, Device | torch.device],
    *,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
    offload_buffers: bool = False,
) -> dict[str, Device | torch.device]:
    """Return the device map for a name such as `"auto"`, or return a map after checking it.

    Args:
        model: A model on any device.
        device_map: `"auto"` or `"balanced"`: distribute evenly over the accelerators. `"balanced_low_0"`: distribute
            evenly, with as little as possible on the first accelerator. `"sequential"`: fill each device before the
            next one. A map from names to devices is checked. Names that the model does not have are removed, with a
            warning.
        max_memory: See `get_max_memory`. This argument and those below have no effect if `device_map` is a map.
        no_split_module_classes, dtype, special_dtypes, offload_buffers: See `infer_auto_device_map`.

    Raises:
        ConfigurationError: The name is unknown, `check_device_map` rejects the map, or see `infer_auto_device_map`.
    """
    if not isinstance(device_map, str):
        unknown = _check(model, device_map, strict=False)
        return {name: device for name, device in device_map.items() if name not in unknown}
    if device_map not in DEVICE_MAPS:
        raise ConfigurationError(
            f"device_map={device_map!r} is unknown.{nearest(device_map, DEVICE_MAPS)} Write one of "
            f"{', '.join(DEVICE_MAPS)}, or a map from module names to devices."
        )
    if device_map != "sequential":
        max_memory = get_balanced_memory(
            model,
            max_memory=max_memory,
            no_split_module_classes=no_split_module_classes,
            dtype=dtype,
            special_dtypes=special_dtypes,
            low_zero=device_map == "balanced_low_0",
        )
    inferred = infer_auto_device_map(
        model,
        max_memory=max_memory,
        no_split_module_classes=no_split_module_classes,
        dtype=dtype,
        special_dtypes=special_dtypes,
        offload_buffers=offload_buffers,
    )
    return dict(inferred)  # a copy, because mypy does not accept a dict for one with a wider type of values


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: Sequence[str] | str | None = None,
    dtype: DType | None = None,
    special_dtypes: Mapping[str, DType] | None = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Lower the accelerators' budgets so that filling them one after the other spreads a model evenly.

    Each budget becomes an equal fraction of the model plus an allowance, because modules are not split at the exact
    boundary. The allowance is 1.25 times the largest module of `no_split_module_classes`, or 1.25 times the mean size
    of modules without submodules if this is larger. Budgets are never increased. The last accelerator with a
    budget above 0 keeps it.

    For example, a model of 40 GiB with blocks of 1 GiB on 4 accelerators of 80 GiB: the first three get 11.25 GiB, and
    the last one 80 GiB. With `low_zero`, the fraction is 40 / 3 GiB, and the first one gets nothing.

    Args:
        model: A model on any device.
        max_memory: See `get_max_memory`. If `max_memory` is None and there is one accelerator, 10 % of its memory stay
            free.
        no_split_module_classes, dtype, special_dtypes: See `infer_auto_device_map`.
        low_zero: Place only those modules on the first accelerator that do not fit the other accelerators.

    Raises:
        ConfigurationError: A device, size or dtype is unknown.
    """
    budgets = memory_budgets(max_memory)
    accelerators = [device for device in budgets if is_accelerator(device)]
    used = [device for device in accelerators if budgets[device] > 0]
    if len(used) < 2:
        if max_memory is None:
            for device in accelerators:
                budgets[device] = int(budgets[device] * 0.9)
        return budgets
    outline = read_outline(model, dtype=dtype, special_dtypes=special_dtypes)
    total = outline.sizes_bytes[0]
    # The first accelerator may have no budget. Then it has nothing that `low_zero` could lower.
    is_first_lowered = low_zero and used[0] == accelerators[0]
    shared = used[1:] if is_first_lowered else used
    share = total // len(shared) + _allowance(model, outline, no_split_module_classes)
    for device in shared[:-1]:
        budgets[device] = min(budgets[device], share)
    if is_first_lowered:
        # After the others are lowered: the first one gets the rest of the model.
        first, *others = used
        remaining = total - sum(budgets[device] for device in others)
        budgets[first] = min(budgets[first], max(0, remaining))
    return budgets


def _allowance(model: nn.Module, outline: Outline, no_split_module_classes: Sequence[str] | str | None) -> int:
    """Return the bytes by which a budget exceeds the equal fraction. See `get_balanced_memory`."""
    no_split = class_names(no_split_module_classes)
    sizes = dict(zip(outline.names, outline.sizes_bytes, strict=True))
    layer_sizes: list[int] = []
    largest_block = 0
    for name, module in model.named_modules():
        if not sizes[name]:
            continue
        if next(module.children(), None) is None:
            layer_sizes.append(sizes[name])
        if type(module).__name__ in no_split:
            largest_block = max(largest_block, sizes[name])
    mean = sum(layer_sizes) // max(1, len(layer_sizes))
    return int(1.25 * max(mean, largest_block))


def check_device_map(
    model: nn.Module, device_map: Mapping[str, Device | torch.device], *, strict: bool = False
) -> None:
    """Check that a device map covers every parameter and every persistent buffer, and that its devices are valid.

    Args:
        model: A model on any device.
        device_map: Name of a module, parameter or buffer (`""` for all) → device.
        strict: Raise for names that the model does not have. By default a warning names them.

    Raises:
        ConfigurationError: The map does not cover all parameters and persistent buffers (the message lists missing
            ones), a device is invalid, or, with `strict`, the model does not have a name of the map.
    """
    _check(model, device_map, strict)


def _check(model: nn.Module, device_map: Mapping[str, Device | torch.device], strict: bool) -> list[str]:
    """Check a device map, and return the names in it that the model does not have."""
    check_devices(device_map)
    missing = [name for name in _saved_names(model) if not any(part in device_map for part in enclosing(name))]
    if missing:
        raise ConfigurationError(
            "The device_map provided does not give any device for the following parameters: "
            f"{', '.join(missing)}. Add them, or a module that they are in, or '' for all the rest."
        )
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known = set(modules)
    known.update(name for name, _ in model.named_parameters(remove_duplicate=False))
    known.update(name for name, _ in model.named_buffers(remove_duplicate=False))
    unknown = [name for name in device_map if name not in known]
    if unknown:
        message = (
            f"The following device_map keys do not match any submodules in the model: {unknown}."
            f"{nearest(unknown[0], modules)}"
        )
        if strict:
            raise ConfigurationError(message)
        warnings.warn(message, TrainwrightWarning, stacklevel=3)
    return unknown


def check_devices(device_map: Mapping[str, Device | torch.device]) -> None:
    """Raise ConfigurationError unless a device map maps names to devices of torch. The machine need not have them."""
    if not isinstance(device_map, Mapping):
        raise ConfigurationError(
            f"device_map={device_map!r}, expected a map from names of modules to devices, such as {{'': 'cpu'}}. Call "
            "infer_auto_device_map to compute one. Only load_checkpoint_and_dispatch and dispatch_model accept a name "
            f"({', '.join(DEVICE_MAPS)})."
        )
    for name, device in device_map.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"device_map has the key {name!r}, expected the name of a module, or '' for all.")
        try:
            parse_device(device)
        except ConfigurationError as error:
            raise ConfigurationError(f"device_map[{name!r}]: {error}") from error


def _saved_names(model: nn.Module) -> list[str]:
    """Return the names of all parameters and persistent buffers. Tied tensors have several names."""
    names: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        names += [name for name, _ in module.named_parameters(path, recurse=False, remove_duplicate=False)]
        for name, _ in module.named_buffers(path, recurse=False, remove_duplicate=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                names.append(name)
    return names


def clean_device_map(
    device_map: MutableMapping[str, AnyDevice], module_name: str = ""
) -> MutableMapping[str, AnyDevice]:
    """Replace the entries of a module's children by one entry for the module, if all are on one device.

    The map is changed in place and returned, without a change of order. No entry may be inside the module of another
    entry. Only entries in `module_name` are changed.
    """
    prefix = f"{module_name}." if module_name else ""
    # For {"a.0": 0, "a.1": 0, "b": 1} and the whole model:
    #   modules_of  {"a.0": ["", "a", "a.0"], "a.1": ["", "a", "a.1"], "b": ["", "b"]}
    #   devices     {"": {0, 1}, "a": {0}, "a.0": {0}, "a.1": {0}, "b": {1}}
    #   cleaned     {"a": 0, "b": 1}: each entry becomes its outermost module with one device
    modules_of: dict[str, list[str]] = {}  # name of an entry → modules that may replace it, outermost first
    devices: defaultdict[str, set[AnyDevice]] = defaultdict(set)  # module → devices of its entries
    for name, device in device_map.items():
        modules_of[name] = [part for part in enclosing(name) if part == module_name or part.startswith(prefix)]
        for module in modules_of[name]:
            devices[module].add(device)
    cleaned: dict[str, AnyDevice] = {}
    for name, device in device_map.items():
        on_one_device = (module for module in modules_of[name] if len(devices[module]) == 1)
        # An entry outside `module_name` has no such module, and stays.
        cleaned[next(on_one_device, name)] = device
    device_map.clear()
    device_map.update(cleaned)
    return device_map


def _with_disk(max_memory: Mapping[Device, int | str] | None) -> dict[Device, int | None]:
    """Return the budgets with the disk as the last device, whose budget is unlimited by default."""
    budgets: dict[Device, int | None] = dict(memory_budgets(max_memory))
    budgets.setdefault("disk", None)
    return budgets


def _warn_of_skipped_devices(
    outline: Outline, assignment: DeviceAssignment, budgets: Mapping[Device, int | None]
) -> None:
    """Warn of accelerators that remain empty because they cannot hold the largest layer."""
    if not assignment.skipped:
        return
    needed, name = largest_layer(outline)
    skipped = ", ".join(f"{device!r}: {format_bytes(budgets[device] or 0)}" for device in assignment.skipped)
    warnings.warn(
        f"nothing is placed on {{{skipped}}}: the first accelerator in use also computes the offloaded layers, and "
        f"{name!r}, the largest one, needs {format_bytes(needed)}.",
        TrainwrightWarning,
        stacklevel=3,
    )


def _warn_of_buffers(
    outline: Outline,
    device_map: Mapping[str, Device],
    assignment: DeviceAssignment,
    budgets: Mapping[Device, int | None],
    buffer_sizes: Mapping[str, int],
) -> None:
    """Warn if the buffers of offloaded modules do not fit the computing device beside the largest offloaded layer."""
    runs_on = assignment.runs_on
    if runs_on is None:
        return
    budget = budgets[runs_on]
    needed = 0
    for name, device in device_map.items():
        if not is_accelerator(device):
            needed += buffer_sizes.get(name, 0)
    if budget is None or not needed:
        return
    streamed = 0  # parameters of the largest offloaded layer, which are copied to `runs_on` during its forward
    for index, device in assignment.device_of.items():
        if is_accelerator(device):
            continue
        for part in range(index, outline.ends[index]):
            if outline.is_layer[part]:
                size = outline.sizes_bytes[part] - buffer_sizes.get(outline.names[part], 0)
                streamed = max(streamed, size)
    free = budget - assignment.used_bytes[runs_on] - streamed
    if needed > free:
        warnings.warn(
            f"the buffers of offloaded modules take {format_bytes(needed)} and stay on device {runs_on!r}, which has "
            f"{format_bytes(max(free, 0))} free beside the largest offloaded layer ({format_bytes(streamed)}). If "
            "memory runs out, use offload_buffers=True.",
            TrainwrightWarning,
            stacklevel=3,
        )


_DEVICE_NAMES = ("cpu", "disk", "mps", "meta")


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
    if device in _DEVICE_NAMES:
        return device
    try:
        return str(torch.device(str(device)))
    except RuntimeError as error:
        raise ConfigurationError(
            f"device {device!r} is unknown.{nearest(str(device), _DEVICE_NAMES)} Write the index of an accelerator "
            "(0, 1, …), 'cpu', 'disk', 'mps', 'meta', or a device of torch such as 'cuda:1' or 'xpu:0'."
        ) from error


def get_max_memory(
    max_memory: Mapping[Device, float | str] | None = None,
) -> dict[Device, int]:
    """Return bytes per device in the order in which devices are filled: accelerators, then `"cpu"`, then `"disk"`.

    Args:
        max_memory: Device → bytes (rounded down), or text such as `"10GiB"`. Other devices are not used, except the
            disk for modules that fit no other device. None uses the free memory of every accelerator and of the host.
            Measuring the free memory initializes the accelerators and waits for them. As in Accelerate, text in the
            dict is replaced by the number of bytes in place, because transformers reads the dict afterwards.

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
    """Return the result of `get_max_memory` without changing `max_memory`."""
    if max_memory is None:
        return _free_memory()
    budgets: dict[Device, int] = {}
    for name, size in max_memory.items():
        device = parse_device(name)
        if device in budgets:
            raise ConfigurationError(f"max_memory names the device {device!r} twice: {list(max_memory)}. Keep one.")
        number = int(size) if isinstance(size, float) and isfinite(size) else size
        budgets[device] = convert_file_size_to_int(number)  # type: ignore[arg-type]  # it refuses other floats
    return dict(sorted(budgets.items(), key=lambda item: _filling_order(item[0])))


def _filling_order(device: Device) -> tuple[int, str, int]:
    """Return a sort key: 0, 1, …, then named accelerators such as "xpu:0", then "cpu", "disk" and "meta"."""
    if isinstance(device, int):
        return (0, "", device)
    kind, _, index = device.partition(":")
    return ({"cpu": 2, "disk": 3, "meta": 4}.get(kind, 1), kind, int(index or 0))


def _free_memory() -> dict[Device, int]:
    """Return the free bytes of each accelerator, and of the host."""
    host = available_host_memory_bytes()
    if not torch.accelerator.is_available():
        return {"cpu": host}
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    module = torch.get_device_module(kind)
    if not hasattr(module, "mem_get_info"):
        # Apple's accelerator shares the host's memory, which must not be counted twice.
        return {kind.type: host} if properties(kind.type).is_unified else {"cpu": host}
    budgets: dict[Device, int] = {}
    for index in range(torch.accelerator.device_count()):
        budgets[index] = int(module.mem_get_info(index)[0])
    budgets["cpu"] = host
    return budgets
